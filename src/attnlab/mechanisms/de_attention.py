"""Compositional de-attention (Tay et al. 2019, "CoDA"; not the CODA of Zheng et al. 2021).

    weights = tanh(S) ⊙ 2σ(−D)        S = q kᵀ / √d        D = ‖q − k‖₁ / √d

The factor 2 lets the gate reach 1 where q = k. The authors' code was not to be had: this is the form in public use.
"""

import torch

from attnlab.mechanisms.mechanism import Mechanism, logits, repeat_heads, visible


class DeAttention(Mechanism):
    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = visible(q, k, mask, causal=causal, at=at)
        wide = q.dtype if q.dtype == torch.float64 else torch.float32  # cdist knows no narrower type
        distance = torch.cdist(q.to(wide), repeat_heads(k, self.heads).to(wide), p=1.0) * self.scale
        gate = 2 * torch.sigmoid(-distance).to(q.dtype)
        return (logits(q, k, self.scale, bias).tanh() * gate).masked_fill(~seen, 0.0), None
