"""Sums over the visible keys without a number for each pair: what mechanisms without a softmax need of the keys.

    sum_visible     Σ_j x_j        count_visible   n = Σ_j 1        mean_visible   Σ_j x_j / n      over visible keys j
    mix_products    Σ_j (q_i·k_j) v_j  =  q_i Σ_j k_j v_jᵀ, linear attention (Katharopoulos et al. 2020, §3.2)

Sums are at least in float32. A causal sum goes by chunks of keys: those inside a chunk, by a triangular matrix, and the
sum before it. That is faster than `cumsum` on a GPU, and so is its gradient.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.mechanisms.constants import remember
from attnlab.mechanisms.mechanism import position, repeat_heads, visible, widen

CHUNK = 64  # keys


def has_row_mask(mask: Tensor | None) -> bool:
    """Whether a mask may differ from query to query."""
    return mask is not None and mask.dim() > 1 and mask.shape[-2] > 1


def sum_visible(
    x: Tensor, q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool = False, at: Tensor | None = None
) -> Tensor:
    """Sum x (b|1,g,j,d) over the keys that each query sees: (b,g,i,d), or (b,g,1,d) where all queries see the same."""
    x = widen(x)
    if has_row_mask(mask):
        return visible(q, k, mask, causal=causal, at=at).to(x.dtype) @ x
    if mask is not None:
        x = x.masked_fill(~visible(q, k, mask).mT, 0.0)
    if not causal:
        return x.sum(2, keepdim=True)
    sums = _sum_to_each(x)
    if at is None and q.shape[2] <= k.shape[2]:
        return sums[:, :, k.shape[2] - q.shape[2] :]
    ends = (position(q, k, at) + 1).clamp(0, k.shape[2])
    return F.pad(sums, (0, 0, 1, 0))[:, :, ends]


def _sum_to_each(x: Tensor) -> Tensor:
    """Sum x (b,g,j,d) over the keys up to each key, itself included."""
    if x.shape[2] <= CHUNK:
        return x.cumsum(2)
    parts = _split_chunks(x)
    inside = make_triangle(CHUNK, x.dtype, x.device) @ parts
    before = F.pad(inside[:, :, :-1, -1:].cumsum(2), (0, 0, 0, 0, 1, 0))
    return (inside + before).flatten(2, 3)[:, :, : x.shape[2]]


@remember
def make_triangle(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 for each key up to each key, else 0: (size,size)."""
    return torch.ones(size, size, dtype=dtype, device=device).tril()


@remember
def list_counts(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number of keys that the last `rows` queries of a causal row see: (1,1,i,1)."""
    return torch.arange(keys - rows + 1, keys + 1, dtype=dtype, device=device).view(1, 1, -1, 1)


def _split_chunks(x: Tensor) -> Tensor:
    """(b,g,j,d) -> (b,g,chunk,CHUNK,d), with zeros after the last key."""
    rest = -x.shape[2] % CHUNK
    x = F.pad(x, (0, 0, 0, rest)) if rest else x
    return x.reshape(*x.shape[:2], -1, CHUNK, x.shape[3])


def count_visible(
    q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool = False, at: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Count the keys that each query sees, at least 1: (b|1,1,i|1,1), at least in float32.

    With a bias, which hides keys where it is −∞, the heads may differ.
    """
    if bias is not None:
        seen = visible(q, k, mask, causal=causal, at=at) & (bias != -torch.inf)
        return widen(seen.sum(-1, keepdim=True).clamp_min(1))
    dtype, keys = torch.promote_types(k.dtype, torch.float32), k.shape[2]
    if mask is not None:
        ones = k.new_ones(1, 1, keys, 1, dtype=dtype)
        return sum_visible(ones, q, k, mask, causal=causal, at=at).clamp_min(1)
    if not causal:
        return k.new_full((1, 1, 1, 1), max(1, keys), dtype=dtype)
    if at is None and q.shape[2] <= keys:
        return list_counts(q.shape[2], keys, dtype, k.device)
    return (position(q, k, at) + 1).clamp(1, max(1, keys)).to(dtype).view(1, 1, -1, 1)


def mean_visible(
    v: Tensor, q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool = False, at: Tensor | None = None
) -> Tensor:
    """Average v (b,g,j,d) over the keys that each query sees, in its type: (b,g,i|1,d); 0 where there are none."""
    total = sum_visible(v, q, k, mask, causal=causal, at=at)
    return (total / count_visible(q, k, mask, causal=causal, at=at)).to(v.dtype)


def has_linear_form(q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None) -> bool:
    """Whether `mix_products` covers these queries and keys, and needs fewer products than all pairs do."""
    placed = causal and (at is not None or q.shape[2] > k.shape[2])
    return not placed and not has_row_mask(mask) and q.shape[2] > CHUNK


def mix_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Σ_j (q_i·k_j) v_j over visible keys, (b,h,i,d), at least in float32; causal: the queries are the last keys."""
    q, k, v = widen(q), widen(k), widen(v)
    if mask is not None:
        hidden = ~visible(q, k, mask).mT
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    if not causal:
        return q @ repeat_heads(k.mT @ v, q.shape[1])
    rows, former = q.shape[2], k.shape[2] - q.shape[2]
    before = (k[:, :, :former].mT @ v[:, :, :former]).unsqueeze(2)
    q, k, v = (_split_chunks(x[:, :, -rows:]) for x in (q, k, v))
    state = torch.cat([before, (k.mT @ v)[:, :, :-1]], 2).cumsum(2)  # the sum before each chunk
    k, v, state = (repeat_heads(x, q.shape[1]) for x in (k, v, state))
    context = (q @ k.mT).tril() @ v + q @ state
    return context.flatten(2, 3)[:, :, :rows]
