"""Sigmoid attention (Ramapuram et al. 2024): each weight depends on its own key only.

    weights = σ(S + c)        c = −ln n over the n visible keys, so that row sums are initially near 1

The authors set c to −ln of the training length; offset=NUMBER sets c.
"""

from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass, takes_members_in_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen
from attnlab.mechanisms.visible_sums import count_visible


class Sigmoid(Mechanism):
    kernels = frozenset({"one_pass"})
    takes_members = takes_members_in_one_pass

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
            level = self.read_level(q, k, mask, causal=causal, bias=bias)
            return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, form="sigmoid", level=level), None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)

    def read_level(self, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, bias: Tensor | None
                   ) -> Tensor | None:  # fmt: skip
        """Return c of each query, (b,h,i), or None if the kernel can count the keys: no mask or bias hides any."""
        if self.offset is not None:
            return q.new_full((1, 1, 1), self.offset, dtype=torch.float32).expand(q.shape[:3])
        if mask is None and bias is None:
            return None
        return -count_visible(q, k, mask, causal=causal, bias=bias).log().squeeze(-1).expand(q.shape[:3])
