"""Attention with linear biases, ALiBi (Press et al. 2022, §3): logits fall with the distance of the key.

    P = softmax(S − m_h |i − j|)        m_h = 2^(−8h/H) for h = 1 … H, if H is a power of 2

Nothing is learnt, and the model needs no position embeddings. For other H the slopes are those of the next lower power
of 2, then every second one of the next higher, as in the authors' code. The distance counts in both directions.
"""

from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import position
from attnlab.mechanisms.softmax import Arguments, Softmax


class ALiBi(Softmax):
    kernels = frozenset()  # the kernel for short rows takes no bias
    positional = True
    self_only = True
    slopes: Tensor

    def __init__(self, heads: int, head_dim: int, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.register_buffer("slopes", torch.tensor(list_slopes(heads)).view(heads, 1, 1), persistent=False)

    def prepare(
        self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Arguments:
        distance = (position(q, k, at)[:, None] - torch.arange(k.shape[2], device=q.device)).abs()
        slope = (-self.slopes * distance).to(q.dtype)  # (h,i,j)
        return q, k, mask, causal, slope if bias is None else slope + bias


def list_slopes(heads: int) -> list[float]:
    """Return m_h of every head."""
    power = 2 ** (heads.bit_length() - 1)
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
