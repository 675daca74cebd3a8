"""RealFormer (He et al. 2020): residual attention, a running sum of logits over the layers.

    Z_l = S_l + Z_{l−1}        P = softmax(Z_l)        or, with mean=True, softmax(Z_l / (l+1))

Both forms pass the sum itself to the next layer, as the authors' code does. carry_dtype: see cascade.py.
"""

from typing import Any

from torch import Tensor

from attnlab.mechanisms.cascade import (
    CarryDtype,
    cast_carry,
    check_carry_dtype,
    mix_fused,
    takes_members_in_one_pass,
)
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax


class RealFormer(Mechanism):
    kernels = frozenset({"cascade"})
    takes_members = takes_members_in_one_pass
    carries = True
    row_sum = 1.0

    def __init__(
        self, heads: int, head_dim: int, *, mean: bool = False, carry_dtype: CarryDtype = "input", **base: Any
    ) -> None:
        super().__init__(heads, head_dim, **base)
        check_carry_dtype(carry_dtype)
        self.mean, self.carry_dtype = mean, carry_dtype

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = logits(q, k, self.scale, bias)
        if carry is not None:
            z = z + self.read_carry(carry, z, seen)
        weights = masked_softmax(z / (self.layer + 1) if self.mean else z, seen)
        return weights, cast_carry(z, self.carry_dtype)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        options: dict[str, Any] = {"causal": causal, "at": at, "bias": bias}
        sharp = 1 / (self.layer + 1) if self.mean else 1.0
        fused = mix_fused(self, q, k, v, mask, carry, carry_dtype=self.carry_dtype, sharp=sharp, **options)
        return fused or super().mix(q, k, v, mask, carry, **options)
