"""What the server withstands, measured: one case for each promise of the README's reliability table."""
