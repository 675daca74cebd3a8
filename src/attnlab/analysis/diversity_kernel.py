"""Σ_i H(½(p_a,i + p_b,i)) of every two heads in one pass over the weights; `diversity.py` defines it.

A program has a few queries of one example and two groups of at most 8 heads, often the same group twice. It reads a row
of weights once for the sum of each head, and again, now from the cache, with every two heads in registers. Its results
stay in registers until the end. Sums are in float32; sums over programs are in float64, in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import select_device

QUERIES = 8  # per program
GROUP = 8  # heads
TILE = 64  # keys
SMALLEST = tl.constexpr(1.2e-38)  # just above the smallest normal float32; a GPU's log₂ treats smaller values as 0


@triton.jit
def _tile(weights, mask, j, keys, heads, head, w_h, w_j, m_j, masked: tl.constexpr):
    """Load the weights (heads,keys) of one query, 0 where hidden."""
    inside = (j < keys)[None, :] & (head < heads)[:, None]
    if masked:
        inside = inside & (tl.load(mask + j.to(tl.int64) * m_j, mask=j < keys, other=0) != 0)[None, :]
    place = head[:, None].to(tl.int64) * w_h + j[None, :].to(tl.int64) * w_j
    return tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _spread(x, y, chip: tl.constexpr):
    """Compute −m log₂ m of every two heads, m = x⁺ + y⁺, (heads,heads,keys). NaN stays NaN.

    chip   use the GPU's approximate log₂: error 2⁻²², a quarter of the time
    """
    m = 0.5 * (x + tl.abs(x))[:, None, :] + 0.5 * (y + tl.abs(y))[None, :, :]
    above = tl.maximum(m, SMALLEST)
    if chip:
        log = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [above], tl.float32, is_pure=True, pack=1)
    else:
        log = tl.log2(above)
    return -m * log


@triton.jit
def _row(weights, mask, keys, heads, head, w_h, w_j, m_j, masked: tl.constexpr, tile: tl.constexpr):
    """Return ½ / Σ_j |w| of each head for one query, and whether any weight is negative."""
    total = tl.zeros((head.shape[0], tile), dtype=tl.float32)
    lowest = tl.zeros((head.shape[0], tile), dtype=tl.float32)
    for start in range(0, keys, tile):
        x = _tile(weights, mask, start + tl.arange(0, tile), keys, heads, head, w_h, w_j, m_j, masked)
        total += tl.abs(x)
        lowest = tl.minimum(lowest, x)
    size = tl.sum(total, 1)
    return 0.5 / tl.where(size == 0.0, 1.0, size), tl.min(tl.min(lowest, 1), 0) < 0.0


@triton.jit
def _pairs(
    weights, mask, out, heads, queries, keys, w_b, w_h, w_i, w_j, m_b, m_i, m_j,
    masked: tl.constexpr, chip: tl.constexpr, group: tl.constexpr, tile: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Store the sums of a program. It has many parameters: Triton takes sizes and strides separately."""
    if tl.program_id(1) > tl.program_id(2):  # another program has the same two groups in the other order
        return
    program = tl.program_id(0).to(tl.int64)
    parts = tl.cdiv(queries, rows)
    b, first = program // parts, program % parts * rows
    left, right = tl.program_id(1) * group + tl.arange(0, group), tl.program_id(2) * group + tl.arange(0, group)
    found = tl.zeros((group, group, tile), dtype=tl.float32)
    for i in range(first, min(first + rows, queries)):
        row, hidden = weights + b * w_b + i * w_i, mask + b * m_b + i * m_i
        mine, signed = _row(row, hidden, keys, heads, left, w_h, w_j, m_j, masked, tile)
        theirs, signed_too = _row(row, hidden, keys, heads, right, w_h, w_j, m_j, masked, tile)
        for start in range(0, keys, tile):
            j = start + tl.arange(0, tile)
            x = _tile(row, hidden, j, keys, heads, left, w_h, w_j, m_j, masked) * mine[:, None]
            y = _tile(row, hidden, j, keys, heads, right, w_h, w_j, m_j, masked) * theirs[:, None]
            found += _spread(x, y, chip)
            if signed | signed_too:
                found += _spread(-x, -y, chip)
    inside = (left < heads)[:, None] & (right < heads)[None, :]
    place = (program * heads + left[:, None]) * heads + right[None, :]
    tl.store(out + place, 0.6931471805599453 * tl.sum(found, 2), mask=inside)


def pair_entropy(weights: Tensor, counted: Tensor | None) -> Tensor:
    """Compute (b,h,h), float64, from weights (b,h,i,j) and a bool mask (b,1,i,j) of counted pairs; None = all."""
    b, h, i, j = weights.shape
    parts, groups = triton.cdiv(i, QUERIES), triton.cdiv(h, GROUP)
    out = weights.new_empty(b, parts, h, h, dtype=torch.float32)  # filled on and above the diagonal
    group = min(GROUP, triton.next_power_of_2(h))
    strides = (0, 0, 0) if counted is None else tuple(counted.stride(axis) for axis in (0, 2, 3))
    given = (weights, weights if counted is None else counted.view(torch.uint8))  # unread without a mask
    with select_device(weights):
        _pairs[(b * parts, groups, groups)](
            *given, out, h, i, j, *weights.stride(), *strides,
            masked=counted is not None, chip=weights.is_cuda, group=group, tile=TILE, rows=QUERIES,
        )  # fmt: skip
    found = out.sum(1, dtype=torch.float64)
    return found.triu() + found.triu(1).mT
