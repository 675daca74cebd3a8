"""Sigmoid attention (Ramapuram et al. 2024): each weight depends on its own key only.

    weights = σ(S + c)        c = −ln n over the n visible keys, so that row sums are initially near 1

The authors set c to −ln of the training length; offset=NUMBER sets c.
"""

from typing import Any

from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen


class Sigmoid(Mechanism):
    def __init__(self, heads: int, head_dim: int, *, offset: float | None = None, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.offset = offset

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        s = widen(logits(q, k, self.scale, bias))
        c = -seen.sum(-1, keepdim=True).clamp_min(1).to(s.dtype).log() if self.offset is None else self.offset
        return (s + c).sigmoid().masked_fill(~seen, 0.0).to(q.dtype), None
