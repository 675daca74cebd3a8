"""The context of shaped attention around a softmax attention: one pass that sums values on the way.

    forward    O_i = α v_i + β S_i − γ C_i         C_i = Σ_{j≤i} v_j / i        S: the context of the softmax
    backward   dS = β G      dV_j = α G_j − γ R_j       R_j = Σ_{i≥j} G_i / i
               dα = Σ G ∘ v      dβ = Σ G ∘ S           dγ = −Σ G ∘ C = −Σ v ∘ R

`average_past` is C alone, the context of uniform attention.

i counts from 1. Causal, with as many queries as keys. A program goes through the rows of a part of one head, from the
first to the last, and in the backward pass from the last to the first. Sums are in float32.
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
    round_up,
    select_device,
)
from attnlab.mechanisms.kernels.tiles import find_tile_gap

ROWS = 64  # of a tile
PART = 32  # of a head


@triton.jit
def _place(n, d, b, h, x_b, x_h, x_n, x_d):
    """Offsets of rows n and columns d of a head of x (b,h,n,d)."""
    return b * x_b + h * x_h + n[:, None] * x_n + d[None, :] * x_d


@remember_calls
@triton.jit
def _forward(
    softmax, v, alpha, beta, gamma, out, heads, rows, parts, s_b, s_h, s_i, s_d, v_b, v_h, v_j, v_d,
    SHARED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    head, d = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * PART + tl.arange(0, PART)
    b, h = head // heads, head % heads
    a, c, e = tl.load(alpha + h).to(tl.float32), tl.load(beta + h).to(tl.float32), tl.load(gamma + h).to(tl.float32)
    before = tl.zeros((PART,), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        i = first + tl.arange(0, ROWS)
        inside = (i < rows)[:, None] & (d < D)[None, :]
        z = tl.load(v + _place(i, d, b, h // SHARED, v_b, v_h, v_j, v_d), mask=inside, other=0.0).to(tl.float32)
        s = tl.load(softmax + _place(i, d, b, h, s_b, s_h, s_i, s_d), mask=inside, other=0.0).to(tl.float32)
        centre = (before[None, :] + tl.cumsum(z, 0)) / (i + 1).to(tl.float32)[:, None]
        before += tl.sum(z, 0)
        place = _place(i, d, b, h, rows * heads * D, D, heads * D, 1)
        tl.store(out + place, a * z + c * s - e * centre, mask=inside)


@remember_calls
@triton.jit
def _backward(
    grad, softmax, v, alpha, beta, gamma, ds, dv, sums, heads, rows, parts, g_b, g_h, g_i, g_d, s_b, s_h, s_i, s_d,
    v_b, v_h, v_j, v_d, SHARED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """dS, dV of each query head, and the sums of dα, dβ and dγ of this part, in sums (3,b,part,h)."""
    head, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    b, h, d = head // heads, head % heads, part * PART + tl.arange(0, PART)
    a, c, e = tl.load(alpha + h).to(tl.float32), tl.load(beta + h).to(tl.float32), tl.load(gamma + h).to(tl.float32)
    after, own = tl.zeros((PART,), dtype=tl.float32), tl.zeros((PART,), dtype=tl.float32)
    soft, centre = own, own
    tiles = tl.cdiv(rows, ROWS)
    for tile in range(0, tiles):
        i = (tiles - 1 - tile) * ROWS + tl.arange(0, ROWS)
        inside = (i < rows)[:, None] & (d < D)[None, :]
        g = tl.load(grad + _place(i, d, b, h, g_b, g_h, g_i, g_d), mask=inside, other=0.0).to(tl.float32)
        z = tl.load(v + _place(i, d, b, h // SHARED, v_b, v_h, v_j, v_d), mask=inside, other=0.0).to(tl.float32)
        s = tl.load(softmax + _place(i, d, b, h, s_b, s_h, s_i, s_d), mask=inside, other=0.0).to(tl.float32)
        share = g / (i + 1).to(tl.float32)[:, None]
        rest = after[None, :] + tl.cumsum(share, 0, reverse=True)
        after += tl.sum(share, 0)
        own += tl.sum(g * z, 0)
        soft += tl.sum(g * s, 0)
        centre -= tl.sum(z * rest, 0)
        place = _place(i, d, b, h, rows * heads * D, D, heads * D, 1)
        tl.store(ds + place, c * g, mask=inside)
        tl.store(dv + place, a * g - e * rest, mask=inside)
    place, size = sums + (b * parts + part) * heads + h, tl.num_programs(0)
    tl.store(place, tl.sum(own, 0))
    tl.store(place + size, tl.sum(soft, 0))
    tl.store(place + 2 * size, tl.sum(centre, 0))


@remember_calls
@triton.jit
def _average(
    x, out, heads, rows, parts, x_b, x_h, x_n, x_d, BACKWARD: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """C of a part of one key head, for all heads that share it; BACKWARD: Σ R of their gradients x."""
    groups = heads // SHARED
    head, d = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * PART + tl.arange(0, PART)
    b, g = head // groups, head % groups
    total, tiles = tl.zeros((PART,), dtype=tl.float32), tl.cdiv(rows, ROWS)
    for tile in range(0, tiles):
        place = tiles - 1 - tile if BACKWARD else tile
        i = place * ROWS + tl.arange(0, ROWS)
        inside, count = (i < rows)[:, None] & (d < D)[None, :], (i + 1).to(tl.float32)[:, None]
        if BACKWARD:
            z = tl.zeros((ROWS, PART), dtype=tl.float32)
            for h in range(g * SHARED, (g + 1) * SHARED):
                z += tl.load(x + _place(i, d, b, h, x_b, x_h, x_n, x_d), mask=inside, other=0.0).to(tl.float32)
            z /= count
            sums = total[None, :] + tl.cumsum(z, 0, reverse=True)
            tl.store(out + _place(i, d, b, g, rows * groups * D, D, groups * D, 1), sums, mask=inside)
        else:
            z = tl.load(x + _place(i, d, b, g, x_b, x_h, x_n, x_d), mask=inside, other=0.0).to(tl.float32)
            sums = (total[None, :] + tl.cumsum(z, 0)) / count
            for h in range(g * SHARED, (g + 1) * SHARED):
                tl.store(out + _place(i, d, b, h, rows * heads * D, D, heads * D, 1), sums, mask=inside)
        total += tl.sum(z, 0)


@operator("attnlab::shape_context")
def shape_context(softmax: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    """Context (b,h,n,d) of the softmax's context (b,h,n,d), v (b,g,n,d) and α, β, γ, h numbers each."""
    note_launch("shaped")
    (b, h, n, d), out = softmax.shape, empty_by_token(softmax)
    tile = _choose_tile(softmax, v)
    parts = divide_up(d, tile["PART"])
    with select_device(v):
        _forward[(b * h * parts,)](
            softmax, v, alpha, beta, gamma, out, h, n, parts, *softmax.stride(), *v.stride(), **tile
        )
    return out


