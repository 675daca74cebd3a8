"""What ends multi-token attention, for each head's row y of the context: RMS norm and a gate of its own.

    n = y r ∘ w,  r = 1/√(mean y² + ε)        out = σ(g·n + β) n
    dn = σ (d + (1 − σ)(d·n) g)        dy = r (w ∘ dn − y r² (dn ∘ w)·y / D)        dw = Σ dn ∘ y r
    dg = Σ s n,  dβ = Σ s,  s = σ (1 − σ)(d·n)        d: the gradient of out

Programs take some rows of one example and head; their parts of dw, dg and dβ are summed in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    divide_up,
    empty_by_token,
    find_device_gap,
    operator,
    refuse_second_derivative,
    remember_calls,
    round_up,
    select_device,
)
from attnlab.mechanisms.kernels.tiles import ANY_VALUE, TYPES, WIDEST, load_tile, locate_tile, write_tile

ROWS = 64


@triton.jit
def _load_gated(y, weight, gate, shift, b, h, i, rows, y_b, y_h, y_i, y_d, eps, D: tl.constexpr, WIDE: tl.constexpr):
    """y, r, w and g in float32, n, and σ of rows i."""
    d = tl.arange(0, WIDE)
    x = load_tile(y, b, h, i, rows, y_b, y_h, y_i, y_d, D, WIDE).to(tl.float32)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    g = tl.load(gate + d, mask=d < D, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    n = x * r[:, None] * w[None, :]
    level = tl.sum(n * g[None, :], 1) + tl.load(shift).to(tl.float32)
    return x, r, w, g, n, 1.0 / (1.0 + tl.exp2(level * -1.4426950408889634))


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE[:2])
def _forward(
    y, weight, gate, shift, out, heads, rows, y_b, y_h, y_i, y_d, eps, ROWS: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    _head, tile, b, h = locate_tile(tl.cdiv(rows, ROWS), heads)
    i = tile * ROWS + tl.arange(0, ROWS)
    _x, _r, _w, _g, n, share = _load_gated(y, weight, gate, shift, b, h, i, rows, y_b, y_h, y_i, y_d, eps, D, WIDE)
    write_tile(out, share[:, None] * n, b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE[:2])
def _backward(
    y, weight, gate, shift, grad, out, parts, heads, rows, y_b, y_h, y_i, y_d, g_b, g_h, g_i, g_d, eps,
    ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _head, tile, b, h = locate_tile(tl.cdiv(rows, ROWS), heads)
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    x, r, w, g, n, share = _load_gated(y, weight, gate, shift, b, h, i, rows, y_b, y_h, y_i, y_d, eps, D, WIDE)
    d = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE).to(tl.float32)
    slope = share * (1.0 - share) * tl.sum(d * n, 1)
    dn = share[:, None] * d + slope[:, None] * g[None, :]
    up, unit = dn * w[None, :], x * r[:, None]
    write_tile(out, r[:, None] * (up - unit * (tl.sum(up * unit, 1) / D)[:, None]), b, h, i, heads, rows, D, WIDE)
    part, inside = parts + tl.program_id(0).to(tl.int64) * (2 * D + 1), column < D
    tl.store(part + column, tl.sum(dn * unit, 0), mask=inside)
    tl.store(part + D + column, tl.sum(slope[:, None] * n, 0), mask=inside)
    tl.store(part + 2 * D, tl.sum(slope, 0))


@operator("attnlab::gated_norm")
def gated_norm(y: Tensor, weight: Tensor, gate: Tensor, shift: Tensor, eps: float) -> Tensor:
    """y (b,h,i,d) -> the same, in the memory layout (b,i,h,d); weight (d,) of the norm, gate (1,d) and shift (1,)."""
    (b, h, i, d), out = y.shape, empty_by_token(y)
    with select_device(y):
        grid = (b * h * divide_up(i, ROWS),)
        _forward[grid](y, weight, gate, shift, out, h, i, *y.stride(), eps, ROWS=ROWS, D=d, WIDE=round_up(d))
    return out


@operator("attnlab::gated_norm_backward")
def gated_norm_backward(
    grad: Tensor, y: Tensor, weight: Tensor, gate: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient of y, and those of weight, gate and shift as one vector (2·d + 1,)."""
    (b, h, i, d), out = y.shape, empty_by_token(y)
    programs = b * h * divide_up(i, ROWS)
    parts = y.new_empty((programs, 2 * d + 1), dtype=torch.float32)
    with select_device(y):
        _backward[(programs,)](
            y, weight, gate, shift, grad, out, parts, h, i, *y.stride(), *grad.stride(), eps, ROWS=ROWS, D=d,
            WIDE=round_up(d),
        )  # fmt: skip
    return out, parts.sum(0).to(weight.dtype)


def find_norm_gap(y: Tensor, weight: Tensor) -> str | None:
    """Name what keeps the kernels from y (b,h,i,d), or return None."""
    if gap := find_device_gap(y):
        return gap
    if y.dtype not in TYPES or weight.dtype not in TYPES:
        return f"contexts in {y.dtype} with weights in {weight.dtype}"
    return None if 0 < y.shape[3] <= WIDEST and y.numel() else f"contexts {tuple(y.shape)}"


@gated_norm.register_fake
def _(y: Tensor, *rest: Any) -> Tensor:
    return empty_by_token(y)


@gated_norm_backward.register_fake
def _(grad: Tensor, y: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_by_token(y), weight.new_empty(2 * y.shape[3] + 1)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *given, ctx.eps = inputs
    ctx.save_for_backward(*given)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    y, weight, gate, shift = ctx.saved_tensors
    dy, more = gated_norm_backward(grad, y, weight, gate, shift, ctx.eps)
    dweight, dgate, dshift = more.split([weight.numel(), gate.numel(), 1])
    return dy, dweight, dgate.view(gate.shape), dshift, None


gated_norm.register_autograd(_gradients, setup_context=_save_inputs)
