"""Self-attention of beams over their own few positions, through pointers to their ancestors."""
