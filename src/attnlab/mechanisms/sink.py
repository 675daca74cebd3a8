"""Softmax with a learnt sink (OpenAI 2025, gpt-oss model card): each head may attend to nothing.

    weights = exp(S) / (exp(b_h) + Σ_j exp(S_j))        b_h: learnt, one for each head

Rows sum to less than 1; b → −∞ is softmax. initial: b before training; 0, the default, is softmax1.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.config import check_value
from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen


class Sink(Mechanism):
    kernels = frozenset({"one_pass"})

    def __init__(self, heads: int, head_dim: int, *, initial: float = 0.0, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        check_value("initial", initial, float)
        self.sink = nn.Parameter(torch.full((heads, 1, 1), float(initial)))  # b

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        s = widen(logits(q, k, self.scale, bias)).masked_fill(~seen, -torch.inf)
        nothing = self.sink.to(s.dtype).expand(*s.shape[:3], 1)
        return torch.cat([s, nothing], dim=-1).softmax(-1)[..., :-1].to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, extra=self.sink), None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
