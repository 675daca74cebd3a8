"""Sliding-window attention (Beltagy et al. 2020, §3.1; Jiang et al. 2023, §2): softmax over the nearest keys.

    P = softmax(S) over visible keys j with |i − j| < size        sinks=m: also over the first m visible keys

A causal query sees itself and the size − 1 keys before it; in an encoder it also sees as many after it. With sinks the
first keys stay visible (Xiao et al. 2023, StreamingLLM; they keep 4). Up to size keys, this is softmax.
impl="auto" takes chunks of at least size queries. Each sees its own chunk of keys, the one before it, in an encoder the
one after it, and the sinks, so that time and memory are linear in the number of keys.
"""

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.config import Natural, check_value
from attnlab.mechanisms.mechanism import WithCarry, position, visible
from attnlab.mechanisms.softmax import Arguments, Softmax, attend
from attnlab.mechanisms.visible_sums import has_row_mask

CHUNK = 64  # the least number of queries in a chunk
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

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        chunk = -(-self.size // CHUNK) * CHUNK
        plain = at is None and bias is None and q.shape[2] == k.shape[2] and not has_row_mask(mask)
        if self.impl != "auto" or not plain or k.shape[2] <= 3 * chunk:
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        self.check(q, k, mask, at, v)
        return self.mix_chunks(chunk, q, k, v, mask, causal=causal), None

    def mix_chunks(self, chunk: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        """Return the context by softmax attention of each chunk of queries to the keys near it, and to the sinks."""
        b, heads, n, size = q.shape
        chunks, keys = -(-n // chunk), torch.arange(n, device=q.device)
        present = q.new_ones(1, n, dtype=torch.bool) if mask is None else visible(q, k, mask)[:, 0, 0].expand(-1, n)
        own = F.pad(keys, (0, chunks * chunk - n), value=-1).view(1, chunks, chunk, 1)
        near = gather_near(torch.where(present, keys, n + self.size)[:, None, :, None], chunk, causal, n + self.size)
        near = near[:, 0, :, None, :, 0]  # the key of each place near a chunk, or one that is far from all
        allow = ((own - near).abs() < self.size) & ((near <= own) | (not causal))  # (b|1,chunk,query,place)
        k_near, v_near = (gather_near(x, chunk, causal, 0).transpose(1, 2) for x in (k, v))
        if self.sinks:
            first = (~present).to(torch.uint8).argsort(dim=1, stable=True)[:, : self.sinks]  # (b|1,sinks)
            sink, here = first[:, None, None], present.gather(1, first)[:, None, None]
            far = here & ((own - sink).abs() >= self.size) & ((sink <= own) | (not causal))
            allow = torch.cat([far, allow], dim=-1)
            k_near, v_near = (
                torch.cat([gather_sinks(x, first, chunks), y], dim=3) for x, y in ((k, k_near), (v, v_near))
            )
        rows = F.pad(q, (0, 0, 0, chunks * chunk - n)).view(b, heads, chunks, chunk, size).transpose(1, 2)
        folded = allow.expand(b, -1, -1, -1).flatten(0, 1)[:, None]
        context = attend(
            self, rows.flatten(0, 1), k_near.flatten(0, 1), v_near.flatten(0, 1), folded, causal=False, at=None,
            bias=None, kernel=False,
        )  # fmt: skip
        return context.reshape(b, chunks, heads, chunk, -1).transpose(1, 2).flatten(2, 3)[:, :, :n]


def gather_near(x: Tensor, chunk: int, causal: bool, fill: int) -> Tensor:
    """Return what is near each chunk of tokens: its chunk and the one before and after: (b,h,n,d) -> (b,h,c,place,d).

    causal   leaves out the chunk after; fill: what is beyond the sequence
    """
    chunks = -(-x.shape[2] // chunk)
    padded = F.pad(x, (0, 0, chunk, (chunks + 1) * chunk - x.shape[2]), value=fill)
    padded = padded.view(*x.shape[:2], chunks + 2, chunk, x.shape[3])
    return torch.cat([padded[:, :, shift : shift + chunks] for shift in range(2 if causal else 3)], dim=3)


def gather_sinks(x: Tensor, first: Tensor, chunks: int) -> Tensor:
    """Return the tokens `first` (b|1,m) for each chunk: (b,h,n,d) -> (b,c,h,m,d)."""
    index = first[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])
    return x.gather(2, index)[:, None].expand(-1, chunks, -1, -1, -1)
