"""Dual-attention generalized probabilistic attention (Heo & Choi 2024): rows may go negative, their sum is fixed.

    Q⁻ = ReLU(Q) W⁻        P± = softmax(Q± Kᵀ / √d)        P = (1 + λ⁺) P⁺ − λ⁻ P⁻        Σ_j P_ij = 1 + λ⁺ − λ⁻

Keys and values are shared, so a KV cache does not grow. No public source gives the initial λ, says whether λ is per
layer or per head, whether heads share W⁻, or where dropout applies. These are options; dropout applies to P⁺ and to P⁻.
The printed equation is not public either. With λ⁺ free, the other reading λ⁺'P⁺ − λ⁻P⁻ is the case λ⁺' = 1 + λ⁺.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.mechanisms.cascade import can_mix_one_pass, draw_dropping
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax, repeat_heads
from attnlab.mechanisms.softmax import attend, find_gap


class DaGPAM(Mechanism):
    kernels = frozenset({"dagpam"})

    def __init__(
        self, heads: int, head_dim: int, *, initial: float | tuple[float, float] = 1.0, fixed: bool = False,
        tied: bool = True, per_head: bool = False, shared: bool = False,
        negative_init: Literal["xavier", "minus-identity"] = "xavier", **base: Any,
    ) -> None:  # fmt: skip
        """initial: λ, or (λ⁺, λ⁻); tied: λ⁺ = λ⁻; fixed: λ is not trained; per_head: one λ per head; shared: one W⁻."""
        super().__init__(heads, head_dim, **base)
        plus, minus = initial if isinstance(initial, tuple) and len(initial) == 2 else (initial, initial)
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in (plus, minus)):
            raise ValueError(f"initial must be a number λ or a pair (λ⁺, λ⁻), got {initial!r}")
        if tied and plus != minus:
            raise ValueError(f"initial={initial} gives λ⁺ and λ⁻ different values, which needs tied=False")
        start = torch.tensor([plus] if tied else [plus, minus])[:, None].repeat(1, heads if per_head else 1)
        self.lambdas = nn.Parameter(start, requires_grad=not fixed)  # (1 tied or 2, h or 1)
        self.negative = nn.Parameter(torch.empty(1 if shared else heads, head_dim, head_dim))  # W⁻
        for matrix in self.negative:
            if negative_init == "xavier":
                nn.init.xavier_uniform_(matrix)
            elif negative_init == "minus-identity":
                nn.init.eye_(matrix).data.neg_()
            else:
                raise ValueError(f"negative_init must be 'xavier' or 'minus-identity', got {negative_init!r}")

    @property
    def plus(self) -> Tensor:
        """λ⁺, (h,1,1) or (1,1,1)."""
        return self.lambdas[0, :, None, None]

    @property
    def minus(self) -> Tensor:
        """λ⁻, (h,1,1) or (1,1,1)."""
        return self.lambdas[-1, :, None, None]

    @property
    def row_sum(self) -> Tensor:
        return (1 + self.plus - self.minus).flatten()

    @property
    def carry_heads(self) -> int:
        return 2 * self.heads  # in the subclasses that carry

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
                **noise: Any) -> WithCarry:  # fmt: skip
        both, carry = self.branches(q, k, mask, carry, causal=causal, at=at, bias=bias, **noise)
        return self.combine(both), carry

    def branches(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                 causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        """P⁺ and P⁻ of each head, interleaved: (b,2h,i,j)."""
        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_softmax(logits(self.interleave(q), k, self.scale, repeat_bias(bias)), seen), None

    def interleave(self, q: Tensor) -> Tensor:
        """Q⁺ and Q⁻ of each head, interleaved: (b,2h,i,d)."""
        return torch.stack([q, q.relu() @ self.negative], dim=2).flatten(1, 2)

    def combine(self, both: Tensor) -> Tensor:
        """(1 + λ⁺)·positive − λ⁻·negative of interleaved weights or contexts: (b,2h,i,·) -> (b,h,i,·)."""
        return (1 + self.plus) * both[:, 0::2] - self.minus * both[:, 1::2]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        """One kernel for short rows; else one softmax attention with two query heads, Q⁺ and Q⁻, for each head."""
        self.check(q, k, mask, at, v)
        if self.impl == "reference":
            return self.mix_branches(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        options: dict[str, Any] = {"causal": causal, "at": at, "bias": repeat_bias(bias)}
        if not self.wants_kernels(q):
            return self.combine(attend(self, self.interleave(q), k, v, mask, kernel=False, **options)), None
        from attnlab.mechanisms.kernels import launch, short_dagpam

        if self.is_covered(launch.find_head_gap(q)) and at is None and bias is None and short_dagpam.is_short(q, k, v):
            rate, seed = draw_dropping(self, q)
            given = (self.negative, self.lambdas, mask, seed, causal, self.scale, rate)
            return short_dagpam.short_dagpam(q, k, v, *given)[0], None
        both = self.interleave_in_one_pass(q)
        context = attend(self, both, k, v, mask, kernel=find_gap(both, k, v, at, bias) is None, **options)
        return self.combine_in_one_pass(context), None

    def takes_members(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None) -> bool:
        if not self.wants_kernels(q):
            return False
        from attnlab.mechanisms.kernels import launch

        covered = launch.find_head_gap(q) is None and launch.find_head_gap(v) is None
        drops = self.training and self.dropout > 0  # from a seed of each member, which only kernels read
        return covered and (not drops or can_mix_one_pass(self, q, k, v, at=at, bias=bias))

    def interleave_in_one_pass(self, q: Tensor) -> Tensor:
        """`interleave` by a kernel, where it covers q."""
        from attnlab.mechanisms.kernels import dagpam, launch

        return self.interleave(q) if launch.find_head_gap(q) else dagpam.stack(q, self.negative).flatten(1, 2)

    def combine_in_one_pass(self, context: Tensor) -> Tensor:
        """`combine` of contexts (b,2h,i,d) by a kernel, where it covers them."""
        from attnlab.mechanisms.kernels import dagpam, launch

        if launch.find_head_gap(context):
            return self.combine(context)
        return dagpam.combine(context, self.lambdas)

    def mix_branches(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, carry: Tensor | None, **options: Any
    ) -> WithCarry:
        """The definition, with dropout on each branch: ((1 + λ⁺) D⁺∘P⁺ − λ⁻ D⁻∘P⁻) v."""
        both, carry = self.branches(q, k, mask, carry, **options)
        return self.combine(self.drop(both)) @ repeat_heads(v, self.heads), carry


def repeat_bias(bias: Tensor | None) -> Tensor | None:
    """Repeat a bias of h heads for 2h interleaved heads; one without a head axis stays as it is."""
    if bias is None or bias.dim() < 3 or bias.shape[-3] == 1:
        return bias
    return bias.repeat_interleave(2, dim=-3)
