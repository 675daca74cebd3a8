"""Runs, measures and claims: one file a paper, and the demo."""
