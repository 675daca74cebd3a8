"""What a mechanism's `turn` does to the context of each query, as a tensor: a factor, or a matrix.

Contributions pass through a linear map unchanged in number: (Σ_j α_ij v_j) A_i = Σ_j α_ij (v_j A_i). So a gated
attention has exact contributions once A_i is known. It is read off `turn` and proved on a random context.
"""

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, Sides
from attnlab.records.record import apply_turning
from attnlab.records.tolerance import is_close, measure_difference


def read_turning(mechanism: Mechanism, context: Tensor, v: Tensor, at: Tensor | None, sides: Sides) -> Tensor | None:
    """Return the turning of every query: None, a factor (b,h,i,1) or (b,h,i,d), or a matrix (b,h,i,d,d).

    Raises ValueError if `turn` is not linear in each query's context.
    """
    if type(mechanism).turn is Mechanism.turn:
        return None

    def turn(x: Tensor) -> Tensor:
        return mechanism.turn(x.to(context.dtype), v, at, sides)

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(context.shape, generator=generator, dtype=torch.float32).to(context)
    factor, expected = turn(torch.ones_like(context)), turn(drawn)
    if is_close(factor * drawn, expected):
        return factor[..., :1].clone() if torch.equal(factor, factor[..., :1].expand_as(factor)) else factor
    basis = torch.eye(context.shape[-1], device=context.device)
    matrix = torch.stack([turn(row.expand_as(context)) for row in basis], dim=-2)  # (b,h,i,d,d)
    turned = apply_turning(matrix, drawn)
    if not is_close(turned, expected):
        error, _ = measure_difference(turned, expected)
        name = type(mechanism).__name__
        raise ValueError(f"{name}.turn is not linear in the context (off by {error:.2g}), so it cannot be recorded")
    one = matrix[:1, :, :1]
    return one.clone().expand_as(matrix) if torch.equal(matrix, one.expand_as(matrix)) else matrix
