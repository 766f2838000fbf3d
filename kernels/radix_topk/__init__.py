"""Exact, sorted top-k of the rows of a matrix."""
