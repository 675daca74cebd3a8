"""Tolerances for comparing two tensors that should be equal up to the rounding of their dtype."""

import torch
from torch import Tensor

CHECKED_POSITIONS = 16  # number of positions to recompute where a map is the same at all positions
# relative to 1 + the largest absolute value; many models compute their softmax in float32, whatever their dtype
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def measure_difference(actual: Tensor, expected: Tensor, rounding: float = 0.0) -> tuple[float, float]:
    """Return the largest difference of two tensors and the largest that is allowed: by their dtype, plus `rounding`."""
    allowed = (TOLERANCE[expected.dtype] + rounding) * (1 + expected.abs().max().item())
    return (actual - expected).abs().max().item(), allowed


def is_close(actual: Tensor, expected: Tensor) -> bool:
    error, allowed = measure_difference(actual, expected)
    return error <= allowed
