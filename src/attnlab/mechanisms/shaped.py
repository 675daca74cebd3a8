"""Shaped attention (Noci et al. 2023; He & Hofmann 2024, eq. 4–5): near the identity at any depth.

    weights = α I + β P − γ C        P = softmax(S)        C = P at zero logits: 1/n over the n visible keys

Each head has its α, β and γ, initialized to 1. Rows sum to α + β − γ. The papers also initialize W_Q to 0, so P = C and
the weights are α I; that belongs to the model, not to the mechanism. For I, `at` gives the key index of each query.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax, position


class Shaped(Mechanism):
    self_only = True

    def __init__(self, heads: int, head_dim: int, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.alpha, self.beta, self.gamma = (nn.Parameter(torch.ones(heads, 1, 1)) for _ in range(3))

    @property
    def row_sum(self) -> Tensor:
        return (self.alpha + self.beta - self.gamma).flatten()

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        if at is None and q.shape[2] > k.shape[2]:
            raise ValueError(f"shaped attention is self-attention, but got {q.shape[2]} queries and {k.shape[2]} keys")
        softmax = masked_softmax(logits(q, k, self.scale, bias), seen)
        own = (position(q, k, at)[:, None] == torch.arange(k.shape[2], device=q.device)) & seen
        centre = seen.to(q.dtype) / seen.sum(-1, keepdim=True).clamp_min(1)
        return self.alpha * own + self.beta * softmax - self.gamma * centre, None
