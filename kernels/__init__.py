"""GPU kernels, one folder per operation: the reference beside the fast version; imports nothing of loka_serve."""
