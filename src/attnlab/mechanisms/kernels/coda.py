"""CODA's σ over the heads, at every visible (query, key): turns logits S into Z in place, and gradients of Z into dS.

    forward    Z = S + C + σ(S + C) + ε      C: the carry;  variant "paper": Z = S [+ C] + σ(C) + ε
               σ(x) = W₃ l(W₂ l(W₁ x + b₁) + b₂) + b₃        l: LeakyReLU 0.2;  "paper" has no W₂, b₂
    backward   activations are recomputed; e₃ = G, e₂ = l'∘W₃ᵀe₃, e₁ = l'∘W₂ᵀe₂, dX = G + W₁ᵀe₁ (of S and of C)
               dW_n = Σ e_n x_{n−1}ᵀ, db_n = Σ e_n over the pairs

A program takes a few rows of one example, with all heads of a pair, and loops over the keys. Pairs are the rows of all
products, so activations stay in registers from one product to the next, as in flash attention, and only the weights are
in shared memory. Each program adds up its part of the gradient of W₁, b₁, W₂, b₂, W₃, b₃, which is one flat vector in
this order. Whoever asked for the parts sums them in a fixed order, so results are deterministic.

Members have parameters of their own, with a leading axis (s,…). Their examples come one after another, and a program
serves one member.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import WIDEST, divide_up, note_launch, remember_calls, round_up, select_device
from attnlab.mechanisms.kernels.pairs import (
    Visibility,
    count_examples,
    is_multiple_of_8,
    is_visible,
    last_key,
    mark_multiple_of_8,
    normals,
)

MOST_HEADS = 32
PRECISION = tl.constexpr("tf32x3")  # for float32: three products in tf32, of the high and the low bits
PROGRAMS = 264  # two for each multiprocessor of a large GPU; each computes a part of σ's gradient
PLAIN = ("rows", "keys", "m_b", "layer", "each", "drawn", "size")  # numbers that have no variants
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
Net = tuple[Tensor | None, ...]  # W₁, b₁, W₂, b₂, W₃, b₃; without a second hidden layer W₂ and b₂ are None


@triton.jit
def _at_pairs(x, b, h, i, j, heads, rows, keys):
    """Pointers to the heads h of pairs (i, j) in x (b,h,i,j): (heads, pairs)."""
    plane = b * heads + h.to(tl.int64)[:, None]
    return x + plane * (rows * keys) + (i * keys + j)[None, :]


@triton.jit
def _inside(h, i, j, heads, rows, keys):
    return (h < heads)[:, None] & ((i < rows) & (j < keys))[None, :]


@triton.jit
def _load_pairs(x, b, h, i, j, heads, rows, keys):
    """x at the heads h of pairs (i, j), in float32; hidden pairs too, so that loads are wide."""
    place = _at_pairs(x, b, h, i, j, heads, rows, keys)
    return tl.load(place, mask=_inside(h, i, j, heads, rows, keys), other=0.0).to(tl.float32)


@triton.jit
def _inner(z, carry, b, h, i, j, seen, heads, rows, keys, OWN: tl.constexpr, BIASED: tl.constexpr):
    """The input of σ, and the carry, (heads, pairs) in float32, 0 where hidden; and what is visible.

    OWN: the input includes S. BIASED: S includes a bias, which hides the pairs of a head where it is −∞.
    """
    c = _load_pairs(carry, b, h, i, j, heads, rows, keys)
    x, shown = c, seen[None, :]
    if OWN or BIASED:
        s = _load_pairs(z, b, h, i, j, heads, rows, keys)
        if OWN:
            x = c + s
        if BIASED:
            shown = shown & (s != float("-inf"))
    return tl.where(shown, x, 0.0), tl.where(shown, c, 0.0), shown


@triton.jit
def _matrix(x, member, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    """Load a member's matrix (rows,columns), padded with zeros."""
    m, n = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return tl.load(x + member * rows * columns + m * columns + n, mask=(m < rows) & (n < columns), other=0.0).to(T)


