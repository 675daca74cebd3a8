"""Decoding text from a model and scoring it."""
