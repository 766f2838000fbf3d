"""Finds the batch, delay and beam that serve a bundle fastest within a bound on latency, by measuring them."""
