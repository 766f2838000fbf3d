"""SwiGLU and activation quantization in one pass."""
