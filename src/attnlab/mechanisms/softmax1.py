"""Softmax off by one (Miller 2023): a head may attend to nothing.

    weights = exp(S) / (n + Σ_j exp(S_j))        n = 1

Rows sum to less than 1. This is softmax with one more key, whose logit is ln n and whose weight is dropped.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.config import Positive, check_value
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen


class Softmax1(Mechanism):
    def __init__(self, heads: int, head_dim: int, *, n: Positive = 1.0, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        check_value("n", n, Positive)
        self.n = n

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        s = widen(logits(q, k, self.scale, bias)).masked_fill(~seen, -torch.inf)
        return F.pad(s, (0, 1), value=math.log(self.n)).softmax(-1)[..., :-1].to(q.dtype), None
