"""Softmax off by one (Miller 2023): a head may attend to nothing.

    weights = exp(S) / (n + Σ_j exp(S_j))        n = 1

Rows sum to less than 1. Logits are shifted by max(0, max_j S_j), so that no term overflows.
"""

from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen


class Softmax1(Mechanism):
    def __init__(self, heads: int, head_dim: int, *, n: float = 1.0, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        if n <= 0:
            raise ValueError(f"n must be positive, got {n}; for n=0 use softmax")
        self.n = n

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        s = widen(logits(q, k, self.scale, bias)).masked_fill(~seen, -torch.inf)
        shift = s.detach().amax(-1, keepdim=True).clamp_min(0.0)
        exponentials = (s - shift).exp()
        return (exponentials / (self.n * (-shift).exp() + exponentials.sum(-1, keepdim=True))).to(q.dtype), None
