"""Attention by sparsemax and 1.5-entmax over tiles of keys, forward and backward, in O(n) memory: no logit is written.

    sparsemax    u = [s − m − τ]₊        p = u      r = 1[u > 0]       m: the largest logit of the row
    1.5-entmax   u = [(s − m)/2 − τ]₊    p = u²     r = u              τ: such that Σ p = 1

    forward    m, and a lower bound of τ: one step in each tile alone; then Newton's method (sparsemax.py), one pass
               over the keys for each step, until no row of the program moves: 4 to 7 steps for normal logits; then
               O = (p ∘ D) V and R = (r ∘ D) V / Σ r        D: dropout
    backward   dP = (G Vᵀ) ∘ D      dS = r (dP − δ)      δ = Σ r dP / Σ r = Σ_d G ∘ R
               dV = (p ∘ D)ᵀ G      dQ = scale·dS K      dK = scale·dSᵀ Q

With more keys τ can only rise, so the τ of any tile is a lower bound. m and τ of the rows are kept as "levels".
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
from attnlab.mechanisms.kernels.pairs import (
    draw_dropout,
    first_query,
    is_visible,
    last_key,
    read_mask,
    whole_keys,
    whole_queries,
)
from attnlab.mechanisms.kernels.sparsemax import CLOSE, ENTMAX, STEPS
from attnlab.mechanisms.kernels.tiles import choose_pass_tile, compute_delta, load_tile, locate_tile, write_tile

LEAST = tl.constexpr(-1.0e30)  # below every logit


@triton.jit
def _score(
    x, y, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, FORM: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """s, or s/2 for entmax, of queries i and the BJ keys from `left` on; −∞ where hidden."""
    j = left + tl.arange(0, BJ)
    seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL, WHOLE)
    unit = 0.5 if FORM == ENTMAX else 1.0
    return tl.where(seen, tl.dot(x, tl.trans(y), input_precision="ieee") * (scale * unit), float("-inf"))


@triton.jit
def _sum_above(u, FORM: tl.constexpr):
    """Σ u, and Σ u² for entmax, or the number of positive u."""
    return tl.sum(u, 1), tl.sum(u * u if FORM == ENTMAX else tl.where(u > 0.0, 1.0, 0.0), 1)


@triton.jit
def _move(total, other, FORM: tl.constexpr):
    """A step of Newton's method towards τ."""
    if FORM == ENTMAX:
        norm = tl.sqrt(other)
        move = (norm - 1.0) * norm / tl.maximum(total, 1e-30)
    else:
        move = (total - 1.0) / tl.maximum(other, 1.0)
    return move


