"""Normalized attention pooling (Richter & Wattenhofer 2020): logits normalised over the visible keys, no softmax.

    z = (S − mean S) / (std S + 10⁻³),  S = q kᵀ without 1/√d        weights = g_h z + b_h
    finish: GELU(LayerNorm(the concatenated heads))

Rows sum to n·b_h over n visible keys. The standard deviation is at least 10⁻⁶, so equal logits give weights b_h and a
gradient of 0 instead of infinity. In a row with one visible key the weight is b_h. Logits are computed at least in
float32: without 1/√d they exceed the range of float16.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.config import Positive
from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, split_heads, widen


class NAP(Mechanism):
    kernels = frozenset({"one_pass"})

    def __init__(self, heads: int, head_dim: int, *, scale: Positive | None = None, **base: Any) -> None:
        super().__init__(heads, head_dim, scale=1.0 if scale is None else scale, **base)
        self.gain = nn.Parameter(torch.ones(heads, 1, 1))
        self.shift = nn.Parameter(torch.zeros(heads, 1, 1))
        self.norm = nn.LayerNorm(heads * head_dim)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        s = logits(widen(q), widen(k), self.scale, bias).masked_fill(~seen, 0.0)
        n = seen.sum(-1, keepdim=True).clamp_min(1)
        away = (s - s.sum(-1, keepdim=True) / n).masked_fill(~seen, 0.0)
        deviation = (away.square().sum(-1, keepdim=True) / n).clamp_min(1e-12).sqrt()
        return (self.gain * away / (deviation + 1e-3) + self.shift).masked_fill(~seen, 0.0).to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            extra = torch.cat((self.gain, self.shift))
            return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, form="nap", extra=extra, eps=1e-3), None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)

    def finish(self, context: Tensor) -> Tensor:
        rows = context.transpose(1, 2).flatten(2)  # (b,i,h·d)
        return split_heads(F.gelu(self.norm(rows)), self.heads)
