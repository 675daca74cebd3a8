"""CODA without the cascade (Zheng et al. 2021, §5.4, model ii): each head's logits are a latent variable, layers apart.

Z = S + ε,  ε ~ N(0, I) in training       Z = S at evaluation       P = softmax(Z)

What the noise does by itself; nothing is handed on.
"""

from attnlab.mechanisms.mechanism import Mechanism, logits, masked_softmax
from attnlab.mechanisms.noise import logit_noise, noise_rows


class CodaCS(Mechanism):
    stochastic = True

    row_sum = 1.0

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None, noise=None):
        """noise: a draw (b,h,i,j) or a seed; by default a fresh draw in training and none at evaluation."""
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = logits(q, k, self.scale, bias)
        z = z + logit_noise(self, z, noise_rows(q, k, causal, at), noise)
        return masked_softmax(z, seen), None
