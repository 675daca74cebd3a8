"""Value-gated attention (Qiu et al. 2025, §2.2, G2, head-wise): a gate on the value of each key, from its own input.

    P = softmax(S)        weights = P_ij σ(x_j w_h)        one gate for each head and key

A row sums to at most 1, so a head may attend to nothing. `gated` has the gate on the query's side instead.
"""

from typing import Any

from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Mechanism, Sides, WithCarry, repeat_heads, split_heads
from attnlab.mechanisms.softmax import Softmax


class ValueGated(Softmax):
    row_sum: Any = None  # the mean gate of what a row attends to

    def __init__(self, heads: int, head_dim: int, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.gate = nn.Linear(self.model_size, heads, bias=False)  # w

    def key_side(self, x: Tensor) -> Tensor:
        return split_heads(self.gate(x).sigmoid(), self.heads)  # (b,h,j,1)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
                sides: Sides = (None, None)) -> WithCarry:  # fmt: skip
        softmax, _ = super().weights(q, k, mask, carry, causal=causal, at=at, bias=bias)
        return softmax * sides[1].mT, None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
            sides: Sides = (None, None)) -> WithCarry:  # fmt: skip
        if self.impl == "reference":
            return Mechanism.mix(self, q, k, v, mask, carry, causal=causal, at=at, bias=bias, sides=sides)
        k, gated = repeat_heads(k, self.heads), repeat_heads(v, self.heads) * sides[1]
        return super().mix(q, k, gated, mask, carry, causal=causal, at=at, bias=bias)
