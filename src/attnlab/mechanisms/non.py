"""Attention without normalisation (Richter & Wattenhofer 2020, "NON"): the weights are the logits.

    weights = S / √n        S = q kᵀ / √d, n visible keys

The authors divide by the root of the sequence length. Counting visible keys is the same on a full row, and lets a
causal row be computed before later rows exist. impl="auto" is a kernel on a GPU. Elsewhere it is linear attention on
long rows, q (Σ_j k_j v_jᵀ) / √(n d), except with a bias, a mask that differs between queries, causal queries placed by
at=, or dropout.
"""

from torch import Tensor

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass, takes_members_in_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen
from attnlab.mechanisms.visible_sums import count_visible, has_linear_form, mix_products


class NON(Mechanism):
    kernels = frozenset({"one_pass"})
    takes_members = takes_members_in_one_pass

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        s = widen(logits(q, k, self.scale, bias))
        n = seen.sum(-1, keepdim=True).clamp_min(1).to(s.dtype)
        return (s.masked_fill(~seen, 0.0) / n.sqrt()).to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            level = None  # the kernel counts the keys, unless a mask or a bias may hide some
            if mask is not None or bias is not None:
                level = count_visible(q, k, mask, causal=causal, bias=bias).rsqrt().squeeze(-1).expand(q.shape[:3])
            return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, form="plain", level=level), None
        drops = self.training and self.dropout > 0
        linear = bias is None and not drops and has_linear_form(q, k, mask, causal=causal, at=at)
        if self.impl == "reference" or not linear:
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        context = mix_products(q * self.scale, k, v, mask, causal=causal)
        return (context / count_visible(q, k, mask, causal=causal).sqrt()).to(v.dtype), None
