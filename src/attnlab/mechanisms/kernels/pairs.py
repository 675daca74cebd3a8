"""Visibility, bias, noise and dropout of (query, key) pairs, inside a kernel.

Philox gives four words for each counter, one for each of four consecutive keys. Counters exist for every fourth key,
and their draws are laid side by side. The normals are those of `mechanisms/noise.py`.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import is_intercepted

INTERPRETED = tl.constexpr(bool(os.environ.get("TRITON_INTERPRET")))  # the interpreter knows no assembly


class Visibility(NamedTuple):
    """Which pairs are visible, as arguments of `is_visible`: the mask as bytes, its strides, and two flags.

    MASKED is 0 without a mask, 1 with one, and 2 if it is the same for all queries.
    """

    mask: Tensor
    strides: tuple[int, int, int]
    flags: dict[str, int]


def read_mask(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Visibility:
    """Describe a mask (bool, broadcastable to (b,1,i,j), or None); without a mask the pointer is never read."""
    if mask is None:
        return Visibility(q, (0, 0, 0), {"MASKED": 0, "CAUSAL": causal})
    b, _, i, j = mask[(None,) * (4 - mask.dim())].expand(q.shape[0], 1, q.shape[2], k.shape[2]).stride()
    return Visibility(mask.view(torch.uint8), (b, i, j), {"MASKED": 1 if i else 2, "CAUSAL": causal})


def count_examples(b: int, seed: Tensor | None) -> int:
    """The number of the b examples that have the same seed: all with one, (), or those of a member with (s,)."""
    return b if seed is None else b // seed.numel()


class Bias(NamedTuple):
    """A bias as arguments of `add_bias`: its values, its strides as (b,h,i,j), 0 where it broadcasts, and its kind."""

    values: Tensor
    strides: tuple[int, int, int, int]
    kind: int


ABSENT, OF_PAIRS, OF_KEYS, RELATIVE = (tl.constexpr(kind) for kind in range(4))
BLOCK = tl.constexpr(128)  # queries with the same reference; a tile has no more


def read_bias(bias: Tensor | None, q: Tensor, k: Tensor, relative: bool = False) -> Bias:
    """Describe a bias (floating-point, broadcastable to (b,h,i,j), or None); without one the pointer is never read.

    OF_KEYS    it is the same for all queries
    RELATIVE   the same in float64, for weights that a number added to all logits of a row does not change: the bias of
               a key near the queries is subtracted first, so a running sum keeps its digits when it becomes float32.
               Kernels read it as a sum of two float32 numbers, since float64 is slow in them
    """
    if bias is None:
        return Bias(q, (0, 0, 0, 0), ABSENT.value)
    whole = bias[(None,) * (4 - bias.dim())]
    if relative and bias.dtype == torch.float64 and whole.shape[2] == 1:
        halves = _split_once(bias, whole)
        b, h, _, j = halves[0].expand(*q.shape[:3], k.shape[2]).stride()
        return Bias(halves, (b, h, whole.numel(), j), RELATIVE.value)  # the third: from one half to the other
    b, h, i, j = whole.expand(*q.shape[:3], k.shape[2]).stride()
    return Bias(bias, (b, h, i, j), (OF_KEYS if whole.shape[2] == 1 else OF_PAIRS).value)


def _split_once(bias: Tensor, whole: Tensor) -> Tensor:
    """Return the halves of a bias in four axes, which the tensor keeps: the backward pass reads them again."""
    if bias.is_inference() or torch.compiler.is_compiling() or is_intercepted():
        return split_float64(whole)
    kept: tuple[int, Tensor] | None = getattr(bias, "halves", None)
    if kept is None or kept[0] != bias._version:
        kept = bias._version, split_float64(whole)
        if not (bias.is_cuda and torch.cuda.is_current_stream_capturing()):  # memory of the graph
            bias.halves = kept  # type: ignore[attr-defined]
    return kept[1]


def split_float64(x: Tensor) -> Tensor:
    """Two float32 numbers whose sum is x, to 48 bits, (2,*x.shape); the second of −∞ is 0."""
    halves = x.new_empty((2, *x.shape), dtype=torch.float32)
    halves[0].copy_(x)
    halves[1].copy_(x - halves[0]).nan_to_num_(0.0)
    return halves


def is_multiple_of_8(*numbers: int) -> bool:
    """Whether all are multiples of 8. If so, kernels get the flag EVEN and load 8 numbers at once."""
    return all(n % 8 == 0 for n in numbers)


@triton.jit
def mark_multiple_of_8(n, EVEN: tl.constexpr):
    """Return n, which the compiler then knows to be a multiple of 8 if EVEN."""
    if EVEN:
        n = n // 8 * 8
    return n


@triton.jit
def add_bias(s, bias, b, h, first, i, j, rows, keys, a_b, a_h, a_i, a_j, BIAS: tl.constexpr, UNIT: tl.constexpr):
    """Logits s of queries i, from `first` on, and keys j plus UNIT times their bias."""
    at = bias + b * a_b + h * a_h
    if BIAS == RELATIVE:
        middle = first // BLOCK * BLOCK + BLOCK // 2 + (keys - rows)
        middle = tl.minimum(tl.maximum(middle, 0), keys - 1) * a_j
        reference = tl.load(at + middle)
        reference = tl.where(reference == float("-inf"), 0.0, reference)
        coarse = tl.load(at + j * a_j, mask=j < keys, other=0.0) - reference
        fine = tl.load(at + a_i + j * a_j, mask=j < keys, other=0.0) - tl.load(at + a_i + middle)
        s += ((coarse + fine) * UNIT)[None, :]
    if BIAS == OF_KEYS:
        s += (tl.load(at + j * a_j, mask=j < keys, other=0.0).to(tl.float32) * UNIT)[None, :]
    if BIAS == OF_PAIRS:
        inside = (i < rows)[:, None] & (j < keys)[None, :]
        s += tl.load(at + i[:, None] * a_i + j[None, :] * a_j, mask=inside, other=0.0).to(tl.float32) * UNIT
    return s


@triton.jit
def is_visible(
    mask, b, i, j, rows, keys, m_b, m_i, m_j, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr = False
):
    """Whether query i sees key j; False outside the sequences. i and j broadcast against each other.

    WHOLE: all keys exist and none is after a query, so the mask alone is left, and queries outside may see any.
    """
    seen = tl.full((i.shape[0], j.shape[1]), True, tl.int1) if WHOLE else (i < rows) & (j < keys)
    if MASKED == 2:
        seen = seen & (tl.load(mask + b * m_b + j * m_j, mask=j < keys, other=0) != 0)
    elif MASKED:
        inside = (i < rows) & (j < keys)
        seen = seen & (tl.load(mask + b * m_b + i * m_i + j * m_j, mask=inside, other=0) != 0)
    if CAUSAL and not WHOLE:
        seen = seen & (j <= i + (keys - rows))
    return seen


@triton.jit
def whole_keys(first, rows, keys, CAUSAL: tl.constexpr, BJ: tl.constexpr):
    """The end of the tiles of BJ keys that every query from `first` on may see as a whole."""
    return tl.maximum(last_key(first + 1, rows, keys, CAUSAL), 0) // BJ * BJ


@triton.jit
def whole_queries(left, rows, keys, CAUSAL: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """The first tile of BI queries that may all see all BJ keys from `left` on; `rows` or more if there is none."""
    start = tl.cdiv(first_query(left + BJ - 1, rows, keys, CAUSAL), BI) * BI
    return tl.where(left + BJ <= keys, start, rows)


@triton.jit
def last_key(after, rows, keys, CAUSAL: tl.constexpr):
    """The end of the keys that a query before `after` may see."""
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, after + (keys - rows))
    return end


@triton.jit
def first_query(j, rows, keys, CAUSAL: tl.constexpr):
    """The first query that may see key j or a later one."""
    start = 0
    if CAUSAL:
        start = tl.maximum(0, j - (keys - rows))
    return start


@triton.jit
def normals(seed, layer, b, h, i, quad):
    """ε of keys 4·quad … 4·quad + 3, in float32; i is the query's position. The last of two axes grows fourfold."""
    c0, c1 = tl.broadcast(quad.to(tl.uint32), i.to(tl.uint32))
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, b.to(tl.uint32), (h + (layer << 16)).to(tl.uint32))
    n0, n1 = _box_muller(w0, w1)
    n2, n3 = _box_muller(w2, w3)
    return _side_by_side(n0, n1, n2, n3)


