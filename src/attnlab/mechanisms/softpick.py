"""Softpick (Zuhri et al. 2025, "rectified softmax"): a key counts only if its logit is above 0, and rows may be empty.

    weights = ReLU(exp(S) − 1) / (Σ_j |exp(S_j) − 1| + ε)

Rows sum to at most 1. Keys with logits below 0 have weight 0, but stay in the denominator, so they still get gradients.
Computed as the authors do, with exp(S − m) − exp(−m), and ε added after it. Here m = max(0, max S), which never
overflows.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from attnlab.config import Positive, check_value
from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass, takes_members_in_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen


class Softpick(Mechanism):
    kernels = frozenset({"one_pass"})
    takes_members = takes_members_in_one_pass

    def __init__(self, heads: int, head_dim: int, *, eps: Positive = 1e-8, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        check_value("eps", eps, Positive)
        self.eps = eps

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        s = widen(logits(q, k, self.scale, bias)).masked_fill(~seen, 0.0)  # exp(0) − 1 = 0: a hidden key adds nothing
        top = F.pad(s.detach(), (0, 1)).amax(-1, keepdim=True)  # max(0, max S)
        above = (s - top).exp() - (-top).exp()
        return (above.relu() / (above.abs().sum(-1, keepdim=True) + self.eps)).to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, form="softpick", eps=self.eps), None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
