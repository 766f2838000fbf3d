"""loka-serve: build and serve OneRec-style generative recommenders in FP8 on Hopper GPUs."""

__version__ = "0.1.0"
