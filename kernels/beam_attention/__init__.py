"""Attention of beams over the shared context of their request."""
