"""Compositional de-attention (Tay et al. 2019, "CoDA", not Zheng's CODA): a sign to add or subtract, times a gate.

    weights = tanh(S) ⊙ 2σ(−D)        S = q kᵀ / √d        D = ‖q − k‖₁ / √d

The factor 2 lets the gate reach 1 where q = k. The authors' code is not public; this is the form in public use.
"""

import torch
from torch import Tensor

from attnlab.mechanisms.cascade import draw_dropping, is_case_covered
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, repeat_heads, widen


class DeAttention(Mechanism):
    kernels = frozenset({"de_attention"})

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        keys = widen(repeat_heads(k, self.heads))  # cdist needs at least float32
        rows = max(1, 2**28 // max(keys.numel(), 1))  # cdist's gradient allocates rows · keys.numel() numbers
        parts = [torch.cdist(part, keys, p=1.0) for part in torch.split(widen(q), rows, dim=2)]
        gate = 2 * torch.sigmoid(-torch.cat(parts, dim=2) * self.scale).to(q.dtype)
        return (logits(q, k, self.scale, bias).tanh() * gate).masked_fill(~seen, 0.0), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if self.wants_kernels(q) and is_case_covered(self, q, k, v, at=at, bias=bias):
            from attnlab.mechanisms.kernels.de_attention import de_attention

            rate, seed = draw_dropping(self, q)
            return de_attention(q, k, v, mask, seed, causal, self.scale, rate), None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
