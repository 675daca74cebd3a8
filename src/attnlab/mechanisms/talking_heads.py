"""Talking-heads attention (Shazeer et al. 2020): heads are mixed before and after the softmax.

    P = softmax(M_S S)        weights = M_P P        M_S, M_P: h × h over the head axis, initially the identity

Rows of head h sum to Σ_h' M_P[h, h'].
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms.by_rows import mix_by_rows
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax
from attnlab.mechanisms.mixed_heads import can_mix_heads, can_mix_in_bands, mix_in_bands, weigh_heads


class TalkingHeads(Mechanism):
    kernels = frozenset({"mixed_heads"})

    def __init__(self, heads: int, head_dim: int, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.before = nn.Parameter(torch.eye(heads))  # M_S
        self.after = nn.Parameter(torch.eye(heads))  # M_P

    @property
    def row_sum(self) -> Tensor:
        return self.after.sum(-1)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        s = torch.einsum("gh,bhij->bgij", self.before, logits(q, k, self.scale, bias).masked_fill(~seen, 0.0))
        return torch.einsum("gh,bhij->bgij", self.after, masked_softmax(s, seen)), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        options: dict[str, Any] = {"causal": causal, "at": at, "bias": bias}
        if not can_mix_heads(self, q, k, bias):
            return super().mix(q, k, v, mask, carry, **options)
        self.check(q, k, mask, at, v)
        if can_mix_in_bands(q, k, at):
            matrices = (self.before.T, self.after.T)
            return mix_in_bands(self, q, k, v, mask, *matrices, causal=causal, scale=self.scale), None
        return mix_by_rows(self, self.weigh_fused, q, k, v, mask, **options), None

    def weigh_fused(
        self, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return the weights of a band by the kernels."""
        s = logits(q, k, self.scale, bias)
        return weigh_heads(s, q, k, mask, self.before.T, self.after.T, causal=causal, at=at)
