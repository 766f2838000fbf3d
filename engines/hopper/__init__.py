"""The engine for one Hopper GPU: our kernels and the libraries' that dispatch chose, whole requests in CUDA graphs."""
