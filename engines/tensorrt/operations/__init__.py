"""Nodes of domain `loka`: by our kernels on a GPU, by the kernels' references on the CPU."""
