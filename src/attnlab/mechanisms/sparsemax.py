"""Sparsemax (Martins & Astudillo 2016): the Euclidean projection of the logits onto the simplex, so most weights are 0.

    weights = argmin_{p ∈ Δ} ‖p − S‖²

The projection comes from the package `entmax`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen


class Sparsemax(Mechanism):
    row_sum = 1.0

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        from entmax import sparsemax

        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_projection(sparsemax, logits(q, k, self.scale, bias), seen), None


def masked_projection(project: Callable[..., Tensor], s: Tensor, seen: Tensor) -> Tensor:
    """Project the logits of the visible keys, at least in float32. A row without visible keys is 0.

    In sparsemax and 1.5-entmax a logit more than 2 below the largest has weight 0, so hidden keys get such a logit.
    """
    if not s.shape[-1]:
        return s
    seen = seen & (s > -torch.inf)
    top = widen(s).detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    p = project(torch.where(seen, widen(s), top - 100.0), dim=-1)
    return p.masked_fill(~seen, 0.0).to(s.dtype)
