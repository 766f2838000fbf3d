"""Rows of a context from the codes of its items: embeddings gathered, added up and quantized in one pass."""
