"""Dot-product attention without a scale (Luong et al. 2015, §3.1): softmax attention with scale 1.

    S = q kᵀ        P = softmax(S)

`mix` is the definition, P v, except on a GPU with heads of at most 128: torch's fused function has no batching rule for
torch.func.vmap, and no kernels for heads as large as an LSTM's state. Logits are computed at least in float32, because
without a scale they exceed the range of float16.
"""

from typing import Any

from torch import Tensor

from attnlab.config import Positive
from attnlab.mechanisms.kernels.launch import is_mapped
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, widen
from attnlab.mechanisms.softmax import Softmax


class Dot(Softmax):
    kernels = frozenset()

    def __init__(self, heads: int, head_dim: int, *, scale: Positive | None = 1.0, **base: Any) -> None:
        super().__init__(heads, head_dim, scale=scale, **base)

    def weights(self, q: Tensor, k: Tensor, *given: Tensor | None, **options: Any) -> WithCarry:
        return super().weights(widen(q), widen(k), *given, **options)[0].to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **options: Any) -> WithCarry:
        mix = Softmax.mix if q.is_cuda and self.head_dim <= 128 and not is_mapped(q) else Mechanism.mix
        return mix(self, q, k, v, *given, **options)