@operator("attnlab::shape_context_backward")
def shape_context_backward(
    grad: Tensor, softmax: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the softmax's context, of v, and of α, β and γ together, (3,h,1,1)."""
    (b, h, n, d), tile = softmax.shape, _choose_tile(softmax, v)
    ds, parts = empty_by_token(softmax), divide_up(d, tile["PART"])
    dv, sums = empty_by_token(softmax), v.new_empty(3, b * parts, h, 1, 1, dtype=torch.float32)
    with select_device(v):
        _backward[(b * h * parts,)](
            grad, softmax, v, alpha, beta, gamma, ds, dv, sums, h, n, parts, *grad.stride(), *softmax.stride(),
            *v.stride(), **tile,
        )  # fmt: skip
    if v.shape[1] != h:
        dv = dv.unflatten(1, (v.shape[1], -1)).sum(2)
    return ds, dv, sums.sum(1).to(alpha.dtype)


@operator("attnlab::average_past")
def average_past(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """C of every head, (b,h,n,d). q (b,h,n,d) and k, like v (b,g,n,d), are not read; their gradients are 0."""
    note_launch("shaped")
    return _launch_average(v, empty_by_token(q), q.shape[1] // v.shape[1])


@operator("attnlab::average_past_backward")
def average_past_backward(grad: Tensor, groups: int) -> Tensor:
    """dV, (b,g,n,d)."""
    dv = _empty_groups(grad, groups)
    return _launch_average(grad, dv, grad.shape[1] // groups, backward=True)


def _launch_average(x: Tensor, out: Tensor, shared: int, backward: bool = False) -> Tensor:
    b, h, n, d = (x if backward else out).shape
    tile = _choose_average_tile(n, d)
    parts = divide_up(d, tile["PART"])
    flags = {"BACKWARD": backward, "SHARED": shared}
    with select_device(x):
        _average[(b * h // shared * parts,)](x, out, h, n, parts, *x.stride(), **flags, **tile)
    return out


def _empty_groups(x: Tensor, groups: int) -> Tensor:
    b, _, n, d = x.shape
    return x.new_empty(b, n, groups, d).transpose(1, 2)


@average_past.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return empty_by_token(q)


@average_past_backward.register_fake
def _(grad: Tensor, groups: int) -> Tensor:
    return _empty_groups(grad, groups)


def _count_groups(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.groups = inputs[2].shape[1]


def _average_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk = (
        _empty_groups(grad, heads).zero_() if needed else None
        for heads, needed in zip((grad.shape[1], ctx.groups), ctx.needs_input_grad[:2], strict=True)
    )
    return dq, dk, average_past_backward(grad, ctx.groups)


average_past.register_autograd(_average_gradients, setup_context=_count_groups)


@shape_context.register_fake
def _(softmax: Tensor, *rest: Tensor) -> Tensor:
    return empty_by_token(softmax)


@shape_context_backward.register_fake
def _(grad: Tensor, softmax: Tensor, v: Tensor, alpha: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dv = empty_by_token(softmax)
    if v.shape[1] != softmax.shape[1]:
        dv = dv.unflatten(1, (v.shape[1], -1)).sum(2)
    return empty_by_token(softmax), dv, alpha.new_empty(3, softmax.shape[1], 1, 1)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    refuse_second_derivative()
    ds, dv, sums = shape_context_backward(grad, *ctx.saved_tensors)
    return ds, dv, *sums.unbind()


shape_context.register_autograd(_gradients, setup_context=_save_inputs)


def find_gap(softmax: Tensor, v: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None) -> str | None:
    """Name what these kernels do not cover, or return None."""
    if mask is not None or at is not None or not causal or softmax.shape[2] != v.shape[2]:
        return "a mask, queries placed by at=, or other than causal self-attention"
    return find_tile_gap(softmax, v, v)


def _choose_tile(softmax: Tensor, v: Tensor) -> dict[str, int]:
    d = softmax.shape[3]
    return {"SHARED": softmax.shape[1] // v.shape[1], "D": d, "ROWS": ROWS, "PART": min(PART, round_up(d))}


def _choose_average_tile(n: int, d: int) -> dict[str, int]:
    """Many rows and few columns: steps follow each other, and parts do not."""
    return {"D": d, "ROWS": min(256, round_up(n, 64)), "PART": 16}
