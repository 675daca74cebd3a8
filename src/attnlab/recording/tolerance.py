"""How far two tensors that should be equal may lie apart: as far as their number type rounds, and no further."""

import torch
from torch import Tensor

CHECKED = 16  # positions of which a map that is the same for all of them is made again
# relative to 1 + the largest; many models take their softmax in float32, whatever their own type
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def difference(made: Tensor, expected: Tensor, rounding: float = 0.0) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest that rounding excuses: as their type rounds, and more."""
    allowed = (TOLERANCE[expected.dtype] + rounding) * (1 + expected.abs().max().item())
    return (made - expected).abs().max().item(), allowed


def close(made: Tensor, expected: Tensor) -> bool:
    error, allowed = difference(made, expected)
    return error <= allowed
