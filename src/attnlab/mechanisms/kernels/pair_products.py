"""Products of queries and keys with logits, weights and gradients that are in memory, (b,h,i,j); any strides, groups.

    write_scores     S = scale·QKᵀ + bias, except in tiles that are hidden as a whole; at once, δ = Σ_d G ∘ O
    write_products   dQ = scale·dS K      dK = scale·dSᵀ Q      dV = Wᵀ G, if there are weights W      sums of parts

One launch computes all of these products: for small tensors a launch takes longer than a product.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, empty_by_token, remember_calls, select_device
from attnlab.mechanisms.kernels.online import at_pairs
from attnlab.mechanisms.kernels.pairs import (
    add_bias,
    first_query,
    is_multiple_of_8,
    last_key,
    mark_multiple_of_8,
    read_bias,
)
from attnlab.mechanisms.kernels.tiles import choose_tile, load_tile, locate_tile, store_delta, write_tile

COLUMNS = tl.constexpr(128)  # that one program sums


@remember_calls
@triton.jit(do_not_specialize=("rows", "keys"))
def _scores(
    q, k, bias, grad, context, out, delta, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, a_b, a_h, a_i,
    a_j, g_b, g_h, g_i, g_d, scale, CAUSAL: tl.constexpr, BIAS: tl.constexpr, DELTA: tl.constexpr,
    SHARED: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of one head. Values at hidden pairs are never used. DELTA: the first tile of a row has its δ, too."""
    keys = mark_multiple_of_8(keys, EVEN)
    columns = tl.cdiv(keys, BJ)
    tiles = tl.cdiv(rows, BI) * columns
    head, tile, b, h = locate_tile(tiles, heads)
    top, left = tile // columns * BI, tile % columns * BJ
    i = top + tl.arange(0, BI)
    if DELTA:  # noqa: SIM102 (the compiler knows it)
        if left == 0:
            store_delta(grad, context, delta, head, b, h, i, heads, rows, g_b, g_h, g_i, g_d, D, WIDE)
    if left < last_key(top + BI, rows, keys, CAUSAL):
        j = left + tl.arange(0, BJ)
        x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
        y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
        z = tl.dot(x, tl.trans(y), input_precision="ieee") * scale
        z = add_bias(z, bias, b, h, top, i, j, rows, keys, a_b, a_h, a_i, a_j, BIAS, 1.0)
        place, inside = at_pairs(head, i, j, rows, keys)
        tl.store(out + place, z, mask=inside)


