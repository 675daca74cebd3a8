"""Value residual, ResFormer (Zhou et al. 2024, §3.2): every layer also mixes the values of the first one.

    V'_l = λ₁ V_1 + λ₂ V_l        P = softmax(S)        context = P V'_l        V'_1 = V_1

λ₁ = λ₂ = ½ as in the paper's first form; they are trained unless fixed=True.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import WithCarry
from attnlab.mechanisms.softmax import Softmax


class ResFormer(Softmax):
    carries = True
    carry_of = "keys"

    def __init__(self, heads: int, head_dim: int, *, fixed: bool = False, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.lambdas = nn.Parameter(torch.full((2,), 0.5), requires_grad=not fixed and self.layer > 0)

    def values(self, v: Tensor, carry: Tensor | None) -> WithCarry:
        if carry is None:
            return v, v
        self.check_carry(carry, v.shape)
        first, own = self.lambdas.unbind()
        return torch.addcmul(first * carry, own, v), carry
