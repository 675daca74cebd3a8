"""RealFormer (He et al. 2020): residual attention, a running sum of logits over the layers.

    Z_l = S_l + Z_{l−1}        P = softmax(Z_l)        or, with mean=True, softmax(Z_l / (l+1))

The sum itself is what is handed on, in both forms (as in the authors' code).
"""

from attnlab.mechanisms.mechanism import Mechanism, logits, masked_softmax


class RealFormer(Mechanism):
    carries = True

    def __init__(self, heads: int, head_dim: int, *, mean: bool = False, **base) -> None:
        super().__init__(heads, head_dim, **base)
        self.mean = mean

    row_sum = 1.0

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = logits(q, k, self.scale, bias)
        if carry is not None:
            z = z + self.previous(carry, z, seen)
        return masked_softmax(z / (self.layer + 1) if self.mean else z, seen), z
