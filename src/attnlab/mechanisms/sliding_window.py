"""Sliding-window attention (Beltagy et al. 2020, §3.1; Jiang et al. 2023, §2): softmax over the nearest keys.

    P = softmax(S) over visible keys j with |i − j| < size        sinks=m: also over the first m visible keys

A causal query sees itself and the size − 1 keys before it; in an encoder it also sees as many after it. With sinks the
first keys stay visible (Xiao et al. 2023, StreamingLLM; they keep 4). Up to size keys, this is softmax.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from attnlab.config import Natural, check_value
from attnlab.mechanisms.mechanism import position, visible
from attnlab.mechanisms.softmax import Arguments, Softmax

Size = Annotated[int, "[1, inf)"]


class SlidingWindow(Softmax):
    positional = True
    self_only = True

    def __init__(self, heads: int, head_dim: int, *, size: Size = 128, sinks: Natural = 0, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        check_value("size", size, Size)
        check_value("sinks", sinks, Natural)
        self.size, self.sinks = size, sinks

    def prepare(
        self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Arguments:
        if k.shape[2] <= self.size:  # all keys are near
            return q, k, mask, causal, bias
        seen = visible(q, k, mask, causal=causal, at=at)
        near = (position(q, k, at)[:, None] - torch.arange(k.shape[2], device=q.device)).abs() < self.size
        if self.sinks:
            near = near | (seen.cumsum(-1) <= self.sinks)
        return q, k, seen & near, False, bias