@triton.jit
def draw_dropout(seed, rate, head, i, quad):
    """Dropout's keep / (1 − rate) of keys 4·quad … 4·quad + 3; head counts through the batch."""
    c0, c1 = tl.broadcast(quad.to(tl.uint32), i.to(tl.uint32))
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, head.to(tl.uint32), 0)
    draw = tl.uint_to_uniform_float(_side_by_side(w0, w1, w2, w3))
    return tl.where(draw >= rate, 1.0 / (1.0 - rate), 0.0)


@triton.jit
def _box_muller(w0, w1):
    """Two normals from two words. A GPU's own approximations are exact to about 1e-6."""
    u, angle = tl.maximum(1.0e-7, tl.uint_to_uniform_float(w0)), 6.283185307179586 * tl.uint_to_uniform_float(w1)
    if INTERPRETED:
        log, cos, sin = tl.log2(u), tl.cos(angle), tl.sin(angle)
    else:
        log = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [u], tl.float32, True, 1)
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    radius = tl.sqrt(-1.3862943611198906 * log)  # −2 ln 2
    return radius * cos, radius * sin


@triton.jit
def _side_by_side(a, b, c, d):
    """Four (m,n) -> (m,4n): a, b, c, d of the first column, then of the second, …"""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4 * a.shape[1]))
