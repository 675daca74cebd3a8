"""Forgetting attention (Lin et al. 2025, "Forgetting Transformer", eq. 4–6): softmax with a decay that depends on data.

    f_l = σ(x_l w_f + b_f)        D_ij = Σ_{j < l ≤ i} log f_l        P = softmax(S + D)

One gate for each head and key. A hidden key does not decay anything. A key after its query, which only an encoder
sees, has D_ij = 0.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import Mechanism, Sides, WithCarry, logits, masked_softmax, position, split_heads


class FoX(Mechanism):
    row_sum = 1.0
    positional = True
    self_only = True

    def __init__(self, heads: int, head_dim: int, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.forget = nn.Linear(self.model_size, heads)  # w_f, b_f

    def key_side(self, x: Tensor) -> Tensor:
        return F.logsigmoid(split_heads(self.forget(x), self.heads))  # log f, (b,h,j,1)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
                sides: Sides = (None, None)) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        past = torch.arange(k.shape[2], device=k.device) <= position(q, k, at)[:, None]
        log_f = sides[1].mT.masked_fill(~(seen & past), 0.0)  # (b,h,i,j)
        decay = log_f.flip(-1).cumsum(-1).flip(-1) - log_f
        return masked_softmax(logits(q, k, self.scale, bias) + decay, seen), None
