"""Grouped matrix products: one GEMM per expert over rows sorted by expert."""
