"""The drift guard: notices traffic that calibration has not seen, and runs the sites it reaches in BF16 meanwhile."""
