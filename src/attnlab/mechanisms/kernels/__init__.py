"""Fused implementations in Triton: one file per mechanism, with the same stem, each tested against its definition.

Kernels have long parameter lists, because Triton takes every pointer, size and stride as a separate argument. So have
the operators around them (`launch.Operator`): an operator takes tensors and numbers only.
"""