@remember_calls
@triton.jit
def _find_levels(
    q, k, mask, levels, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, m_b, m_i, m_j, scale,
    FORM: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr,
    BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """m and τ of BI queries of one head. A kernel of its own needs few registers, so more programs run at once."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI  # causal: the longest rows are the last, and start first
    i = first + tl.arange(0, BI)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    whole, last = whole_keys(first, rows, keys, CAUSAL, BJ), last_key(first + BI, rows, keys, CAUSAL)
    top, bound = tl.full((BI,), LEAST, tl.float32), tl.full((BI,), LEAST, tl.float32)
    for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
        start, end = (whole, last) if part else (0, whole)
        for left in range(start, end, BJ):
            y = load_tile(k, b, h // SHARED, left + tl.arange(0, BJ), keys, k_b, k_h, k_j, k_d, D, WIDE)
            s = _score(x, y, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, FORM, MASKED, CAUSAL, part == 0, BJ)
            high = tl.max(s, 1)
            top, bound = tl.maximum(top, high), tl.maximum(bound, high - 1.0)
            total, other = _sum_above(tl.maximum(s - bound[:, None], 0.0), FORM)
            bound += tl.maximum(_move(total, other, FORM), 0.0)
    blind = top == LEAST
    top = tl.where(blind, 0.0, top)
    threshold = tl.where(blind, 0.0, tl.minimum(tl.maximum(bound - top, -1.0), -1e-6))
    moved, steps = 1.0, 0
    while (moved > CLOSE) & (steps < STEPS):
        total, other = tl.zeros((BI,), dtype=tl.float32), tl.zeros((BI,), dtype=tl.float32)
        for part in tl.static_range(2):
            start, end = (whole, last) if part else (0, whole)
            for left in range(start, end, BJ):
                y = load_tile(k, b, h // SHARED, left + tl.arange(0, BJ), keys, k_b, k_h, k_j, k_d, D, WIDE)
                s = _score(
                    x, y, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, FORM, MASKED, CAUSAL, part == 0, BJ
                )
                more, most = _sum_above(tl.maximum(s - top[:, None] - threshold[:, None], 0.0), FORM)
                total += more
                other += most
        move = tl.where(blind, 0.0, _move(total, other, FORM))
        threshold += move
        moved = tl.max(tl.abs(move), 0)
        steps += 1
    tl.store(levels + head * 2 * rows + i, top, mask=i < rows)
    tl.store(levels + (head * 2 + 1) * rows + i, threshold, mask=i < rows)


@triton.jit
def _weigh_tile(
    x, y, mask, levels, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, FORM: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """p and r of queries i and the BJ keys from `left` on."""
    s = _score(x, y, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, FORM, MASKED, CAUSAL, WHOLE, BJ)
    top = tl.load(levels + head * 2 * rows + i, mask=i < rows, other=0.0)
    threshold = tl.load(levels + (head * 2 + 1) * rows + i, mask=i < rows, other=0.0)
    u = tl.maximum(s - top[:, None] - threshold[:, None], 0.0)
    if FORM == ENTMAX:
        p, r = u * u, u
    else:
        p, r = u, tl.where(u > 0.0, 1.0, 0.0)
    return p, r


@remember_calls
@triton.jit
def _attend(
    q, k, v, mask, dropping, levels, out, mean, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, m_b, m_i, m_j, scale, rate, FORM: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """O and R of BI queries of one head."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    i = first + tl.arange(0, BI)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    whole, mass = whole_keys(first, rows, keys, CAUSAL, BJ), tl.zeros((BI,), dtype=tl.float32)
    context, shares = tl.zeros((BI, WIDE), dtype=tl.float32), tl.zeros((BI, WIDE), dtype=tl.float32)
    for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
        start, end = (whole, last_key(first + BI, rows, keys, CAUSAL)) if part else (0, whole)
        for left in range(start, end, BJ):
            j = left + tl.arange(0, BJ)
            y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            values = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            p, r = _weigh_tile(
                x, y, mask, levels, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, FORM, MASKED, CAUSAL,
                part == 0, BJ,
            )  # fmt: skip
            mass += tl.sum(r, 1)
            if DROPPED:
                quad = left // 4 + tl.arange(0, BJ // 4)
                kept = draw_dropout(tl.load(dropping), rate, head, i[:, None], quad[None, :])
                p, r = p * kept, r * kept
            context = tl.dot(p.to(values.dtype), values, context, input_precision="ieee")
            shares = tl.dot(r.to(values.dtype), values, shares, input_precision="ieee")
    write_tile(out, context, b, h, i, heads, rows, D, WIDE)
    write_tile(mean, shares / tl.maximum(mass, 1e-30)[:, None], b, h, i, heads, rows, D, WIDE)


@triton.jit
def _slope(
    x, y, z, g, mask, dropping, levels, delta, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, rate,
    FORM: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, WHOLE: tl.constexpr,
    BJ: tl.constexpr,
):  # fmt: skip
    """p ∘ D and dS of queries i (rows x, gradients g) and the BJ keys from `left` on (rows y, values z)."""
    p, r = _weigh_tile(
        x, y, mask, levels, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, FORM, MASKED, CAUSAL, WHOLE, BJ
    )
    dp = tl.dot(g, tl.trans(z), input_precision="ieee")
    if DROPPED:
        kept = draw_dropout(tl.load(dropping), rate, head, i[:, None], (left // 4 + tl.arange(0, BJ // 4))[None, :])
        p, dp = p * kept, dp * kept
    return p, r * (dp - tl.load(delta + head * rows + i, mask=i < rows, other=0.0)[:, None])


@remember_calls
@triton.jit
def _backward_keys(
    q, k, v, mask, dropping, grad, levels, delta, dk, dv, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate, FORM: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of BJ keys of one key head, from all query heads that share it."""
    groups = heads // SHARED
    _, tile, b, group = locate_tile(tl.cdiv(keys, BJ), groups)
    left = tile * BJ
    j = left + tl.arange(0, BJ)
    y = load_tile(k, b, group, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
    z = load_tile(v, b, group, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    sum_k, sum_v = tl.zeros((BJ, WIDE), dtype=tl.float32), tl.zeros((BJ, WIDE), dtype=tl.float32)
    least = first_query(left, rows, keys, CAUSAL) // BI * BI
    whole = whole_queries(left, rows, keys, CAUSAL, BI, BJ)
    for h in range(group * SHARED, (group + 1) * SHARED):
        for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
            start, end = (least, tl.minimum(whole, rows)) if part else (whole, rows)
            for above in range(start, end, BI):
                i = above + tl.arange(0, BI)
                x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
                g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
                taken, ds = _slope(
                    x, y, z, g, mask, dropping, levels, delta, b * heads + h, b, i, left, rows, keys, m_b, m_i, m_j,
                    scale, rate, FORM, MASKED, CAUSAL, DROPPED, part == 0, BJ,
                )  # fmt: skip
                sum_v = tl.dot(tl.trans(taken.to(g.dtype)), g, sum_v, input_precision="ieee")
                sum_k = tl.dot(tl.trans(ds.to(x.dtype)), x, sum_k, input_precision="ieee")
    write_tile(dk, sum_k * scale, b, group, j, groups, keys, D, WIDE)
    write_tile(dv, sum_v, b, group, j, groups, keys, D, WIDE)


@remember_calls
@triton.jit
def _backward_queries(
    q, k, v, mask, dropping, grad, levels, delta, dq, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate, FORM: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of BI queries of one head."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    i = first + tl.arange(0, BI)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
    sum_q = tl.zeros((BI, WIDE), dtype=tl.float32)
    whole = whole_keys(first, rows, keys, CAUSAL, BJ)
    for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
        start, end = (whole, last_key(first + BI, rows, keys, CAUSAL)) if part else (0, whole)
        for left in range(start, end, BJ):
            j = left + tl.arange(0, BJ)
            y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            z = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            _, ds = _slope(
                x, y, z, g, mask, dropping, levels, delta, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, rate,
                FORM, MASKED, CAUSAL, DROPPED, part == 0, BJ,
            )  # fmt: skip
            sum_q = tl.dot(ds.to(y.dtype), y, sum_q, input_precision="ieee")
    write_tile(dq, sum_q * scale, b, h, i, heads, rows, D, WIDE)


@operator("attnlab::sparse_pass")
def sparse_pass(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropping: Tensor | None, form: int, causal: bool,
    scale: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O and R (b,h,i,d), and the levels m and τ (b,h,2,i); q (b,h,i,d), k and v (b,g,j,d). dropping: a seed, or None.

    form: SPARSEMAX or ENTMAX of sparsemax.py.
    """
    note_launch("sparsemax")
    (b, h, i, _), seen, tile = q.shape, read_mask(mask, causal, q, k), choose_pass_tile(q, "forward")
    out, mean, levels = _empty(q)
    sizes, flags = (h, i, k.shape[2]), {"FORM": form, "SHARED": h // k.shape[1]} | seen.flags | tile
    grid, strides = (b * h * divide_up(i, tile["BI"]),), (*q.stride(), *k.stride())
    with select_device(q):
        _find_levels[grid](q, k, seen.mask, levels, *sizes, *strides, *seen.strides, scale, **flags)
        _attend[grid](
            q, k, v, seen.mask, q if dropping is None else dropping, levels, out, mean, *sizes, *strides, *v.stride(),
            *seen.strides, scale, rate, DROPPED=dropping is not None, **flags,
        )  # fmt: skip
    return out, mean, levels


@operator("attnlab::sparse_pass_backward")
def sparse_pass_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropping: Tensor | None, mean: Tensor,
    levels: Tensor, form: int, causal: bool, scale: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV."""
    (b, h, i, _), (g, j), seen = q.shape, k.shape[1:3], read_mask(mask, causal, q, k)
    dq, dk, dv = (empty_by_token(x) for x in (q, k, v))
    by_keys, by_queries = choose_pass_tile(q, "keys"), choose_pass_tile(q, "queries")
    unread = q if dropping is None else dropping
    pointers = (q, k, v, seen.mask, unread, grad, levels, compute_delta(grad, mean))
    numbers = (h, i, j, *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *seen.strides, scale, rate)
    flags = {"FORM": form, "DROPPED": dropping is not None, "SHARED": h // g} | seen.flags
    with select_device(q):
        _backward_keys[(b * g * divide_up(j, by_keys["BJ"]),)](*pointers, dk, dv, *numbers, **flags, **by_keys)
        _backward_queries[(b * h * divide_up(i, by_queries["BI"]),)](*pointers, dq, *numbers, **flags, **by_queries)
    return dq, dk, dv


@sparse_pass.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q)


@sparse_pass_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_token(q), empty_by_token(k), empty_by_token(v)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, dropping, *ctx.options = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.save_for_backward(q, k, v, mask, dropping, *output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    return *sparse_pass_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 6


sparse_pass.register_autograd(_gradients, setup_context=_save_inputs)


def _empty(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b, h, i, _ = q.shape
    return empty_by_token(q), empty_by_token(q), q.new_empty(b, h, 2, i, dtype=torch.float32)
