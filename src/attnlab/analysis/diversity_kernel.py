"""Σ_i H(½(p_a,i + p_b,i)) of every two heads in one pass over the weights; `diversity.py` defines it.

A program has a few queries of one example, and one shift k: it holds a tile of all heads beside the same tile with the
heads turned by k, so that k = 0 … h/2 meets every two heads, and k = 0 each with itself. Both tiles are the same lines
of memory; what a program adds up stays in registers until the end. Row sums, and whether a row has a negative weight,
are known from a first pass. Sums are made in float32, those over programs in float64, in a fixed order.
"""

import os
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 8  # of a program
NUMBERS = 2048  # in a tile
MOST_HEADS = 128


@triton.jit
def _tile(weights, mask, j, keys, heads, head, w_h, w_j, m_j, masked: tl.constexpr):
    """Weights of one query, (heads,keys), 0 where hidden."""
    inside = (j < keys)[None, :] & (head < heads)[:, None]
    if masked:
        inside = inside & (tl.load(mask + j * m_j, mask=j < keys, other=0) != 0)[None, :]
    return tl.load(weights + head[:, None].to(tl.int64) * w_h + j[None, :] * w_j, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _spread(x, y):
    """−m ln m, m = ½(x⁺ + y⁺); made so that what is no number stays none."""
    m = 0.25 * ((x + tl.abs(x)) + (y + tl.abs(y)))
    return -m * tl.log(tl.maximum(m, 1.2e-38))


@triton.jit
def _rows(
    weights, mask, size, least, heads, queries, keys, w_b, w_h, w_i, w_j, m_b, m_i, m_j,
    masked: tl.constexpr, wide: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Σ_j |w| of each head, and the least weight of all, of one query."""
    program = tl.program_id(0).to(tl.int64)
    b, i = program // queries, program % queries
    head = tl.arange(0, wide)
    total = tl.zeros((wide, tile), dtype=tl.float32)
    lowest = tl.zeros((wide, tile), dtype=tl.float32)
    for start in range(0, keys, tile):
        j = start + tl.arange(0, tile)
        x = _tile(weights + b * w_b + i * w_i, mask + b * m_b + i * m_i, j, keys, heads, head, w_h, w_j, m_j, masked)
        total += tl.abs(x)
        lowest = tl.minimum(lowest, x)
    tl.store(size + (b * heads + head) * queries + i, tl.sum(total, 1), mask=head < heads)
    tl.store(least + program, tl.min(tl.min(lowest, 1), 0))


@triton.jit
def _pairs(
    weights, mask, size, least, out, heads, queries, keys, w_b, w_h, w_i, w_j, m_b, m_i, m_j,
    masked: tl.constexpr, wide: tl.constexpr, tile: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    program, shift = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.cdiv(queries, rows)
    b, first = program // parts, program % parts * rows
    head = tl.arange(0, wide)
    other = tl.where(head < heads, (head + shift) % heads, heads)
    found = tl.zeros((wide, tile), dtype=tl.float32)
    for i in range(first, min(first + rows, queries)):
        mine = tl.load(size + (b * heads + head) * queries + i, mask=head < heads, other=0.0)
        theirs = tl.load(size + (b * heads + other) * queries + i, mask=other < heads, other=0.0)
        mine, theirs = 1.0 / tl.where(mine == 0.0, 1.0, mine), 1.0 / tl.where(theirs == 0.0, 1.0, theirs)
        signed = tl.load(least + b * queries + i) < 0.0
        row, hidden = weights + b * w_b + i * w_i, mask + b * m_b + i * m_i
        for start in range(0, keys, tile):
            j = start + tl.arange(0, tile)
            x = _tile(row, hidden, j, keys, heads, head, w_h, w_j, m_j, masked) * mine[:, None]
            y = _tile(row, hidden, j, keys, heads, other, w_h, w_j, m_j, masked) * theirs[:, None]
            found += _spread(x, y)
            if signed:
                found += _spread(-x, -y)
    place = (program * tl.num_programs(1) + shift) * heads + head
    tl.store(out + place, tl.sum(found, 1), mask=head < heads)


def pair_entropy(weights: Tensor, counted: Tensor | None) -> Tensor:
    """(b,h,h) in float64, of weights (b,h,i,j) and what is counted of them, bool (b,1,i,j); None: all."""
    b, h, i, j = weights.shape
    parts, shifts = triton.cdiv(i, QUERIES), h // 2 + 1
    size, least = (weights.new_empty(shape, dtype=torch.float32) for shape in ((b, h, i), (b, i)))
    out = weights.new_empty(b, parts, shifts, h, dtype=torch.float32)
    wide = triton.next_power_of_2(h)
    options = {"wide": wide, "tile": min(triton.next_power_of_2(j), max(16, NUMBERS // wide))}
    options["masked"] = counted is not None
    strides = (0, 0, 0) if counted is None else tuple(counted.stride(axis) for axis in (0, 2, 3))
    given = (weights, weights if counted is None else counted.view(torch.uint8), size, least)  # then it is never read
    sizes = (h, i, j, *weights.stride(), *strides)
    with torch.cuda.device(weights.device) if weights.is_cuda else nullcontext():
        _rows[(b * i,)](*given, *sizes, **options)
        _pairs[(b * parts, shifts)](*given, out, *sizes, **options, rows=QUERIES)
    return _unturned(out.sum(1, dtype=torch.float64))


def _unturned(turned: Tensor) -> Tensor:
    """(b,shifts,h), of head a with head a + shift, as a symmetric (b,h,h)."""
    b, shifts, h = turned.shape
    head = torch.arange(h, device=turned.device).expand(shifts, h)
    other = (head + torch.arange(shifts, device=turned.device)[:, None]) % h
    found = turned.new_empty(b, h, h)
    found[:, head, other] = turned
    found[:, other, head] = turned
    return found.triu() + found.triu(1).mT


def unsupported(weights: Tensor) -> str | None:
    """What keeps this kernel from a case, or None."""
    if not weights.is_cuda and not os.environ.get("TRITON_INTERPRET"):
        return f"tensors on {weights.device}"
    if weights.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return str(weights.dtype)
    if weights.shape[1] > MOST_HEADS:
        return f"more than {MOST_HEADS} heads"
    if weights.numel() == 0:
        return "no weights at all"
    return None
