"""Cog attention (Lv et al. 2024): the softmax sees absolute logits, and each weight gets the sign of its logit.

    weights = sign(S) ⊙ softmax(|S|)        Σ_j |weights| = 1

The row sum varies. A row of equal signs is softmax, or its negative.
"""

from torch import Tensor

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass, takes_members_in_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax


class Cog(Mechanism):
    kernels = frozenset({"one_pass"})
    takes_members = takes_members_in_one_pass

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        s = logits(q, k, self.scale, bias).masked_fill(~seen, 0.0)
        return s.sign() * masked_softmax(s.abs(), seen), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, form="cog"), None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
