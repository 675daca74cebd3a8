"""Differential attention V2 (Ye et al. 2026, Microsoft): the difference of two heads that share their keys and values.

    P¹, P² = softmax(q¹ kᵀ / √d), softmax(q² kᵀ / √d)        λ = σ(x_i w)        weights = P¹ − λ P²

Each head has two queries, at 2h and 2h + 1 of q, and a λ for each token. Rows sum to 1 − λ. Unlike `differential`, it
halves no head and normalises no context.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Mechanism, Sides, WithCarry, split_heads
from attnlab.mechanisms.softmax import Softmax


class DifferentialV2(Softmax):
    kernels = Softmax.kernels | {"differential"}
    row_sum: Any = None  # 1 − λ, which differs between tokens

    def __init__(self, heads: int, head_dim: int, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.subtraction = nn.Linear(self.model_size, heads, bias=False)  # w

    @property
    def query_heads(self) -> int:
        return 2 * self.heads

    def query_side(self, x: Tensor) -> Tensor:
        return split_heads(self.subtraction(x).sigmoid(), self.heads)  # λ, (b,h,i,1)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
                sides: Sides = (None, None)) -> WithCarry:  # fmt: skip
        both, _ = super().weights(q, k, mask, carry, causal=causal, at=at, bias=bias)
        return both[:, 0::2] - sides[0] * both[:, 1::2], None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
            sides: Sides = (None, None)) -> WithCarry:  # fmt: skip
        if self.impl == "reference":
            return Mechanism.mix(self, q, k, v, mask, carry, causal=causal, at=at, bias=bias, sides=sides)
        both, _ = super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        if self.wants_kernels(q):
            from attnlab.mechanisms.kernels import differential, unit_rows

            if unit_rows.find_gap(both) is None:
                return differential.subtract(both, sides[0], None, None, 0.0, 1.0, 0.0), None
        first, second = both.view(len(both), self.heads, 2, *both.shape[2:]).unbind(2)  # its gradient is one pass
        return torch.addcmul(first, second, sides[0], value=-1), None
