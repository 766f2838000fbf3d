"""The sparse mixture-of-experts block: routing, sorting by expert, grouped GEMMs with fused SwiGLU, combination."""
