"""Attention without normalisation (Richter & Wattenhofer 2020, "NON").

    weights = S / √n        S = q kᵀ / √d, n visible keys

The authors divide by the root of the sequence length. Counting visible keys is the same on a full row, and lets a
causal row be computed before later rows exist.
"""

from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen


class NON(Mechanism):
    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        s = widen(logits(q, k, self.scale, bias))
        n = seen.sum(-1, keepdim=True).clamp_min(1).to(s.dtype)
        return (s.masked_fill(~seen, 0.0) / n.sqrt()).to(q.dtype), None
