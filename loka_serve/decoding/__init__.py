"""Constrained beam search over the catalog's trie: the step loop, selection and item expansion."""
