"""Shaped attention (Noci et al. 2023; He & Hofmann 2024, eq. 4–5): near the identity at any depth.

    weights = α I + β P − γ C        P = softmax(S)        C = P at zero logits: 1/n over the n visible keys

Each head has its α, β and γ, initialized to 1. Rows sum to α + β − γ. The papers also initialize W_Q to 0, so P = C and
the weights are α I; that belongs to the model, not to the mechanism. For I, `at` gives the key index of each query.
impl="auto", without dropout: context = α v_i + β (one softmax attention) − γ (the mean of the visible v). On a GPU one
kernel adds the three in causal self-attention without a mask.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import (
    Mechanism,
    WithCarry,
    logits,
    masked_softmax,
    position,
    repeat_heads,
    select_own,
)
from attnlab.mechanisms.softmax import attend, find_gap
from attnlab.mechanisms.visible_sums import mean_visible


class Shaped(Mechanism):
    kernels = frozenset({"softmax"})
    self_only = True

    def __init__(self, heads: int, head_dim: int, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.alpha, self.beta, self.gamma = (nn.Parameter(torch.ones(heads, 1, 1)) for _ in range(3))

    @property
    def row_sum(self) -> Tensor:
        return (self.alpha + self.beta - self.gamma).flatten()

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        softmax = masked_softmax(logits(q, k, self.scale, bias), seen)
        own = (position(q, k, at)[:, None] == torch.arange(k.shape[2], device=q.device)) & seen
        centre = seen.to(q.dtype) / seen.sum(-1, keepdim=True).clamp_min(1)
        return self.alpha * own + self.beta * softmax - self.gamma * centre, None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        if self.impl == "reference" or (self.training and self.dropout > 0):
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        self.check(q, k, mask, at, v)
        kernel = self.wants_kernels(q) and self.is_covered(find_gap(q, k, v, at, bias))
        if bias is not None:  # it may hide keys from the mean
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        softmax = attend(self, q, k, v, mask, causal=causal, at=at, bias=None, kernel=kernel)
        if self.wants_kernels(q):
            from attnlab.mechanisms.kernels import shaped

            if shaped.find_gap(softmax, v, mask, causal, at) is None:
                context: Tensor = shaped.shape_context(softmax, v, self.alpha, self.beta, self.gamma)
                return context, None
        centre = mean_visible(v, q, k, mask, causal=causal, at=at)
        own, centre = (repeat_heads(x, self.heads) for x in (self.read_own(v, q, k, mask, at), centre))
        return self.alpha * own + self.beta * softmax - self.gamma * centre, None

    def read_own(self, v: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, at: Tensor | None) -> Tensor:
        """Return the value of each query's own key, (b,g,i,d); 0 where the mask hides it."""
        own = select_own(v, q, at)
        if mask is None:
            return own
        seen = self.visible(q, k, mask, at=at).expand(-1, -1, q.shape[2], -1)
        seen = seen[:, :, torch.arange(q.shape[2], device=q.device), position(q, k, at), None]
        return own.masked_fill(~seen, 0.0)
