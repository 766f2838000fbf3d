"""Mods: named, reversible rewrites of a model that leave its function as it is and make FP8 safer or cheaper."""
