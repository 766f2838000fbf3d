"""Precision recipes, the plan that gives each site one, and the methods that compute by it."""
