"""Stick-breaking attention over tiles of keys, forward and backward; neither logits nor weights are written.

    forward    from the last key to the first:      R_j = Σ_{l>j} log(1 − β_l)      P_j = exp(log β_j + R_j)
               remainder: the own key gets exp(Σ_l log(1 − β_l)), over all l < i
    backward   with A = P ∘ dP and C_j = Σ_{l<j} A_l (+ the remainder's part):      dS_j = A_j − β_j (A_j + C_j)

R and C at the borders of tiles are written: rows · keys / BJ numbers of float32 for each head (BJ: see
`choose_stick_tile`). Each pass then adds from a border on, and never subtracts one large sum from another. R is kept
for the backward pass. Its dQ kernel runs from the first key to the last and writes C; the dK and dV kernel reads both.

A pair costs about 30 instructions forward and 45 in each kernel of the backward pass, besides the matrix products:
2, 3 and 4 of the usual ones, and 2 smaller ones for each sum along a tile (BY_PRODUCT). All logarithms have base 2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    divide_up,
    empty_by_token,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    select_device,
)
from attnlab.mechanisms.kernels.online import LOG2_E
from attnlab.mechanisms.kernels.pairs import (
    draw_dropout,
    first_query,
    is_visible,
    last_key,
    read_mask,
    whole_keys,
)
from attnlab.mechanisms.kernels.tiles import Work, choose_tile, load_tile, locate_tile, write_tile

MOST = tl.constexpr(256.0)  # of a logit: beyond it, β is 1 and 1 − β is 0 in float32


@triton.jit
def _log2_1p(x):
    """log₂(1 + x) for x in [0, 1], within 4e-7 of itself."""
    inner = 0.0627484336 - x * 0.0120770203
    inner = 0.255176349 + x * (x * inner - 0.154152006)
    inner = 0.480012461 + x * (x * inner - 0.353096353)
    return x * (1.44269472 + x * (x * inner - 0.721306757))


@triton.jit
def _sum_along(x, half, BJ: tl.constexpr, REVERSED: tl.constexpr, BY_PRODUCT: tl.constexpr):
    """Σ over the keys of the tile before each key, or after it (REVERSED), without its own.

    BY_PRODUCT: x as a sum of two numbers of half precision, times a triangle of ones.
    """
    if BY_PRODUCT:
        one, other = tl.arange(0, BJ)[:, None], tl.arange(0, BJ)[None, :]
        ones = tl.where(one > other if REVERSED else one < other, 1.0, 0.0).to(half)
        coarse = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)  # exact in half precision
        result = tl.dot((x - coarse).to(half), ones, tl.dot(coarse.to(half), ones))
    else:
        result = tl.cumsum(x, 1, reverse=REVERSED) - x
    return result


@triton.jit
def _break_tile(
    x, y, right, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, MASKED: tl.constexpr, BY_PRODUCT: tl.constexpr,
    WHOLE: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """log β and P of queries i and the BJ keys from `left` on, and Σ log(1 − β) of the tile; right: R after it.

    WHOLE: all keys are before all queries.
    """
    j = left + tl.arange(0, BJ)
    s = tl.minimum(tl.dot(x, tl.trans(y), input_precision="ieee") * (scale * LOG2_E), MOST)
    if not WHOLE or MASKED:
        parts = j[None, :] < (i + (keys - rows))[:, None]  # so a query that exists sees no key that does not
        if MASKED:
            parts = parts & is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, True, False)
        rest = -tl.maximum(s, 0.0) - _log2_1p(tl.exp2(-tl.abs(s)))
        part = tl.where(parts, s + rest, float("-inf"))
        rest = tl.where(parts, rest, 0.0)
    else:
        rest = -tl.maximum(s, 0.0) - _log2_1p(tl.exp2(-tl.abs(s)))
        part = s + rest
    after = right[:, None] + _sum_along(rest, y.dtype, BJ, True, BY_PRODUCT)
    return part, tl.exp2(part + after), tl.sum(rest, 1)


@triton.jit
def _share_of_own(
    mask, dropping, head, b, i, rows, keys, m_b, m_i, m_j, rate, MASKED: tl.constexpr, DROPPED: tl.constexpr
):
    """What each query takes of its remainder: 0 where its own key is hidden, else 1, or the factor of dropout."""
    own = i + (keys - rows)
    share = tl.where(is_visible(mask, b, i, own, rows, keys, m_b, m_i, m_j, MASKED, False), 1.0, 0.0)
    if DROPPED:
        drawn = draw_dropout(tl.load(dropping), rate, head, i[:, None], (own // 4)[:, None])
        share *= tl.sum(tl.where((own % 4)[:, None] == tl.arange(0, 4)[None, :], drawn, 0.0), 1)
    return share


@remember_calls
@triton.jit
def _forward(
    q, k, v, mask, dropping, edges, out, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d,
    m_b, m_i, m_j, scale, rate, MASKED: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr,
    SHARED: tl.constexpr, BY_PRODUCT: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Context of BI queries of one head. Edge t of a row is Σ log(1 − β) over the keys from t·BJ on."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    i = first + tl.arange(0, BI)
    edge = edges + head * (tl.cdiv(keys, BJ) + 1) * rows + i
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    right, context = tl.zeros((BI,), dtype=tl.float32), tl.zeros((BI, WIDE), dtype=tl.float32)
    steps = tl.cdiv(last_key(first + BI, rows, keys, True), BJ)
    whole = whole_keys(first - 1, rows, keys, True, BJ) // BJ
    for part in tl.static_range(2):  # tiles at the diagonal, then those before all queries
        start, end = (0, whole) if part else (whole, steps)
        for step in range(start, end):
            left = (start + end - 1 - step) * BJ
            j = left + tl.arange(0, BJ)
            y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            values = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            tl.store(edge + (left // BJ + 1) * rows, right, mask=i < rows)
            _, p, rest = _break_tile(
                x, y, right, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, MASKED, BY_PRODUCT, part == 1, BJ
            )
            right += rest
            if DROPPED:
                quad = left // 4 + tl.arange(0, BJ // 4)
                p *= draw_dropout(tl.load(dropping), rate, head, i[:, None], quad[None, :])
            context = tl.dot(p.to(values.dtype), values, context, input_precision="ieee")
    tl.store(edge, right, mask=i < rows)
    if REMAINDER:
        share = _share_of_own(mask, dropping, head, b, i, rows, keys, m_b, m_i, m_j, rate, MASKED, DROPPED)
        own = load_tile(v, b, h // SHARED, i + (keys - rows), keys, v_b, v_h, v_j, v_d, D, WIDE)
        context += (tl.exp2(right) * share)[:, None] * own.to(tl.float32)
    write_tile(out, context, b, h, i, heads, rows, D, WIDE)


@triton.jit
def _slope(
    x, y, z, g, right, before, mask, dropping, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, rate,
    MASKED: tl.constexpr, DROPPED: tl.constexpr, BY_PRODUCT: tl.constexpr, WHOLE: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """P ∘ dropout and dS of queries i and the BJ keys from `left` on, and Σ A of the tile; before: C at its left."""
    part, p, _ = _break_tile(
        x, y, right, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, MASKED, BY_PRODUCT, WHOLE, BJ
    )
    kept = tl.full((i.shape[0], BJ), 1.0, tl.float32)
    if DROPPED:
        kept = draw_dropout(tl.load(dropping), rate, head, i[:, None], (left // 4 + tl.arange(0, BJ // 4))[None, :])
    p *= kept
    a = p * tl.dot(g, tl.trans(z), input_precision="ieee")
    c = before[:, None] + _sum_along(a, y.dtype, BJ, False, BY_PRODUCT)
    return p, a - tl.exp2(part) * (a + c), tl.sum(a, 1)


@remember_calls
@triton.jit
def _backward_queries(
    q, k, v, mask, dropping, grad, edges, sums, dq, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate, MASKED: tl.constexpr, REMAINDER: tl.constexpr,
    DROPPED: tl.constexpr, SHARED: tl.constexpr, BY_PRODUCT: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of BI queries of one head, and C at the left of every tile."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    i = first + tl.arange(0, BI)
    edge, sum_at = edges + head * (tl.cdiv(keys, BJ) + 1) * rows + i, sums + head * tl.cdiv(keys, BJ) * rows + i
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
    before, sum_q = tl.zeros((BI,), dtype=tl.float32), tl.zeros((BI, WIDE), dtype=tl.float32)
    if REMAINDER:
        share = _share_of_own(mask, dropping, head, b, i, rows, keys, m_b, m_i, m_j, rate, MASKED, DROPPED)
        own = load_tile(v, b, h // SHARED, i + (keys - rows), keys, v_b, v_h, v_j, v_d, D, WIDE)
        total = tl.load(edge, mask=i < rows, other=0.0)
        before = tl.exp2(total) * share * tl.sum(g.to(tl.float32) * own.to(tl.float32), 1)
    whole = whole_keys(first - 1, rows, keys, True, BJ)
    for part in tl.static_range(2):  # tiles before all queries, then those at the diagonal
        start, end = (whole, last_key(first + BI, rows, keys, True)) if part else (0, whole)
        for left in range(start, end, BJ):
            j = left + tl.arange(0, BJ)
            y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            z = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            right = tl.load(edge + (left // BJ + 1) * rows, mask=i < rows, other=0.0)
            tl.store(sum_at + left // BJ * rows, before, mask=i < rows)
            _, ds, added = _slope(
                x, y, z, g, right, before, mask, dropping, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, rate,
                MASKED, DROPPED, BY_PRODUCT, part == 0, BJ,
            )  # fmt: skip
            before += added
            sum_q = tl.dot(ds.to(y.dtype), y, sum_q, input_precision="ieee")
    write_tile(dq, sum_q * scale, b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit
def _backward_keys(
    q, k, v, mask, dropping, grad, edges, sums, dk, dv, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate, MASKED: tl.constexpr, REMAINDER: tl.constexpr,
    DROPPED: tl.constexpr, SHARED: tl.constexpr, BY_PRODUCT: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of BJ keys of one key head, from all query heads that share it."""
    groups, tiles = heads // SHARED, tl.cdiv(keys, BJ)
    _unused, tile, b, group = locate_tile(tiles, groups)
    left = tile * BJ
    j = left + tl.arange(0, BJ)
    y = load_tile(k, b, group, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
    z = load_tile(v, b, group, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    sum_k, sum_v = tl.zeros((BJ, WIDE), dtype=tl.float32), tl.zeros((BJ, WIDE), dtype=tl.float32)
    for h in range(group * SHARED, (group + 1) * SHARED):
        head = b * heads + h
        for above in range(first_query(left, rows, keys, True) // BI * BI, rows, BI):  # in two loops: more registers
            i = above + tl.arange(0, BI)
            x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
            g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
            edge = edges + head * (tiles + 1) * rows + i
            right = tl.load(edge + (tile + 1) * rows, mask=i < rows, other=0.0)
            before = tl.load(sums + (head * tiles + tile) * rows + i, mask=i < rows, other=0.0)
            taken, ds, _ = _slope(
                x, y, z, g, right, before, mask, dropping, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, rate,
                MASKED, DROPPED, BY_PRODUCT, False, BJ,
            )  # fmt: skip
            if REMAINDER:
                share = _share_of_own(mask, dropping, head, b, i, rows, keys, m_b, m_i, m_j, rate, MASKED, DROPPED)
                rest = tl.exp2(tl.load(edge, mask=i < rows, other=0.0)) * share
                taken += tl.where(j[None, :] == (i + (keys - rows))[:, None], rest[:, None], 0.0)
            sum_v = tl.dot(tl.trans(taken.to(g.dtype)), g, sum_v, input_precision="ieee")
            sum_k = tl.dot(tl.trans(ds.to(x.dtype)), x, sum_k, input_precision="ieee")
    write_tile(dk, sum_k * scale, b, group, j, groups, keys, D, WIDE)
    write_tile(dv, sum_v, b, group, j, groups, keys, D, WIDE)


def choose_stick_tile(x: Tensor, work: Work) -> dict[str, Any]:
    """The usual tile with at most 32 keys, since 64 would not fit into registers; all passes need the same BJ.

    More than 4 warps would compute a tile of 64 queries twice. Stages: as measured.
    """
    stages = {"forward": 3, "queries": 1, "keys": 2}[work]
    more = {"BJ": 32, "num_warps": 4, "num_stages": 1 if x.dtype == torch.float32 else stages}
    return choose_tile(x, backward=work != "forward") | more | {"BY_PRODUCT": x.dtype != torch.float32}


@operator("attnlab::stick_breaking")
def stick_breaking(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropping: Tensor | None, remainder: bool, scale: float,
    rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d) and the edges (b,h,tiles + 1,i); q (b,h,i,d), k and v (b,g,j,d). dropping: a seed, or None."""
    note_launch("stick_breaking")
    out, edges = _empty(q, k)
    (b, h, i, _), seen, tile = q.shape, read_mask(mask, True, q, k), choose_stick_tile(q, "forward")
    strides = (*q.stride(), *k.stride(), *v.stride(), *seen.strides)
    with select_device(q):
        _forward[(b * h * divide_up(i, tile["BI"]),)](
            q, k, v, seen.mask, q if dropping is None else dropping, edges, out, h, i, k.shape[2], *strides, scale,
            rate, MASKED=mask is not None, REMAINDER=remainder, DROPPED=dropping is not None, SHARED=h // k.shape[1],
            **tile,
        )  # fmt: skip
    return out, edges


@operator("attnlab::stick_breaking_backward")
def stick_breaking_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropping: Tensor | None, edges: Tensor,
    remainder: bool, scale: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV."""
    (b, h, i, _), (g, j), seen = q.shape, k.shape[1:3], read_mask(mask, True, q, k)
    dq, dk, dv = (empty_by_token(x) for x in (q, k, v))
    sums = edges.new_empty(b, h, edges.shape[2] - 1, i)
    by_queries, by_keys = choose_stick_tile(q, "queries"), choose_stick_tile(q, "keys")
    pointers = (q, k, v, seen.mask, q if dropping is None else dropping, grad, edges, sums)
    numbers = (h, i, j, *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *seen.strides, scale, rate)
    flags = {"MASKED": mask is not None, "REMAINDER": remainder, "DROPPED": dropping is not None, "SHARED": h // g}
    with select_device(q):
        _backward_queries[(b * h * divide_up(i, by_queries["BI"]),)](*pointers, dq, *numbers, **flags, **by_queries)
        _backward_keys[(b * g * divide_up(j, by_keys["BJ"]),)](*pointers, dk, dv, *numbers, **flags, **by_keys)
    return dq, dk, dv


@stick_breaking.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(q, k)


@stick_breaking_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_token(q), empty_by_token(k), empty_by_token(v)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, dropping, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.save_for_backward(q, k, v, mask, dropping, output[1])


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    return *stick_breaking_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


stick_breaking.register_autograd(_gradients, setup_context=_save_inputs)


def _empty(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The context, and room for the edges."""
    b, h, i, _ = q.shape
    tiles = divide_up(k.shape[2], choose_stick_tile(q, "forward")["BJ"])
    return empty_by_token(q), q.new_empty(b, h, tiles + 1, i, dtype=torch.float32)
