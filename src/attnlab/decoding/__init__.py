"""Decode text from a model, score it and evaluate runs."""
