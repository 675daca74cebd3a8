"""Models: what holds a mechanism, and what watches it."""
