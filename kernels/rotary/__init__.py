"""Rotary position encoding of queries and context keys."""
