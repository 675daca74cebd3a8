"""CODA without the cascade (Zheng et al. 2021, §5.4, model ii): each head's logits are a latent variable, layers apart.

    Z = S + ε,  ε ~ N(0, I) in training       Z = S at evaluation       P = softmax(Z)

It shows the effect of the noise alone. Layers pass nothing on, so the fused kernel stores no logits: O(n) memory.
Without noise, any impl but "reference" computes plain softmax attention.
"""

from torch import Tensor

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax
from attnlab.mechanisms.noise import logit_noise
from attnlab.mechanisms.softmax import attend, find_gap


class CodaCS(Mechanism):
    kernels = frozenset({"one_pass"})
    stochastic = True
    row_sum = 1.0

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
                noise: int | Tensor | None = None) -> WithCarry:  # fmt: skip
        """noise: a draw (b,h,i,j) or a seed; by default a fresh draw in training and none at evaluation."""
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = logits(q, k, self.scale, bias)
        z = z + logit_noise(self, z, causal, at, noise)
        return masked_softmax(z, seen), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if self.impl != "reference" and not self.training and self.sample_seed is None:
            kernel = self.wants_kernels(q) and find_gap(q, k, v, at, bias) is None
            return attend(self, q, k, v, mask, causal=causal, at=at, bias=bias, kernel=kernel), None
        if not can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, noisy=True), None

    def takes_members(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None) -> bool:
        return not self.training or can_mix_one_pass(self, q, k, v, at=at, bias=bias)
