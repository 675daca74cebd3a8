"""Softmax off by one (Miller 2023): a head may attend to nothing.

    weights = exp(S) / (n + Σ_j exp(S_j))        n = 1

Rows sum to less than 1. This is softmax with one more key, whose logit is ln n and whose weight is dropped.
impl="auto" is one softmax attention over the keys and one more, whose value is 0.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.config import Positive, check_value
from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass, takes_members_in_one_pass
from attnlab.mechanisms.constants import remember
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, widen
from attnlab.mechanisms.softmax import attend


class Softmax1(Mechanism):
    kernels = frozenset({"one_pass"})
    takes_members = takes_members_in_one_pass

    def __init__(self, heads: int, head_dim: int, *, n: Positive = 1.0, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        check_value("n", n, Positive)
        self.n = n

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        s = widen(logits(q, k, self.scale, bias)).masked_fill(~seen, -torch.inf)
        return F.pad(s, (0, 1), value=math.log(self.n)).softmax(-1)[..., :-1].to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        if self.impl == "reference":
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        self.check(q, k, mask, at, v)
        if can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            extra = fill_logits(self.heads, math.log(self.n), q.device)
            return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias, extra=extra), None
        return attend_or_not(self, q, k, v, mask, math.log(self.n), causal=causal, at=at, bias=bias), None


@remember
def fill_logits(heads: int, value: float, device: torch.device) -> Tensor:
    """The same logit for every head, (h,) in float32."""
    return torch.full((heads,), value, dtype=torch.float32, device=device)


def attend_or_not(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, nothing: float, *, causal: bool,
    at: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Softmax attention by torch with one more key before the others: its logit is `nothing` and its value 0.

    Causal queries get one more, too, so that the causal mask stays a square where it was one.
    """
    more = causal and at is None and bias is None and nothing == 0 and q.shape[2] == k.shape[2]
    q = F.pad(q, (0, 0, int(more), 0))
    if nothing != 0 or bias is not None:
        bias = q.new_zeros(1, 1, 1, k.shape[2]) if bias is None else bias
        bias = F.pad(bias.expand(*bias.shape[:-1], k.shape[2]), (1, 0), value=nothing)
    k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, k.shape[2] - 1)
        rows = int(more and mask.shape[2] > 1)
        mask = F.pad(mask, (1, 0, rows, 0), value=True)
    at = None if at is None else at.clamp_min(-1) + 1
    context = attend(mechanism, q, k, v, mask, causal=causal, at=at, bias=bias, kernel=False)
    return context[:, :, int(more) :]
