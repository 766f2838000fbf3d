"""Residual addition, RMSNorm and activation quantization in one pass."""
