"""Gated attention (Qiu et al. 2025, §2.2, G1): a gate on the output of each head, from the input of the layer.

    P = softmax(S)        context = σ(x_i W_g) ⊙ Σ_j P_ij v_j        W_g: e → h·d, or e → h with per="head"

The gate is linear in the context, so contributions are exact: σ(x_i W_g) ⊙ P_ij v_j.
"""

from typing import Any, Literal

from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Sides, split_heads
from attnlab.mechanisms.softmax import Softmax


class Gated(Softmax):
    def __init__(self, heads: int, head_dim: int, *, per: Literal["element", "head"] = "element", **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        if per not in ("element", "head"):
            raise ValueError(f"per must be 'element' or 'head', got {per!r}")
        self.gate = nn.Linear(self.model_size, heads * (head_dim if per == "element" else 1), bias=False)  # W_g

    def query_side(self, x: Tensor) -> Tensor:
        return split_heads(self.gate(x).sigmoid(), self.heads)  # (b,h,i,d) or (b,h,i,1)

    def turn(self, context: Tensor, v: Tensor, at: Tensor | None, sides: Sides) -> Tensor:
        gate: Tensor = sides[0]
        return gate * context
