"""Scripts that measure and write benchmarks/results/, and the generator of the README's tables."""
