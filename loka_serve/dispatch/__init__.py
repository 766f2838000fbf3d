"""Dispatch for people and builds: which library and recipe runs each site of a model, measured, kept and explained."""
