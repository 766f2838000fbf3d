"""Reference models in plain PyTorch, one file each, and their checkpoints."""
