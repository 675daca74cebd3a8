"""daGPAM around one fused softmax attention: one pass computes both queries, one pass combines both contexts.

    stack     q, ReLU(q) W⁻                    dq = g⁺ + 1[q>0] (g⁻ W⁻ᵀ)      dW⁻ = Σ ReLU(q)ᵀ g⁻
    combine   (1 + λ⁺) o⁺ − λ⁻ o⁻              do⁺ = (1 + λ⁺) g               do⁻ = −λ⁻ g
                                               dλ⁺ = Σ g·o⁺                   dλ⁻ = −Σ g·o⁻

Tensors may have any strides. Parameters with a leading axis (s,…) are those of s members, whose examples come one after
another. Sums are computed in float32 and in a fixed order, so results are deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnlab.mechanisms.kernels.launch import divide_up, note_launch, remember_calls, round_up, select_device
from attnlab.mechanisms.kernels.tiles import load_tile, write_tile

ROWS = 64  # queries in a tile
PROGRAMS = 512  # about four for each multiprocessor of a large GPU; each computes a part of dW⁻
PLAIN = ("heads", "length", "lambda_s", "lambda_h", "each")  # their divisibility makes no load wider


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _stack_forward(
    q, w, both, heads, length, q_b, q_h, q_i, q_d, w_s, w_h, each, D: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of one head: read q once, write q and ReLU(q) W⁻. each: number of examples with the same W⁻."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    inside = (i < length)[:, None] & (d < D)[None, :]
    x = tl.load(q + b * q_b + h * q_h + i[:, None] * q_i + d[None, :] * q_d, mask=inside, other=0.0)
    square = (d < D)[:, None] & (d < D)[None, :]
    matrix = tl.load(w + b // each * w_s + h * w_h + d[:, None] * D + d[None, :], mask=square, other=0.0)
    y = tl.dot(tl.maximum(x, 0.0).to(x.dtype), matrix.to(x.dtype), input_precision="ieee")
    place = both + (bh * 2 * length + i[:, None]) * D + d[None, :]
    tl.store(place, x, mask=inside)
    tl.store(place + length * D, y.to(x.dtype), mask=inside)


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _stack_backward(
    q, w, g, dq, dw, each, heads, length, q_b, q_h, q_i, q_d, g_b, g_h, g_s, g_i, g_d, w_s, w_h,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A share of the tiles of one member's head: dq of each, and the share's part of dW⁻."""
    head, share, shares = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    member, h = head // heads, head % heads
    d = tl.arange(0, WIDE)
    square = (d < D)[:, None] & (d < D)[None, :]
    matrix = tl.load(w + member * w_s + h * w_h + d[:, None] * D + d[None, :], mask=square, other=0.0)
    part = tl.zeros((WIDE, WIDE), dtype=tl.float32)
    tiles = tl.cdiv(length, ROWS)
    for tile in range(share, each * tiles, shares):
        b = member * each + tile // tiles
        i = (tile % tiles) * ROWS + tl.arange(0, ROWS)
        x = load_tile(q, b, h, i, length, q_b, q_h, q_i, q_d, D, WIDE)
        plus = load_tile(g, b, h, i, length, g_b, g_h, g_i, g_d, D, WIDE)
        minus = load_tile(g + g_s, b, h, i, length, g_b, g_h, g_i, g_d, D, WIDE)
        back = tl.dot(minus, tl.trans(matrix).to(minus.dtype), input_precision="ieee")
        write_tile(dq, plus + tl.where(x > 0.0, back, 0.0), b, h, i, heads, length, D, WIDE)
        part += tl.dot(tl.trans(tl.maximum(x, 0.0).to(x.dtype)), minus.to(x.dtype), input_precision="ieee")
    tl.store(dw + ((share * tl.num_programs(0) + head) * D + d[:, None]) * D + d[None, :], part, mask=square)


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _combine_forward(
    o, plus, minus, out, heads, length, o_b, o_h, o_i, o_d, lambda_s, lambda_h, each,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of one head."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = load_tile(o, b, 2 * h, i, length, o_b, o_h, o_i, o_d, D, WIDE).to(tl.float32)
    second = load_tile(o, b, 2 * h + 1, i, length, o_b, o_h, o_i, o_d, D, WIDE).to(tl.float32)
    at = b // each * lambda_s + h * lambda_h
    added, removed = tl.load(plus + at).to(tl.float32), tl.load(minus + at).to(tl.float32)
    write_tile(out, (1.0 + added) * first - removed * second, b, h, i, heads, length, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _combine_backward(
    o, g, plus, minus, do, dlambda, each, heads, length, o_b, o_h, o_i, o_d, g_b, g_h, g_i, g_d, lambda_s, lambda_h,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of one head. do has the strides of o; dlambda (b,2,h,tiles) has one part for each tile."""
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    i = tile * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    inside = (i < length)[:, None] & (d < D)[None, :]
    grad = tl.load(g + b * g_b + h * g_h + i[:, None] * g_i + d[None, :] * g_d, mask=inside, other=0.0).to(tl.float32)
    offset = b * o_b + 2 * h * o_h + i[:, None] * o_i + d[None, :] * o_d
    first = tl.load(o + offset, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(o + offset + o_h, mask=inside, other=0.0).to(tl.float32)
    at = b // each * lambda_s + h * lambda_h
    tl.store(do + offset, (1.0 + tl.load(plus + at).to(tl.float32)) * grad, mask=inside)
    tl.store(do + offset + o_h, -tl.load(minus + at).to(tl.float32) * grad, mask=inside)
    part = dlambda + (2 * b * heads + h) * tl.num_programs(1) + tile
    tl.store(part, tl.sum(grad * first))
    tl.store(part + heads * tl.num_programs(1), -tl.sum(grad * second))


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, negative: Tensor) -> Tensor:
        b, h, i, d = q.shape
        w = negative.contiguous()
        both, given = q.new_empty(b, h, 2, i, d), (*find_strides(w, 3), b // count_members(w, 3))
        with select_device(q):
            _stack_forward[(b * h, divide_up(i, ROWS))](q, w, both, h, i, *q.stride(), *given, **_tile(d))
        ctx.save_for_backward(q, w)
        return both

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, w = ctx.saved_tensors
        b, h, i, d = q.shape
        dq = q.new_empty(b, i, h, d).transpose(1, 2)
        members = count_members(w, 3)
        each = b // members
        shares = min(each * divide_up(i, ROWS), max(1, PROGRAMS // (members * h)))
        parts = q.new_empty(shares, members, h, d, d, dtype=torch.float32)
        strides = (*q.stride(), *grad.stride(), *find_strides(w, 3))
        with select_device(q):
            _stack_backward[(members * h, shares)](q, w, grad, dq, parts, each, h, i, *strides, **_tile(d))
        return dq, parts.sum((0, 2) if w.shape[-3] == 1 else 0).view_as(w).to(w.dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Tensor, lambdas: Tensor) -> Tensor:
        (b, _, i, d), h, (plus, minus) = context.shape, context.shape[1] // 2, split_signs(lambdas)
        out, grid = context.new_empty(b, i, h, d).transpose(1, 2), (b * h, divide_up(i, ROWS))
        given = (*context.stride(), *find_strides(plus, 1), b // count_members(plus, 1))
        with select_device(context):
            _combine_forward[grid](context, plus, minus, out, h, i, *given, **_tile(d))
        ctx.save_for_backward(context, lambdas)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        context, lambdas = ctx.saved_tensors
        (b, _, i, d), h, tiles = context.shape, context.shape[1] // 2, divide_up(context.shape[2], ROWS)
        do = torch.empty_strided(context.shape, context.stride(), dtype=context.dtype, device=context.device)
        parts, (plus, minus) = context.new_empty(b, 2, h, tiles, dtype=torch.float32), split_signs(lambdas)
        strides, each = (*context.stride(), *grad.stride(), *find_strides(plus, 1)), b // count_members(plus, 1)
        with select_device(context):
            _combine_backward[(b * h, tiles)](context, grad, plus, minus, do, parts, each, h, i, *strides, **_tile(d))
        return do, sum_parts(parts, lambdas)


def stack(q: Tensor, negative: Tensor) -> Tensor:
    """q (b,h,i,d), W⁻ (h or 1,d,d) or (s,h or 1,d,d) -> (b,h,2,i,d): q and ReLU(q) W⁻."""
    note_launch("dagpam")
    both: Tensor = _Stack.apply(q, negative)
    return both


def combine(context: Tensor, lambdas: Tensor) -> Tensor:
    """context (b,2h,i,d) -> (1 + λ⁺) context⁺ − λ⁻ context⁻, (b,h,i,d).

    lambdas   λ⁺ first, λ⁻ last: (1 or 2,h or 1), or (s,1 or 2,h or 1) of s members
    """
    combined: Tensor = _Combine.apply(context, lambdas)
    return combined


def sum_parts(parts: Tensor, lambdas: Tensor) -> Tensor:
    """Sum parts (b,2,h,…) of the gradients of λ⁺ and λ⁻ to the gradient of lambdas (…,1 or 2,h or 1), in its type."""
    parts = parts.unflatten(0, (count_members(lambdas, 2), -1))  # (s,b,2,h,…)
    shared = [4 + dim for dim in (-2, -1) if lambdas.shape[dim] == 1]
    return parts.sum([1, *shared, *range(4, parts.dim())]).view_as(lambdas).to(lambdas.dtype)


def split_signs(lambdas: Tensor) -> tuple[Tensor, Tensor]:
    """λ⁺ and λ⁻, (h or 1,) or (s,h or 1)."""
    return lambdas[..., 0, :], lambdas[..., -1, :]


def count_members(x: Tensor, axes: int) -> int:
    """Return the number of members of a parameter. axes: number of axes without members."""
    return len(x) if x.dim() > axes else 1


def find_strides(x: Tensor, axes: int) -> tuple[int, int]:
    """Return the strides from one member and from one head to the next of a parameter (h or 1,…) or (s,h or 1,…).

    axes   number of axes without members

    A stride is 0 where all share one.
    """
    return x.stride(0) if x.dim() > axes else 0, x.stride(-axes) if x.shape[-axes] > 1 else 0


def _tile(d: int) -> dict[str, int]:
    return {"D": d, "WIDE": round_up(d), "ROWS": ROWS}
