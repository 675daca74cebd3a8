"""Selective attention (Leviathan et al. 2024): a token may mask former tokens for all tokens after it.

    M_ij = max(0, S_ij of the first head) if j < i, else 0        F_ij = Σ_{l < i} M_lj        P = softmax(S − F)

All heads subtract the same F. It adds no parameters. The first visible key, where the sequence begins, is never masked.
A row reads all former queries: caches keep them, and each step computes all rows again. A hidden token masks nothing.
"""

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import ALL, Mechanism, WithCarry, logits, masked_softmax, position, widen


class Selective(Mechanism):
    row_sum = 1.0
    self_only = True
    positional = True
    lookback = ALL

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        own, keys = position(q, k, at)[:, None], torch.arange(k.shape[2], device=k.device)
        present = (seen & (keys == own)).any(-1, keepdim=True)  # the query's token is not hidden itself
        masks = seen & present & (keys < own) & (seen.cumsum(-1) > 1)
        z = widen(logits(q, k, self.scale, bias))
        masking = z[:, :1].relu().masked_fill(~masks, 0.0)  # M, (b,1,i,j)
        return masked_softmax(z - (masking.cumsum(-2) - masking), seen).to(q.dtype), None
