"""Knocking-heads attention (Zhou et al. 2025, KHA-Linear): projections that all heads share, initially the identity.

    q' = q T_Q        k' = k T_K        v' = v T_V        P = softmax(q' k'ᵀ / √d)        context = P v' = (P v) T_V

T_V matters most, and T_Q and T_K are optional (Figure 1): on="values" leaves them out. In a model with RoPE, T_Q and
T_K act on queries and keys that are already rotated.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Sides, WithCarry
from attnlab.mechanisms.softmax import Softmax


class KnockingHeads(Softmax):
    def __init__(self, heads: int, head_dim: int, *, on: Literal["all", "values"] = "all", **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        if on not in ("all", "values"):
            raise ValueError(f"on must be 'all' or 'values', got {on!r}")
        self.shared_value = nn.Parameter(torch.eye(head_dim))  # T_V
        self.shared_query = nn.Parameter(torch.eye(head_dim)) if on == "all" else None  # T_Q
        self.shared_key = nn.Parameter(torch.eye(head_dim)) if on == "all" else None  # T_K

    def weights(self, q: Tensor, k: Tensor, *given: Tensor | None, **options: Any) -> WithCarry:
        return super().weights(*self.project(q, k), *given, **options)

    def mix(self, q: Tensor, k: Tensor, *given: Any, **options: Any) -> WithCarry:
        # the definition calls weights, which projects by itself
        q, k = (q, k) if self.impl == "reference" else self.project(q, k)
        return super().mix(q, k, *given, **options)

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q T_Q and k T_K."""
        if self.shared_query is None or self.shared_key is None:
            return q, k
        return map_heads(q, self.shared_query), map_heads(k, self.shared_key)

    def turn(self, context: Tensor, v: Tensor, at: Tensor | None, sides: Sides) -> Tensor:
        return map_heads(context, self.shared_value)


def map_heads(x: Tensor, matrix: Tensor) -> Tensor:
    """x (b,h,n,d) times a matrix (d,d) that all heads share, without a copy of x if it lies as (b,n,h,d) in memory."""
    if x.stride(1) < x.stride(2):
        return (x.transpose(1, 2) @ matrix).transpose(1, 2)
    return x @ matrix
