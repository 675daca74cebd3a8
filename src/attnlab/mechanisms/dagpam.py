"""Dual-attention generalized probabilistic attention (Heo & Choi 2024): rows may go negative, their sum is fixed.

    Q⁻ = ReLU(Q) W⁻        P± = softmax(Q± Kᵀ / √d)        P = (1 + λ⁺) P⁺ − λ⁻ P⁻        Σ_j P_ij = 1 + λ⁺ − λ⁻

Keys and values are shared, so a KV cache does not grow. No source states how λ starts, whether there is one a layer or
one a head, whether W⁻ is shared by the heads, or where dropout falls: these are options (dropout: on each branch).
The printed equation could not be had either; with λ⁺ free, the other reading λ⁺'P⁺ − λ⁻P⁻ is λ⁺' = 1 + λ⁺.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Mechanism, logits, masked_softmax
from attnlab.mechanisms.softmax import fused


class DaGPAM(Mechanism):
    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        initial: float | tuple[float, float] = 1.0,
        fixed: bool = False,
        tied: bool = True,
        per_head: bool = False,
        shared: bool = False,
        negative_init: Literal["xavier", "minus-identity"] = "xavier",
        impl: Literal["auto", "reference", "fused"] = "auto",
        **base,
    ) -> None:
        """initial: λ, or (λ⁺, λ⁻); tied keeps λ⁺ = λ⁻; per_head: a λ for each head; shared: one W⁻ for all heads."""
        super().__init__(heads, head_dim, **base)
        if impl not in ("auto", "reference", "fused"):
            raise ValueError(f"impl must be 'auto', 'reference' or 'fused', not {impl!r}")
        self.impl = impl
        plus, minus = initial if isinstance(initial, tuple) and len(initial) == 2 else (initial, initial)
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in (plus, minus)):
            raise ValueError(f"initial must be a number λ or a pair (λ⁺, λ⁻), not {initial!r}")
        if tied and plus != minus:
            raise ValueError(f"initial={initial} gives λ⁺ and λ⁻ different values; say tied=False")
        start = torch.tensor([plus] if tied else [plus, minus])[:, None].repeat(1, heads if per_head else 1)
        self.lambdas = nn.Parameter(start, requires_grad=not fixed)  # (1 tied or 2, h or 1)
        self.negative = nn.Parameter(torch.empty(1 if shared else heads, head_dim, head_dim))  # W⁻
        for matrix in self.negative:
            if negative_init == "xavier":
                nn.init.xavier_uniform_(matrix)
            elif negative_init == "minus-identity":
                nn.init.eye_(matrix).data.neg_()
            else:
                raise ValueError(f"negative_init must be 'xavier' or 'minus-identity', not {negative_init!r}")

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

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        positive = masked_softmax(logits(q, k, self.scale, bias), seen)
        negative = masked_softmax(logits(self.negated(q), k, self.scale, bias), seen)
        return self.signed(positive, negative), None

    def negated(self, q: Tensor) -> Tensor:
        """Q⁻."""
        return q.relu() @ self.negative

    def signed(self, positive: Tensor, negative: Tensor) -> Tensor:
        """(1 + λ⁺)·positive − λ⁻·negative: weights, or contexts."""
        return (1 + self.plus) * positive - self.minus * negative

    def mix(self, q, k, v, mask=None, carry=None, *, causal=False, at=None, bias=None):
        """One fused softmax attention with two query heads, Q⁺ and Q⁻, where there was one."""
        self.check(q, k, mask, at, v)
        kernel = self._kernel(q)
        both = kernel.stack(q, self.negative) if kernel else torch.stack([q, self.negated(q)], dim=2)
        bias = for_both(bias)
        dropout = self.dropout if self.training else 0.0
        options = {"causal": causal, "at": at, "bias": bias, "scale": self.scale, "dropout": dropout}
        context = fused(both.flatten(1, 2), k, v, mask, impl="sdpa" if self.impl == "reference" else "auto", **options)
        if kernel:
            return kernel.combine(context, self.lambdas[0], self.lambdas[-1]), None
        return self.signed(*context.unflatten(1, (-1, 2)).unbind(2)), None

    def _kernel(self, q):
        """The Triton passes around the attention, where they are asked for or, under "auto", where there is a GPU."""
        if self.impl == "reference" or (self.impl == "auto" and not q.is_cuda):
            return None
        from attnlab.mechanisms.kernels import dagpam

        if reason := dagpam.unsupported(q, self.head_dim):
            if self.impl == "fused":
                raise ValueError(f"impl='fused' does not cover {reason}; say impl='auto' or 'reference'")
            return None
        return dagpam


def for_both(bias: Tensor | None) -> Tensor | None:
    """A bias of h heads as one of 2h, where it has heads: each beside its negative one."""
    if bias is None or bias.dim() < 3 or bias.shape[-3] == 1:
        return bias
    return bias.repeat_interleave(2, dim=-3)
