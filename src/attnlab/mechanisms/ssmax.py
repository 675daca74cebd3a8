"""Scalable softmax, SSMax (Nakanishi 2025): logits grow with the number of keys, so long rows stay as sharp as short.

    P = softmax(s_h · ln n · S)        n: number of visible keys of the query        s_h: learnt, one for each head

The authors' s log n multiplies the query, so the fused softmax computes it. n is counted from what each query sees:
padding and later tokens do not sharpen a row. A row with one key has weight 1. initial: s before training; 1 / ln n
is softmax at length n, and the default is that of n = 10 (0.43, as in the paper's figure 1).
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.config import Positive, check_value
from attnlab.mechanisms.constants import remember
from attnlab.mechanisms.mechanism import visible
from attnlab.mechanisms.softmax import Arguments, Softmax
from attnlab.mechanisms.visible_sums import count_visible


class SSMax(Softmax):
    def __init__(self, heads: int, head_dim: int, *, initial: Positive = 0.43, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        check_value("initial", initial, Positive)
        self.s = nn.Parameter(torch.full((heads, 1, 1), float(initial)))

    def prepare(
        self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Arguments:
        if mask is None and bias is None and at is None and causal and q.shape[2] <= k.shape[2]:
            logs = log_counts(q.shape[2], k.shape[2], self.s.dtype, q.device)
        else:
            n = count_visible(q, k, mask, causal=causal, at=at)  # (b|1,1,i|1,1)
            if bias is not None:
                seen = visible(q, k, mask, causal=causal, at=at) & (bias != -torch.inf)
                n = seen.sum(-1, keepdim=True).clamp_min(1)
            logs = n.to(self.s.dtype).log()
        factor = self.s * logs
        if bias is not None:
            bias = (bias * factor).masked_fill(bias == -torch.inf, -torch.inf).to(q.dtype)
        return (q * factor).to(q.dtype), k, mask, causal, bias


@remember
def log_counts(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """ln n of the last `rows` queries of a causal row, (1,1,i,1)."""
    n = torch.arange(keys - rows + 1, keys + 1, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return n.to(dtype).log().view(1, 1, -1, 1)
