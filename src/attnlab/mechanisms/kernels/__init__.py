"""Fused implementations in Triton: one file a mechanism, under the same stem; each is tested equal to its definition."""
