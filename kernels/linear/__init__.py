"""Matrix products of quantized activations and weights: one GEMM per site."""
