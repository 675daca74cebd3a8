"""Analyses: each reads a Record and returns a table. None imports a model."""