@triton.jit
def _multiply_keys(
    ds, x, out, program, heads, rows, keys, x_b, x_h, x_n, x_d, scale, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Σ scale·dSᵀ x over the query heads that share one key head, for BJ keys."""
    tiles, groups = tl.cdiv(keys, BJ), heads // SHARED
    b, group, tile = (program // tiles // groups).to(tl.int64), program // tiles % groups, program % tiles
    j = tile * BJ + tl.arange(0, BJ)
    total = tl.zeros((BJ, WIDE), dtype=tl.float32)
    for h in range(group * SHARED, (group + 1) * SHARED):
        for top in range(first_query(tile * BJ, rows, keys, CAUSAL) // BI * BI, rows, BI):
            i = top + tl.arange(0, BI)
            place, inside = at_pairs(b * heads + h, i, j, rows, keys)
            y = load_tile(x, b, h, i, rows, x_b, x_h, x_n, x_d, D, WIDE)
            part = tl.load(ds + place, mask=inside, other=0.0).to(y.dtype)
            total = tl.dot(tl.trans(part), y, total, input_precision="ieee")
    write_tile(out, total * scale, b, group, j, groups, keys, D, WIDE)


@triton.jit
def _multiply_queries(
    ds, x, out, program, heads, rows, keys, x_b, x_h, x_n, x_d, scale, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """scale·dS x for BI queries of one head; heads share x as keys."""
    tiles = tl.cdiv(rows, BI)
    head, first = (program // tiles).to(tl.int64), (tiles - 1 - program % tiles) * BI
    b, h = head // heads, head % heads
    i = first + tl.arange(0, BI)
    total = tl.zeros((BI, WIDE), dtype=tl.float32)
    for left in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
        j = left + tl.arange(0, BJ)
        place, inside = at_pairs(head, i, j, rows, keys)
        y = load_tile(x, b, h // SHARED, j, keys, x_b, x_h, x_n, x_d, D, WIDE)
        part = tl.load(ds + place, mask=inside, other=0.0).to(y.dtype)
        total = tl.dot(part, y, total, input_precision="ieee")
    write_tile(out, total * scale, b, h, i, heads, rows, D, WIDE)


@triton.jit
def _sum_columns(parts, out, program, shares, size):
    """The sums of COLUMNS columns of parts (shares,size), in a fixed order."""
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, shares, 16):
        share = first + tl.arange(0, 16)
        inside = (share < shares)[:, None] & (column < size)[None, :]
        total += tl.sum(tl.load(parts + share[:, None] * size + column[None, :], mask=inside, other=0.0), 0)
    tl.store(out + column, total, mask=column < size)


@remember_calls
@triton.jit(do_not_specialize=("rows", "keys", "by_key", "by_query", "by_value", "shares", "size", "former"))
def _products(
    ds, q, k, weights, grad, parts, dq, dk, dv, sums, heads, rows, keys, by_key, by_query, by_value, shares, size,
    former, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, g_b, g_h, g_i, g_d, scale, CAUSAL: tl.constexpr,
    WEIGHTED: tl.constexpr, PARTED: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr,
    BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """by_key programs for dK, then by_query for dQ, then, if WEIGHTED, by_value for dV; the others sum the parts.

    former: rows of dS before those of the weights.
    """
    keys = mark_multiple_of_8(keys, EVEN)
    program = tl.program_id(0)
    if program < by_key:
        _multiply_keys(
            ds, q, dk, program, heads, rows, keys, q_b, q_h, q_i, q_d, scale, CAUSAL, SHARED, BI, BJ, D, WIDE
        )
    elif program < by_key + by_query:
        _multiply_queries(
            ds, k, dq, program - by_key, heads, rows, keys, k_b, k_h, k_j, k_d, scale, CAUSAL, SHARED, BI, BJ, D, WIDE
        )
    elif program < by_key + by_query + by_value:
        if WEIGHTED:
            other = program - by_key - by_query
            _multiply_keys(
                weights, grad, dv, other, heads, rows - former, keys, g_b, g_h, g_i, g_d, 1.0, CAUSAL, SHARED, BI, BJ,
                D, WIDE,
            )  # fmt: skip
    else:
        if PARTED:
            _sum_columns(parts, sums, program - by_key - by_query - by_value, shares, size)


class PartSums(NamedTuple):
    """Parts of gradients (shares,size) in float32, and where their sums go, (size,)."""

    parts: Tensor
    out: Tensor


def write_scores(
    q: Tensor, k: Tensor, out: Tensor, bias: Tensor | None, *, causal: bool, scale: float,
    delta: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write out (b,h,i,j) = scale·qkᵀ + bias. delta: G, O in the memory layout (b,i,h,d), and δ (b,h,i), or None."""
    (b, h, i, _), j, tile, added = q.shape, k.shape[2], choose_tile(q), read_bias(bias, q, k)
    grad, context, sums = delta or (q, q, q)
    if not out.numel():
        return
    with select_device(q):
        _scores[(b * h * divide_up(i, tile["BI"]) * divide_up(j, tile["BJ"]),)](
            q, k, added.values, grad, context, out, sums, h, i, j, *q.stride(), *k.stride(), *added.strides,
            *grad.stride(), scale, CAUSAL=causal, BIAS=added.kind, DELTA=delta is not None, SHARED=h // k.shape[1],
            EVEN=is_multiple_of_8(j), **tile,
        )  # fmt: skip


def write_products(
    ds: Tensor, q: Tensor, k: Tensor, *, causal: bool, scale: float, weighted: tuple[Tensor, Tensor] | None = None,
    sums: PartSums | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dQ, dK and, of `weighted`, dV; ds (b,h,i,j) is 0 where hidden.

    weighted   W, 0 where hidden, and G (b,h,·,d), of all rows of ds or of the last; or None, then dV is dQ
    """
    (b, h, i, _), (g, j), tile = q.shape, k.shape[1:3], choose_tile(q)
    dq, dk = empty_by_token(q), empty_by_token(k)
    (weights, grad), dv = weighted or (ds, q), empty_by_token(k) if weighted else dq
    parts, out = sums or (q, dq)
    shares, size = parts.shape if sums else (0, 0)
    by_key, by_query = b * g * divide_up(j, tile["BJ"]), b * h * divide_up(i, tile["BI"])
    by_value = by_key if weighted else 0
    with select_device(q):
        _products[(by_key + by_query + by_value + divide_up(size, COLUMNS.value),)](
            ds, q, k, weights, grad, parts, dq, dk, dv, out, h, i, j, by_key, by_query, by_value, shares, size,
            i - weights.shape[2], *q.stride(), *k.stride(), *grad.stride(), scale, CAUSAL=causal,
            WEIGHTED=weighted is not None, PARTED=sums is not None, SHARED=h // g, EVEN=is_multiple_of_8(j), **tile,
        )  # fmt: skip
    return dq, dk, dv


def apply_weights(weights: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Return weights · v, (b,h,i,d) with the memory layout (b,i,h,d); weights (b,h,i,j) are 0 where hidden."""
    (b, h, i, j), tile = weights.shape, choose_tile(v)
    context = v.new_empty((b, i, h, v.shape[3])).transpose(1, 2)
    with select_device(v):
        _products[(b * h * divide_up(i, tile["BI"]),)](
            weights, v, v, weights, v, v, context, context, context, context, h, i, j, 0, b * h * i, 0, 0, 0, 0,
            *v.stride(), *v.stride(), *v.stride(), 1.0, CAUSAL=causal, WEIGHTED=False, PARTED=False,
            SHARED=h // v.shape[1], EVEN=is_multiple_of_8(j), **tile,
        )  # fmt: skip
    return context
