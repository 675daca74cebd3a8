"""Forgetting attention (Lin et al. 2025, "Forgetting Transformer", eq. 4–6): softmax with a decay that depends on data.

    f_l = σ(x_l w_f + b_f)        D_ij = Σ_{j < l ≤ i} log f_l        P = softmax(S + D)

One gate for each head and key. A hidden key does not decay anything. A key after its query, which only an encoder
sees, has D_ij = 0. In a causal row D_ij = c_i − c_j with running sums c, and softmax does not need c_i. So the kernels
add −c_j and store nothing for each pair, unless the mask differs between queries.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass
from attnlab.mechanisms.mechanism import Mechanism, Sides, WithCarry, logits, masked_softmax, position, split_heads
from attnlab.mechanisms.visible_sums import has_row_mask


class FoX(Mechanism):
    kernels = frozenset({"one_pass"})
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
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        decay = self.sum_decay(q, k, seen, at, sides[1])
        return masked_softmax(logits(q, k, self.scale, bias) + decay, seen), None

    def sum_decay(self, q: Tensor, k: Tensor, seen: Tensor, at: Tensor | None, log_f: Tensor) -> Tensor:
        """D, (b,h,i,j), from log f, (b,h,j,1)."""
        past = torch.arange(k.shape[2], device=k.device) <= position(q, k, at)[:, None]
        log_f = log_f.mT.masked_fill(~(seen & past), 0.0)
        return log_f.flip(-1).cumsum(-1).flip(-1) - log_f

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
            sides: Sides = (None, None)) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if not can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias, sides=sides)
        if causal and bias is None and not has_row_mask(mask):
            from attnlab.mechanisms.kernels.decay import make_decay

            decay = make_decay(sides[1], mask)
        else:
            decay = self.sum_decay(q, k, self.visible(q, k, mask, causal=causal, bias=bias), None, sides[1])
        bias = decay if bias is None else decay + bias
        return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias), None
