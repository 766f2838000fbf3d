"""Measures the numerics of every GEMM on real histories, and chooses recipes from what it found."""
