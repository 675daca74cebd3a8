"""Dot-product attention without a scale (Luong et al. 2015, §3.1): softmax attention with scale 1.

    S = q kᵀ        P = softmax(S)

`mix` is always the definition, P v: torch's fused function has no batching rule for torch.func.vmap, and no kernels for
heads as large as an LSTM's state.
"""

from typing import Any

from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax


class Dot(Mechanism):
    row_sum = 1.0

    def __init__(self, heads: int, head_dim: int, *, scale: float | None = 1.0, **base: Any) -> None:
        super().__init__(heads, head_dim, scale=scale, **base)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_softmax(logits(q, k, self.scale, bias), seen), None
