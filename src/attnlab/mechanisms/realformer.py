"""RealFormer (He et al. 2020): residual attention, a running sum of logits over the layers.

    Z_l = S_l + Z_{l−1}        P = softmax(Z_l)        or, with mean=True, softmax(Z_l / (l+1))

The sum itself is what is handed on, in both forms (as in the authors' code). impl and carry_dtype: see cascade.py.
"""

from attnlab.mechanisms.cascade import CarryDtype, Impl, check_choices, handed_on, run_kernels, takes_kernels
from attnlab.mechanisms.mechanism import Mechanism, logits, masked_softmax


class RealFormer(Mechanism):
    carries = True

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        mean: bool = False,
        impl: Impl = "auto",
        carry_dtype: CarryDtype = "input",
        **base,
    ) -> None:
        super().__init__(heads, head_dim, **base)
        check_choices(impl, carry_dtype)
        self.mean, self.impl, self.carry_dtype = mean, impl, carry_dtype

    row_sum = 1.0

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = logits(q, k, self.scale, bias)
        if carry is not None:
            z = z + self.previous(carry, z, seen).to(z.dtype)
        weights = masked_softmax(z / (self.layer + 1) if self.mean else z, seen)
        return weights, handed_on(z, self.carry_dtype)

    def mix(self, q, k, v, mask=None, carry=None, *, causal=False, at=None, bias=None):
        if not takes_kernels(self, self.impl, q, k, v, mask, carry, at=at, bias=bias):
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        sharp = 1 / (self.layer + 1) if self.mean else 1.0
        return run_kernels(self, q, k, v, mask, carry, causal=causal, carry_dtype=self.carry_dtype, sharp=sharp)
