"""Sigmoid attention (Ramapuram et al. 2024): each weight depends on its own key only.

    weights = σ(S + c)        c = −ln n over the n visible keys, so that row sums are initially near 1

The authors set c to −ln of the training length; offset=NUMBER sets c.
"""

from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen
from attnlab.mechanisms.visible_sums import count_visible


class Sigmoid(Mechanism):
    kernels = frozenset({"one_pass"})

    def __init__(self, heads: int, head_dim: int, *, offset: float | None = None, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.offset = offset

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        s = widen(logits(q, k, self.scale, bias))
        c = -seen.sum(-1, keepdim=True).clamp_min(1).to(s.dtype).log() if self.offset is None else self.offset
        return (s + c).sigmoid().masked_fill(~seen, 0.0).to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            level = -count_visible(q, k, mask, causal=causal, bias=bias).log()
            level = level if self.offset is None else torch.full_like(level, self.offset)
            level = level.squeeze(-1).expand(q.shape[:3])
            return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, form="sigmoid", level=level), None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
