"""CODA with daGPAM's two signs (Zheng et al. 2021 with Heo & Choi 2024): heads of both signs collide in one σ.

    Q⁻ = ReLU(Q) W⁻        S = [Q⁺ Kᵀ; Q⁻ Kᵀ] / √d, 2h heads        P = (1 + λ⁺) P⁺ − λ⁻ P⁻
    Z_l = S_l + Z_{l−1} + σ(S_l + Z_{l−1}) + ε        [P⁺; P⁻] = softmax(Z_l)        σ: 2h → 8h → 8h → 2h, as in coda.py

No paper has this combination. The carry Z holds both signs of each head, interleaved: (b,2h,i,j). Options: daGPAM's.
"""

from typing import Any

from torch import Tensor

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_fused
from attnlab.mechanisms.coda import apply_head_net, make_head_net
from attnlab.mechanisms.dagpam import DaGPAM, repeat_bias
from attnlab.mechanisms.mechanism import WithCarry, logits, masked_softmax
from attnlab.mechanisms.noise import logit_noise


class CodaDaGPAM(DaGPAM):
    kernels = frozenset({"cascade", "coda", "dagpam"})
    carries = True
    stochastic = True

    def __init__(self, heads: int, head_dim: int, **options: Any) -> None:
        super().__init__(heads, head_dim, **options)
        self.sigma = make_head_net(2 * heads, 8 * heads, hidden=2)
        self.sigma.requires_grad_(self.layer > 0)

    def branches(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                 causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
                 noise: int | Tensor | None = None) -> WithCarry:  # fmt: skip
        """noise: as in Coda.weights, (b,2h,i,j)."""
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=repeat_bias(bias))
        z = logits(self.interleave(q), k, self.scale, repeat_bias(bias))  # S, (b,2h,i,j)
        if carry is not None:
            z = z + self.read_carry(carry, z, seen)
            z = z + apply_head_net(self.sigma, z, seen)
        z = z + logit_noise(self, z, causal, at, noise)
        return masked_softmax(z, seen), z

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        """CODA's kernels with 2h heads, or the definition."""
        self.check(q, k, mask, at, v)
        options: dict[str, Any] = {"causal": causal, "at": at}
        if self.wants_kernels(q):
            both = self.interleave_in_one_pass(q)
            if fused := mix_fused(self, both, k, v, mask, carry, sigma=self.sigma, bias=repeat_bias(bias), **options):
                return self.combine_in_one_pass(fused[0]), fused[1]
        return self.mix_branches(q, k, v, mask, carry, bias=bias, **options)

    def takes_members(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None) -> bool:
        return super().takes_members(q, k, v, at, bias) and can_mix_one_pass(self, q, k, v, at=at, bias=bias)
