"""Compositional de-attention over tiles of keys, forward and backward, in O(n) memory.

    forward    W = tanh(S) ∘ 2σ(−D)       S = scale·q kᵀ       D = scale·‖q − k‖₁
    backward   dS = dW ∘ 2σ(−D) ∘ (1 − tanh² S)                  dD = −dW ∘ W ∘ σ(D)
               dQ_ic = scale·Σ_j (dS_ij K_jc + dD_ij sign(Q_ic − K_jc)), and dK likewise, with the other sign

An L1 distance has no matrix product: each triple of a query, a key and a coordinate takes 2 instructions in each of
three passes, and 3 for each of the two sums of signs, so 12 in all, besides loads. In tiles with coordinates on one
axis, sums over keys need no exchange between threads. So a program writes a tile of dD to memory of its own, and reads
it one key at a time. Each step of these loops loads a few numbers, which takes longer than to use them, so the loads of
UNROLLED steps are under way at once. Distances are in float32. The sign of x is x · 2⁸⁰, at most 1 and at least −1:
that of 0 is 0.
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
from attnlab.mechanisms.kernels.pairs import draw_dropout, first_query, is_visible, last_key, read_mask
from attnlab.mechanisms.kernels.tiles import choose_tile, load_tile, locate_tile, write_tile

SHARP = tl.constexpr(2.0**80)
UNROLLED = tl.constexpr(8)  # steps; registers hold no more


@triton.jit
def _tanh(x):
    """By the exponential, near 0 by a series: both within 4e-7 of itself."""
    x = tl.clamp(x, -16.0, 16.0)  # where it is 1; no square overflows
    xx = x * x
    series = x * (1.0 + xx * (-1 / 3 + xx * (2 / 15 + xx * (-17 / 315 + xx * (62 / 2835)))))
    fade = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - fade) / (1.0 + fade)
    return tl.where(xx < 0.0625, series, tl.where(x < 0.0, -far, far))


@triton.jit
def _weigh(
    x, y, q_columns, k_columns, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """tanh S, the gate 2σ(−D), 0 where hidden, and σ(D), of queries i and the BJ keys from `left` on."""
    j = left + tl.arange(0, BJ)
    s = tl.dot(x, tl.trans(y), input_precision="ieee") * scale
    distance = tl.minimum(tl.abs(s), 0.0)  # 0, in the layout of s: the loop exchanges nothing between threads
    for c in tl.range(0, D, loop_unroll_factor=UNROLLED):
        row = tl.load(q_columns + c * rows + i, mask=i < rows, other=0.0)
        key = tl.load(k_columns + c * keys + j, mask=j < keys, other=0.0)
        distance += tl.abs(row[:, None] - key[None, :])
    seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
    fade = tl.exp2(distance * (-scale * LOG2_E))
    far = 1.0 / (1.0 + fade)
    return _tanh(s), tl.where(seen, 2.0 * fade * far, 0.0), far


@remember_calls
@triton.jit
def _forward(
    q, k, v, q_columns, k_columns, mask, dropping, out, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, m_b, m_i, m_j, scale, rate, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr,
    SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Context of BI queries of one head. Columns: q and k as (b,h,d,n), contiguous, in float32."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    i = first + tl.arange(0, BI)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    q_columns += head * D * rows
    k_columns += (b * (heads // SHARED) + h // SHARED) * D * keys
    context = tl.zeros((BI, WIDE), dtype=tl.float32)
    for left in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
        j = left + tl.arange(0, BJ)
        y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
        sign, gate, _ = _weigh(
            x, y, q_columns, k_columns, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, MASKED, CAUSAL, BJ, D
        )
        w = sign * gate
        if DROPPED:
            w *= draw_dropout(tl.load(dropping), rate, head, i[:, None], (left // 4 + tl.arange(0, BJ // 4))[None, :])
        values = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
        context = tl.dot(w.to(values.dtype), values, context, input_precision="ieee")
    write_tile(out, context, b, h, i, heads, rows, D, WIDE)


@triton.jit
def _slope(
    x, y, z, g, q_columns, k_columns, mask, dropping, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, rate,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """W ∘ dropout, dS and dD of queries i (rows x, gradients g) and the BJ keys from `left` on (rows y, values z)."""
    sign, gate, far = _weigh(
        x, y, q_columns, k_columns, mask, b, i, left, rows, keys, m_b, m_i, m_j, scale, MASKED, CAUSAL, BJ, D
    )
    if DROPPED:
        gate *= draw_dropout(tl.load(dropping), rate, head, i[:, None], (left // 4 + tl.arange(0, BJ // 4))[None, :])
    dw = gate * tl.dot(g, tl.trans(z), input_precision="ieee")
    return sign * gate, dw * (1.0 - sign * sign), -dw * sign * far


@triton.jit
def _sum_signs(
    total, x, other, slopes, n, at, size, s_n, s_d, COUNT: tl.constexpr, SIDE: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """total + Σ_l slope_l sign(x − other_l), over the COUNT rows of `other` from `at` on; slopes (COUNT,SIDE)."""
    d = tl.arange(0, WIDE)
    for step in tl.range(0, COUNT, loop_unroll_factor=UNROLLED):
        row = at + step + tl.zeros((WIDE,), dtype=tl.int32)
        y = tl.load(other + row * s_n + d * s_d, mask=(d < D) & (row < size), other=0.0)
        slope = tl.load(slopes + step * SIDE + n)
        total += slope[:, None] * tl.clamp(x - (y.to(tl.float32) * SHARP)[None, :], -1.0, 1.0)
    return total


@remember_calls
@triton.jit
def _backward_queries(
    q, k, v, q_columns, k_columns, mask, dropping, grad, slopes, dq, heads, rows, keys, q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of BI queries of one head."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    own, other = tl.arange(0, BI), tl.arange(0, BJ)
    i = first + own
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    c = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
    slopes += tl.program_id(0).to(tl.int64) * BI * BJ
    q_columns += head * D * rows
    k_columns += (b * (heads // SHARED) + h // SHARED) * D * keys
    near = k + b * k_b + h // SHARED * k_h
    sharp = x.to(tl.float32) * SHARP
    sum_q, signs = tl.zeros((BI, WIDE), dtype=tl.float32), tl.zeros((BI, WIDE), dtype=tl.float32)
    for left in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
        j = left + other
        y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
        z = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
        _, ds, dd = _slope(
            x, y, z, c, q_columns, k_columns, mask, dropping, head, b, i, left, rows, keys, m_b, m_i, m_j, scale, rate,
            MASKED, CAUSAL, DROPPED, BJ, D,
        )  # fmt: skip
        sum_q = tl.dot(ds.to(y.dtype), y, sum_q, input_precision="ieee")
        tl.debug_barrier()  # until all threads have read the last tile of slopes
        tl.store(slopes + other[None, :] * BI + own[:, None], dd)
        tl.debug_barrier()  # until all threads have written this one
        signs = _sum_signs(signs, sharp, near, slopes, own, left, keys, k_j, k_d, BJ, BI, D, WIDE)
    write_tile(dq, (sum_q + signs) * scale, b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit
def _backward_keys(
    q, k, v, q_columns, k_columns, mask, dropping, grad, slopes, dk, dv, heads, rows, keys, q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of BJ keys of one key head, from all query heads that share it."""
    groups = heads // SHARED
    group, tile, b, g = locate_tile(tl.cdiv(keys, BJ), groups)
    left = tile * BJ
    own, other = tl.arange(0, BJ), tl.arange(0, BI)
    j = left + own
    y = load_tile(k, b, g, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
    z = load_tile(v, b, g, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    slopes += tl.program_id(0).to(tl.int64) * BI * BJ
    k_columns += group * D * keys
    sharp = y.to(tl.float32) * SHARP
    sum_k, sum_v = tl.zeros((BJ, WIDE), dtype=tl.float32), tl.zeros((BJ, WIDE), dtype=tl.float32)
    signs = tl.zeros((BJ, WIDE), dtype=tl.float32)
    for h in range(g * SHARED, (g + 1) * SHARED):
        for above in range(first_query(left, rows, keys, CAUSAL) // BI * BI, rows, BI):
            i = above + other
            x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
            c = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
            taken, ds, dd = _slope(
                x, y, z, c, q_columns + (b * heads + h) * D * rows, k_columns, mask, dropping, b * heads + h, b, i,
                left, rows, keys, m_b, m_i, m_j, scale, rate, MASKED, CAUSAL, DROPPED, BJ, D,
            )  # fmt: skip
            sum_v = tl.dot(tl.trans(taken.to(c.dtype)), c, sum_v, input_precision="ieee")
            sum_k = tl.dot(tl.trans(ds.to(x.dtype)), x, sum_k, input_precision="ieee")
            tl.debug_barrier()
            tl.store(slopes + other[:, None] * BJ + own[None, :], dd)
            tl.debug_barrier()
            near = q + b * q_b + h * q_h
            signs = _sum_signs(signs, sharp, near, slopes, own, above, rows, q_i, q_d, BI, BJ, D, WIDE)
    write_tile(dk, (sum_k + signs) * scale, b, g, j, groups, keys, D, WIDE)
    write_tile(dv, sum_v, b, g, j, groups, keys, D, WIDE)


def choose_distance_tile(x: Tensor, *, backward: bool = False) -> dict[str, Any]:
    """The usual tile, with fewer queries, or with fewer keys in the backward pass, whose sums fill the registers.

    Nothing is prefetched, since instructions take the time. More than 4 warps would compute a tile of 64 queries twice.
    """
    more = {"BJ": 32} if backward else {"BI": min(32, choose_tile(x)["BI"])}
    return choose_tile(x, backward=backward) | more | {"num_warps": 4, "num_stages": 1}


def _list_columns(x: Tensor) -> Tensor:
    """(b,h,n,d) -> (b,h,d,n), contiguous, in float32."""
    return torch.empty_like(x.mT, dtype=torch.float32, memory_format=torch.contiguous_format).copy_(x.mT)


@operator("attnlab::de_attention")
def de_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropping: Tensor | None, causal: bool, scale: float,
    rate: float,
) -> Tensor:  # fmt: skip
    """Context (b,h,i,d); q (b,h,i,d), k and v (b,g,j,d). dropping: the seed of dropout, or None; rate: of dropout."""
    note_launch("de_attention")
    (b, h, i, _), out, tile, seen = q.shape, empty_by_token(q), choose_distance_tile(q), read_mask(mask, causal, q, k)
    strides = (*q.stride(), *k.stride(), *v.stride(), *seen.strides)
    with select_device(q):
        _forward[(b * h * divide_up(i, tile["BI"]),)](
            q, k, v, _list_columns(q), _list_columns(k), seen.mask, q if dropping is None else dropping, out, h, i,
            k.shape[2], *strides, scale, rate, DROPPED=dropping is not None, SHARED=h // k.shape[1], **seen.flags,
            **tile,
        )  # fmt: skip
    return out


@operator("attnlab::de_attention_backward")
def de_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropping: Tensor | None, causal: bool,
    scale: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV."""
    (b, h, i, _), (g, j), seen = q.shape, k.shape[1:3], read_mask(mask, causal, q, k)
    dq, dk, dv = (empty_by_token(x) for x in (q, k, v))
    tile = choose_distance_tile(q, backward=True)
    by_queries, by_keys = b * h * divide_up(i, tile["BI"]), b * g * divide_up(j, tile["BJ"])
    slopes = q.new_empty(max(by_queries, by_keys) * tile["BI"] * tile["BJ"], dtype=torch.float32)
    columns = (_list_columns(q), _list_columns(k))
    pointers = (q, k, v, *columns, seen.mask, q if dropping is None else dropping, grad, slopes)
    numbers = (h, i, j, *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *seen.strides, scale, rate)
    flags = {"DROPPED": dropping is not None, "SHARED": h // g} | seen.flags | tile
    with select_device(q):
        _backward_queries[(by_queries,)](*pointers, dq, *numbers, **flags)
        _backward_keys[(by_keys,)](*pointers, dk, dv, *numbers, **flags)
    return dq, dk, dv


@de_attention.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return empty_by_token(q)


@de_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_token(q), empty_by_token(k), empty_by_token(v)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, dropping, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, mask, dropping)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    return *de_attention_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


de_attention.register_autograd(_gradients, setup_context=_save_inputs)
