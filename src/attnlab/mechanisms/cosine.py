"""Scaled cosine attention (Liu et al. 2022, Swin V2, §3.2; Henry et al. 2020, QKNorm): logits cannot explode.

    P = softmax(cos(q, k) / τ_h)        1/τ_h: learnt, one for each head, at most 100

Only the directions of q and k matter. initial: 1/τ before training, 10 as in Swin V2. Henry et al. learn one such
factor for all heads and begin at log₂(L² − L) for sequences of length L: initial=13.3 at L = 100.
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.config import Positive, check_value
from attnlab.mechanisms.constants import remember
from attnlab.mechanisms.softmax import Arguments, Softmax

LARGEST = 100.0
Initial = Annotated[float, "(0, 100]"]


class Cosine(Softmax):
    kernels = Softmax.kernels | {"unit_rows"}

    def __init__(
        self, heads: int, head_dim: int, *, initial: Initial = 10.0, scale: Positive | None = 1.0, **base: Any
    ) -> None:
        super().__init__(heads, head_dim, scale=1.0 if scale is None else scale, **base)
        check_value("initial", initial, Initial)
        self.log_factor = nn.Parameter(torch.full((heads, 1, 1), math.log(initial)))  # −ln τ

    def prepare(
        self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Arguments:
        factor = self.log_factor.clamp_max(math.log(LARGEST)).exp()
        return (factor * make_unit(q)).to(q.dtype), make_unit(k), mask, causal, bias

    def prepare_by_kernels(
        self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Arguments:
        from attnlab.mechanisms.kernels import unit_rows

        if unit_rows.find_gap(q, k):
            return self.prepare(q, k, mask, causal, at, bias)
        q, k = unit_rows.normalise(q, k, self.log_factor, math.log(LARGEST))
        return q, k, mask, causal, bias


def make_unit(x: Tensor) -> Tensor:
    """x / ‖x‖ over the last axis, 0 if x = 0, by torch's fused norm."""
    d = x.shape[-1]
    return F.rms_norm(x, (d,), fill_gain(d, x.dtype, x.device), eps=1e-20)


@remember
def fill_gain(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gain that turns an RMS norm of this size into the Euclidean norm, (d,)."""
    return torch.full((size,), size**-0.5, dtype=dtype, device=device)
