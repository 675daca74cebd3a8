"""Dot-product attention without a scale (Luong et al. 2015, §3.1): softmax attention with scale 1.

    S = q kᵀ        P = softmax(S)

`mix` is always the definition, P v: torch's fused function has no batching rule for torch.func.vmap, and no kernels for
heads as large as an LSTM's state. Logits are computed at least in float32: without a scale they exceed the range of
float16.
"""

from typing import Any

from torch import Tensor

from attnlab.config import Positive
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, widen
from attnlab.mechanisms.softmax import Softmax


class Dot(Softmax):
    mix = Mechanism.mix
    kernels = frozenset()

    def __init__(self, heads: int, head_dim: int, *, scale: Positive | None = 1.0, **base: Any) -> None:
        super().__init__(heads, head_dim, scale=scale, **base)

    def weights(self, q: Tensor, k: Tensor, *given: Tensor | None, **options: Any) -> WithCarry:
        return super().weights(widen(q), widen(k), *given, **options)[0].to(q.dtype), None
