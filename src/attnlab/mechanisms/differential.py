"""Differential attention (Ye et al. 2024): the difference of two softmax maps, each on half of the head.

    P = softmax(q₁k₁ᵀ/√(d/2)) − λ softmax(q₂k₂ᵀ/√(d/2))        λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init
    finish: (1 − λ_init) RMSNorm(each head)                      λ_init = 0.8 − 0.6 exp(−0.3 layer)

Rows sum to 1 − λ. The heads of a layer share the four λ vectors. Dropout applies to each of the two maps.
impl="auto" is two softmax attentions, each of half a head over whole values. On a GPU it is one with twice as many
query heads, [q₁, 0] and [0, q₂].
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.config import Positive
from attnlab.mechanisms.dagpam import repeat_bias
from attnlab.mechanisms.mechanism import Mechanism, Sides, WithCarry, logits, masked_softmax, repeat_heads
from attnlab.mechanisms.softmax import attend, find_gap


class Differential(Mechanism):
    kernels = frozenset({"softmax", "differential"})
    head_parts = 2

    def __init__(self, heads: int, head_dim: int, *, scale: Positive | None = None, **base: Any) -> None:
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, because differential attention halves each head, got {head_dim}")
        super().__init__(heads, head_dim, scale=(head_dim // 2) ** -0.5 if scale is None else scale, **base)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * self.layer)
        self.lambda_q = nn.Parameter(torch.randn(2, head_dim // 2) * 0.1)
        self.lambda_k = nn.Parameter(torch.randn(2, head_dim // 2) * 0.1)
        self.norm = nn.RMSNorm(head_dim, eps=1e-5)

    @property
    def subtraction(self) -> Tensor:
        """λ, a number."""
        first, second = (self.lambda_q * self.lambda_k).sum(-1).exp().unbind()
        return first - second + self.lambda_init

    @property
    def row_sum(self) -> Tensor:
        return 1 - self.subtraction

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        first, second = self.maps(q, k, mask, causal=causal, at=at, bias=bias)
        return first - self.subtraction * second, None

    def maps(self, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None, bias: Tensor | None
             ) -> list[Tensor]:  # fmt: skip
        """Return the two softmax maps, (b,h,i,j) each."""
        seen = self.visible(q, k, mask, causal=causal, at=at)
        return [masked_softmax(logits(x, y, self.scale, bias), seen) for x, y in split_halves(q, k)]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        options: dict[str, Any] = {"causal": causal, "at": at, "bias": bias}
        if self.impl == "reference":
            first, second = (self.drop(p, n) for n, p in enumerate(self.maps(q, k, mask, **options)))
            return (first - self.subtraction * second) @ repeat_heads(v, self.heads), None
        if self.is_divided(q, k, v):
            return self.mix_divided(q, k, v, mask, **options), None
        halves = enumerate(split_halves(q, k))
        first, second = (attend(self, x, y, v, mask, kernel=False, number=n, **options) for n, (x, y) in halves)
        return torch.addcmul(first, second, self.subtraction.to(first.dtype), value=-1), None

    def is_divided(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether kernels divide each head into two of one attention. With seeds each map draws its own dropout."""
        if not self.wants_kernels(q):
            return False
        from attnlab.mechanisms.kernels import unit_rows

        gap = unit_rows.find_gap(q, v) if v.shape[3] == q.shape[3] else f"values of {v.shape[3]}"
        return self.is_covered(gap) and not (self.seeds is not None and self.training and self.dropout > 0)

    def mix_divided(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None,
        bias: Tensor | None, gain: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """One attention with two query heads for each head, [q₁, 0] and [0, q₂]; with the gain, also `finish`."""
        from attnlab.mechanisms.kernels import differential

        both: Tensor = differential.divide_heads(q, False)
        kernel = self.is_covered(find_gap(both, k, v, at, bias))
        contexts = attend(self, both, k, v, mask, causal=causal, at=at, bias=repeat_bias(bias), kernel=kernel)
        numbers = (self.lambda_init, 1 - self.lambda_init, self.norm.eps)
        context: Tensor = differential.subtract(contexts, self.lambda_q, self.lambda_k, gain, *numbers)
        return context

    def finish(self, context: Tensor) -> Tensor:
        return F.rms_norm(context, (self.head_dim,), (1 - self.lambda_init) * self.norm.weight, self.norm.eps)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None, sides: Sides = (None, None)
                ) -> WithCarry:  # fmt: skip
        if not self.is_divided(q, k, v):
            return super().forward(q, k, v, mask, carry, causal=causal, at=at, bias=bias, sides=sides)
        self.check(q, k, mask, at, v)
        return self.mix_divided(q, k, v, mask, causal=causal, at=at, bias=bias, gain=self.norm.weight), None


def split_halves(q: Tensor, k: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the first halves of all heads of q and k, and the second."""
    return list(zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True))
