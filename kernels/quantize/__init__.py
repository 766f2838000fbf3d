"""Rounding activations and weights to FP8 (E4M3) or INT8 with the scales of each recipe."""
