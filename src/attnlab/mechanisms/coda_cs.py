"""CODA without the cascade (Zheng et al. 2021, §5.4, model ii): each head's logits are a latent variable, layers apart.

    Z = S + ε,  ε ~ N(0, I) in training       Z = S at evaluation       P = softmax(Z)

What the noise does by itself; nothing is handed on, so the fused kernel keeps no logits: O(n) memory. Without noise any
impl but the reference is plain softmax attention.
"""

import torch

from attnlab.mechanisms.cascade import Impl, check_impl, takes_kernels
from attnlab.mechanisms.mechanism import Mechanism, logits, masked_softmax
from attnlab.mechanisms.noise import logit_noise, noise_rows, noise_seed
from attnlab.mechanisms.softmax import fused


class CodaCS(Mechanism):
    stochastic = True

    def __init__(self, heads: int, head_dim: int, *, impl: Impl = "auto", **base) -> None:
        super().__init__(heads, head_dim, **base)
        check_impl(impl)
        self.impl: Impl = impl

    row_sum = 1.0

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None, noise=None):
        """noise: a draw (b,h,i,j) or a seed; by default a fresh draw in training and none at evaluation."""
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = logits(q, k, self.scale, bias)
        z = z + logit_noise(self, z, noise_rows(q, k, causal, at), noise)
        return masked_softmax(z, seen), None

    def mix(self, q, k, v, mask=None, carry=None, *, causal=False, at=None, bias=None):
        dropout = self.dropout if self.training else 0.0
        noisy = self.training or self.sample_seed is not None
        if self.impl != "reference" and not noisy:
            self.check(q, k, mask, at, v)
            return fused(q, k, v, mask, causal=causal, at=at, bias=bias, scale=self.scale, dropout=dropout), None
        if not takes_kernels(self, self.impl, q, k, v, mask, None, at=at, bias=bias):
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        from attnlab.mechanisms.kernels.coda_cs import noisy_softmax

        seed, layer = noise_seed(self, q.device)
        dropping = torch.randint(2**62, (), device=q.device) if dropout else None
        return noisy_softmax(q, k, v, mask, seed, dropping, causal, self.scale, dropout, layer)[0], None
