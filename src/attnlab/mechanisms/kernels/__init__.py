"""Fused implementations in Triton: one file a mechanism, under the same stem, each tested equal to its definition."""
