"""RealFormer with daGPAM's two signs (He et al. 2020 with Heo & Choi 2024): each sign has its own sum of logits.

    Q⁻ = ReLU(Q) W⁻        Z±_l = Q±_l K_lᵀ / √d + Z±_{l−1}        P± = softmax(Z±_l)        P = (1 + λ⁺) P⁺ − λ⁻ P⁻

No paper has this combination. The carry holds Z⁺ and Z⁻ of each head, interleaved: (b,2h,i,j). Options: daGPAM's.
"""

from typing import Any

from torch import Tensor

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_fused
from attnlab.mechanisms.dagpam import DaGPAM, repeat_bias
from attnlab.mechanisms.mechanism import WithCarry, logits, masked_softmax


class RealFormerDaGPAM(DaGPAM):
    kernels = frozenset({"cascade", "dagpam"})
    carries = True

    def branches(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                 causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = logits(self.interleave(q), k, self.scale, repeat_bias(bias))  # Z⁺ and Z⁻, (b,2h,i,j)
        if carry is not None:
            z = z + self.read_carry(carry, z, seen)
        return masked_softmax(z, seen), z

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        """RealFormer's kernels with 2h heads, or the definition."""
        self.check(q, k, mask, at, v)
        options: dict[str, Any] = {"causal": causal, "at": at}
        if self.wants_kernels(q):
            both = self.interleave_in_one_pass(q)
            if fused := mix_fused(self, both, k, v, mask, carry, bias=repeat_bias(bias), **options):
                return self.combine_in_one_pass(fused[0]), fused[1]
        return self.mix_branches(q, k, v, mask, carry, bias=bias, **options)

    def takes_members(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None) -> bool:
        return super().takes_members(q, k, v, at, bias) and can_mix_one_pass(self, q, k, v, at=at, bias=bias)