@triton.jit
def _vector(x, member, size, SIZE: tl.constexpr):
    m = tl.arange(0, SIZE)
    return tl.load(x + member * size + m, mask=m < size, other=0.0).to(tl.float32)


@triton.jit
def _leaky(y, T: tl.constexpr):
    """LeakyReLU of y, in type T."""
    return tl.maximum(y, 0.2 * y).to(T)


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _collide(
    z, carry, in_w, in_b, mid_w, mid_b, out_w, out_b, mask, seed, heads, width, rows, keys, m_b, m_i, m_j, layer, each,
    drawn, MASKED: tl.constexpr, CAUSAL: tl.constexpr, NOISY: tl.constexpr, OWN: tl.constexpr, RESIDUAL: tl.constexpr,
    BIASED: tl.constexpr, DEEP: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """BI rows of one example. K: the number of heads as the inner size of a product, at least 16.

    each, drawn: number of examples that have the same σ, and the same seed.
    """
    keys, m_b = mark_multiple_of_8(keys, EVEN), mark_multiple_of_8(m_b, EVEN)
    bands = tl.cdiv(rows, BI)
    b = (tl.program_id(0) // bands).to(tl.int64)
    member = b // each
    first = (bands - 1 - tl.program_id(0) % bands) * BI  # causal: the longest rows are the last, and start first
    h, pair = tl.arange(0, H), tl.arange(0, BI * BJ)
    i = first + pair // BJ
    w1, b1 = _matrix(in_w, member, width, heads, WIDE, K, T), _vector(in_b, member, width, WIDE)[None, :]
    if DEEP:
        w2, b2 = _matrix(mid_w, member, width, width, WIDE, WIDE, T), _vector(mid_b, member, width, WIDE)[None, :]
    w3, b3 = _matrix(out_w, member, heads, width, H, WIDE, T), _vector(out_b, member, heads, H)[None, :]
    for begin in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
        j = begin + pair % BJ
        seen = is_visible(mask, b, i, j, rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
        x, c, shown = _inner(z, carry, b, h, i, j, seen, heads, rows, keys, OWN, BIASED)
        fed = x
        if K > H:
            fed, _, _ = _inner(z, carry, b, tl.arange(0, K), i, j, seen, heads, rows, keys, OWN, BIASED)
        y = _leaky(tl.dot(tl.trans(fed).to(T), tl.trans(w1), input_precision=PRECISION) + b1, T)  # (pairs, WIDE)
        if DEEP:
            y = _leaky(tl.dot(y, tl.trans(w2), input_precision=PRECISION) + b2, T)
        mixed = tl.trans(tl.dot(y, tl.trans(w3), input_precision=PRECISION) + b3)  # (H, pairs)
        if OWN:
            mixed += x
            if BIASED:
                mixed = tl.where(shown, mixed, float("-inf"))
        else:
            mixed += _load_pairs(z, b, h, i, j, heads, rows, keys)
            if RESIDUAL:
                mixed += c
        if NOISY:
            group = tl.arange(0, BI * BJ // 4) * 4
            row = first + group // BJ
            if CAUSAL:
                row += keys - rows
            quad = (begin + group % BJ) // 4
            mixed += normals(tl.load(seed + b // drawn), layer, b % drawn, h[:, None], row[None, :], quad[None, :])
        tl.store(_at_pairs(z, b, h, i, j, heads, rows, keys), mixed, mask=_inside(h, i, j, heads, rows, keys))


@triton.jit
def _unleak(y, e):
    """The gradient of the input of LeakyReLU, from that of its output y."""
    return tl.where(y > 0.0, e, 0.2 * e)


@triton.jit
def _store_matrix(part, x, member, members, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a member's matrix (rows,columns), as `_matrix` loads it; return where those of all members end."""
    m, n = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    own = part + member * rows * columns
    tl.store(own + m * columns + n, x, mask=(m < rows) & (n < columns))
    return part + members * rows * columns


@triton.jit
def _store_vector(part, x, member, members, size, SIZE: tl.constexpr):
    m = tl.arange(0, SIZE)
    tl.store(part + member * size + m, x, mask=m < size)
    return part + members * size


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _collide_backward(
    z, carry, in_w, in_b, mid_w, mid_b, out_w, mask, grad, out, parts, each, heads, width, rows, keys, m_b, m_i, m_j,
    size, MASKED: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr, RESIDUAL: tl.constexpr, BIASED: tl.constexpr,
    DEEP: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """A share of one member's bands of BI rows. z holds S; grad is 0 where hidden, and may be the same tensor as out.

    Over 50 lines, because every activation and gradient of σ stays in registers.
    """
    keys, m_b = mark_multiple_of_8(keys, EVEN), mark_multiple_of_8(m_b, EVEN)
    h, pair = tl.arange(0, K), tl.arange(0, BI * BJ)
    member = tl.program_id(1).to(tl.int64)
    w1, b1 = _matrix(in_w, member, width, heads, WIDE, K, T), _vector(in_b, member, width, WIDE)[:, None]
    dw1, db1 = tl.zeros((WIDE, K), dtype=tl.float32), tl.zeros((WIDE,), dtype=tl.float32)
    if DEEP:
        w2, b2 = _matrix(mid_w, member, width, width, WIDE, WIDE, T), _vector(mid_b, member, width, WIDE)[:, None]
        dw2, db2 = tl.zeros((WIDE, WIDE), dtype=tl.float32), tl.zeros((WIDE,), dtype=tl.float32)
    w3 = _matrix(out_w, member, heads, width, K, WIDE, T)
    dw3, db3 = tl.zeros((WIDE, K), dtype=tl.float32), tl.zeros((K,), dtype=tl.float32)  # dw3: of W₃ᵀ
    bands = tl.cdiv(rows, BI)
    for band in range(tl.program_id(0), each * bands, tl.num_programs(0)):
        b = member * each + band // bands
        first = band % bands * BI
        i = first + pair // BJ
        for begin in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
            j = begin + pair % BJ
            seen = is_visible(mask, b, i, j, rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
            x, _, shown = _inner(z, carry, b, h, i, j, seen, heads, rows, keys, OWN, BIASED)
            g = _load_pairs(grad, b, h, i, j, heads, rows, keys)
            fed, back = x.to(T), g.to(T)  # (K, pairs)
            y1 = _leaky(tl.dot(w1, fed, input_precision=PRECISION) + b1, T)  # (WIDE, pairs)
            y2 = y1
            if DEEP:
                y2 = _leaky(tl.dot(w2, y1, input_precision=PRECISION) + b2, T)
            dw3 = tl.dot(y2, tl.trans(back), dw3, input_precision=PRECISION)
            db3 += tl.sum(g, 1)
            e = tl.dot(tl.trans(w3), back, input_precision=PRECISION)
            e = _unleak(y2, e)
            if DEEP:
                db2 += tl.sum(e, 1)
                dw2 = tl.dot(e.to(T), tl.trans(y1), dw2, input_precision=PRECISION)
                e = _unleak(y1, tl.dot(tl.trans(w2), e.to(T), input_precision=PRECISION))
            db1 += tl.sum(e, 1)
            dw1 = tl.dot(e.to(T), tl.trans(fed), dw1, input_precision=PRECISION)
            dx = tl.dot(tl.trans(w1), e.to(T), input_precision=PRECISION)  # (K, pairs)
            if BIASED:
                dx = tl.where(shown, dx, 0.0)
            if RESIDUAL:
                dx += g
            tl.store(_at_pairs(out, b, h, i, j, heads, rows, keys), dx, mask=_inside(h, i, j, heads, rows, keys))
    part, members = parts + tl.program_id(0).to(tl.int64) * size, tl.num_programs(1)
    part = _store_matrix(part, dw1, member, members, width, heads, WIDE, K)
    part = _store_vector(part, db1, member, members, width, WIDE)
    if DEEP:
        part = _store_matrix(part, dw2, member, members, width, width, WIDE, WIDE)
        part = _store_vector(part, db2, member, members, width, WIDE)
    w, own = tl.arange(0, WIDE)[:, None], part + member * heads * width
    tl.store(own + h[None, :] * width + w, dw3, mask=(w < width) & (h < heads)[None, :])
    _store_vector(part + members * heads * width, db3, member, members, heads, K)


def collide(
    z: Tensor, carry: Tensor, net: Net, seen: Visibility, noise: Tensor | None, layer: int, own: bool, residual: bool,
    biased: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Turn z (b,h,i,j) from S into Z, in place, where visible; products in dtype.

    net     σ's parameters: those of s members, (s,…), with b / s examples each
    noise   the seed of ε, () or (s,), or None
    """
    note_launch("coda")
    (b, heads, rows, keys), (pointers, members, width) = z.shape, read_net(net)
    tile = _tile(dtype, heads, width, keys)
    with select_device(z):
        _collide[(b * divide_up(rows, tile["BI"]),)](
            z, carry, *pointers, seen.mask, z if noise is None else noise, heads, width, rows, keys, *seen.strides,
            layer, b // members, count_examples(b, noise), NOISY=noise is not None, OWN=own, RESIDUAL=residual,
            BIASED=biased, DEEP=net[2] is not None, EVEN=is_multiple_of_8(keys, seen.strides[0]),
            H=round_up(heads, 8), **seen.flags, **tile,
        )  # fmt: skip


def collide_backward(
    s: Tensor, carry: Tensor, net: Net, seen: Visibility, grad: Tensor, out: Tensor, own: bool, residual: bool,
    biased: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return parts (shares,size) of the gradient of net, whose sum it is: one vector, of W₁, then b₁, …

    Write the carry's gradient to out (b,h,i,j), which may be grad; skip hidden tiles.
    """
    (b, heads, rows, keys), (pointers, members, width) = carry.shape, read_net(net)
    tile, size = _tile(dtype, heads, width, keys, backward=True), sum(x.numel() for x in net if x is not None)
    shares = min(max(1, PROGRAMS // members), b // members * divide_up(rows, tile["BI"]))
    parts = carry.new_empty(shares, size, dtype=torch.float32)
    with select_device(s):
        _collide_backward[(shares, members)](
            s, carry, *pointers[:5], seen.mask, grad, out, parts, b // members, heads, width, rows, keys,
            *seen.strides, size, OWN=own, RESIDUAL=residual, BIASED=biased, DEEP=net[2] is not None,
            EVEN=is_multiple_of_8(keys, seen.strides[0]), **seen.flags, **tile,
        )  # fmt: skip
    return parts


def read_net(net: Net) -> tuple[list[Tensor], int, int]:
    """Return the parameters as pointers, the number of members, and σ's width; the first stands for one that is not."""
    first = net[0]
    assert first is not None
    *members, width, _ = first.shape
    return [(first if x is None else x).contiguous() for x in net], members[0] if members else 1, width


def holds_net(heads: int, width: int, dtype: torch.dtype) -> bool:
    """Whether σ's weights fit into a multiprocessor's memory."""
    return heads <= MOST_HEADS and width <= WIDEST[dtype]


def _tile(dtype: torch.dtype, heads: int, width: int, keys: int, *, backward: bool = False) -> dict[str, Any]:
    """BI rows of BJ keys: as many pairs as fit into registers beside σ's widest layer and, backward, its gradient."""
    wide = round_up(width)
    pairs = 32 if dtype == torch.float32 else 64 if backward else 128
    columns = min(64, pairs, round_up(keys))
    sizes = {"BI": pairs // columns, "BJ": columns, "K": round_up(heads), "WIDE": wide}
    stages = 1 if backward and wide != 64 else 3  # as measured
    return sizes | {"T": TYPES[dtype], "num_warps": 8 if wide == 128 else 4, "num_stages": stages}
