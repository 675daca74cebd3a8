"""Stick-breaking attention (Tan et al. 2024): each key, from the nearest back, takes its part of what is left.

    β_ij = σ(S_ij)        weights = β_ij Π_{j<l<i} (1 − β_il) for j < i        own key: 0, or the rest (remainder=True)

The order of keys takes the place of position embeddings. The own key is not among the parts. With remainder=True it
gets Π_{l<i} (1 − β_il), as in the authors' code, and rows sum to 1; else they sum to less. A hidden key takes no part.
Keys after their query have weight 0, also in an encoder. Computed in log space.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.mechanisms.cascade import draw_dropping, is_case_covered
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, position, widen


class StickBreaking(Mechanism):
    kernels = frozenset({"stick_breaking"})
    positional = True
    self_only = True

    def __init__(self, heads: int, head_dim: int, *, remainder: bool = False, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.remainder = remainder
        self.row_sum = 1.0 if remainder else None

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        s, keys = widen(logits(q, k, self.scale, bias)), torch.arange(k.shape[2], device=q.device)
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        own = position(q, k, at)[:, None]
        parts, rest = seen & (keys < own), seen & (keys == own) & self.remainder
        left = F.logsigmoid(-s).masked_fill(~parts, 0.0)  # log(1 − β)
        until = left.flip(-1).cumsum(-1).flip(-1)  # Σ over this key and those after it
        taken = (F.logsigmoid(s) + until - left).exp().masked_fill(~parts, 0.0)
        return (taken + left.sum(-1, keepdim=True).exp() * rest).to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if self.wants_kernels(q) and is_case_covered(self, q, k, v, at=at, bias=bias):
            from attnlab.mechanisms.kernels.stick_breaking import stick_breaking

            rate, seed = draw_dropping(self, q)
            return stick_breaking(q, k, v, mask, seed, self.remainder, self.scale, rate)[0], None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
