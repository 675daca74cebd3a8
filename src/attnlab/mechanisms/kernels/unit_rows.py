"""Unit vectors, row by row: each row is read once and written once.

    normalise     y = f x / ‖x‖, 0 if x = 0    f = exp(min(l_h, limit)) for queries, 1 for keys
    project_out   y = x − (x·u) u              u = w / ‖w‖, 0 if w = 0; w belongs to a key head

Tensors (b,h,n,d) may have any strides. Results have the memory layout (b,n,h,d), which the output projection reads.
Sums are computed in float32 and in a fixed order, so results are deterministic.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    divide_up,
    empty_by_token,
    find_device_gap,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    round_up,
    select_device,
)
from attnlab.mechanisms.kernels.tiles import ANY_VALUE, TYPES, WIDEST, load_tile, locate_tile, write_tile

NUMBERS = 4096  # of a tile
UNIT = 1e-20  # ε of the mean square


@triton.jit
def _load_unit(w, b, g, i, rows, w_b, w_h, w_i, w_d, eps, D: tl.constexpr, WIDE: tl.constexpr):
    """u and 1/‖w‖ of rows i."""
    z = load_tile(w, b, g, i, rows, w_b, w_h, w_i, w_d, D, WIDE).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(z * z, 1) + eps * D)
    return z * inverse[:, None], inverse


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _normalise(
    x, factor, out, heads, rows, x_b, x_h, x_i, x_d, eps, limit, SCALED: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _, tile, b, h = locate_tile(tl.cdiv(rows, ROWS), heads)
    i = tile * ROWS + tl.arange(0, ROWS)
    y, _ = _load_unit(x, b, h, i, rows, x_b, x_h, x_i, x_d, eps, D, WIDE)
    if SCALED:
        y *= tl.exp(tl.minimum(tl.load(factor + h).to(tl.float32), limit))
    write_tile(out, y, b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _normalise_backward(
    x, factor, grad, dx, sums, heads, rows, x_b, x_h, x_i, x_d, g_b, g_h, g_i, g_d, eps, limit, SCALED: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dx, and a part of the gradient of the factors, (b,tiles,h)."""
    tiles = tl.cdiv(rows, ROWS)
    _, tile, b, h = locate_tile(tiles, heads)
    i = tile * ROWS + tl.arange(0, ROWS)
    u, inverse = _load_unit(x, b, h, i, rows, x_b, x_h, x_i, x_d, eps, D, WIDE)
    g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE).to(tl.float32)
    if SCALED:
        level = tl.load(factor + h).to(tl.float32)
        g *= tl.exp(tl.minimum(level, limit))
        tl.store(sums + (b * tiles + tile) * heads + h, tl.where(level <= limit, tl.sum(g * u), 0.0))
    write_tile(dx, (g - tl.sum(g * u, 1)[:, None] * u) * inverse[:, None], b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _project(
    x, w, out, heads, rows, x_b, x_h, x_i, x_d, w_b, w_h, w_i, w_d, eps, SHARED: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of one key head, for all heads that share it."""
    _, tile, b, group = locate_tile(tl.cdiv(rows, ROWS), heads // SHARED)
    i = tile * ROWS + tl.arange(0, ROWS)
    u, _ = _load_unit(w, b, group, i, rows, w_b, w_h, w_i, w_d, eps, D, WIDE)
    for h in range(group * SHARED, (group + 1) * SHARED):
        y = load_tile(x, b, h, i, rows, x_b, x_h, x_i, x_d, D, WIDE).to(tl.float32)
        write_tile(out, y - tl.sum(y * u, 1)[:, None] * u, b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _project_backward(
    x, w, grad, dx, dw, heads, rows, x_b, x_h, x_i, x_d, w_b, w_h, w_i, w_d, g_b, g_h, g_i, g_d, eps,
    SHARED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    groups = heads // SHARED
    _, tile, b, group = locate_tile(tl.cdiv(rows, ROWS), groups)
    i = tile * ROWS + tl.arange(0, ROWS)
    u, inverse = _load_unit(w, b, group, i, rows, w_b, w_h, w_i, w_d, eps, D, WIDE)
    du = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    for h in range(group * SHARED, (group + 1) * SHARED):
        y = load_tile(x, b, h, i, rows, x_b, x_h, x_i, x_d, D, WIDE).to(tl.float32)
        g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE).to(tl.float32)
        along = tl.sum(g * u, 1)[:, None]
        du -= tl.sum(y * u, 1)[:, None] * g + along * y
        write_tile(dx, g - along * u, b, h, i, heads, rows, D, WIDE)
    write_tile(dw, (du - tl.sum(du * u, 1)[:, None] * u) * inverse[:, None], b, group, i, groups, rows, D, WIDE)


@operator("attnlab::normalise")
def normalise(q: Tensor, k: Tensor, factor: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """y of q (b,h,i,d) with factors l, h numbers, and of k (b,g,j,d) without; limit: the largest l that acts."""
    note_launch("unit_rows")
    found, factor, tile = (empty_by_token(q), empty_by_token(k)), factor.contiguous(), choose_row_tile(q.shape[3])
    with select_device(q):
        for x, out, scaled in zip((q, k), found, (True, False), strict=True):
            _normalise[make_grid(x, x.shape[1], tile)](
                x, factor, out, x.shape[1], x.shape[2], *x.stride(), UNIT, limit, SCALED=scaled, **tile
            )
    return found


@operator("attnlab::normalise_backward")
def normalise_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, factor: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and the gradient of the factors."""
    found, tile = (empty_by_token(q), empty_by_token(k)), choose_row_tile(q.shape[3])
    sums = q.new_empty(len(q) * divide_up(q.shape[2], tile["ROWS"]), q.shape[1], dtype=torch.float32)
    packed, given = factor.contiguous(), zip((q, k), (grad_q, grad_k), found, (True, False), strict=True)
    with select_device(q):
        for x, grad, dx, scaled in given:
            strides = (*x.stride(), *grad.stride())
            _normalise_backward[make_grid(x, x.shape[1], tile)](
                x, packed, grad, dx, sums, x.shape[1], x.shape[2], *strides, UNIT, limit, SCALED=scaled, **tile
            )
    return *found, sums.sum(0).view(factor.shape).to(factor.dtype)


@operator("attnlab::project_out")
def project_out(x: Tensor, w: Tensor) -> Tensor:
    """y of x (b,h,n,d) and w (b,g,n,d)."""
    note_launch("unit_rows")
    out, tile, h, shared = empty_by_token(x), choose_row_tile(x.shape[3]), x.shape[1], x.shape[1] // w.shape[1]
    with select_device(x):
        _project[make_grid(x, w.shape[1], tile)](
            x, w, out, h, x.shape[2], *x.stride(), *w.stride(), UNIT, SHARED=shared, **tile
        )
    return out


@operator("attnlab::project_out_backward")
def project_out_backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dw."""
    dx, dw, tile, h = empty_by_token(x), empty_by_token(w), choose_row_tile(x.shape[3]), x.shape[1]
    strides = (*x.stride(), *w.stride(), *grad.stride())
    with select_device(x):
        _project_backward[make_grid(x, w.shape[1], tile)](
            x, w, grad, dx, dw, h, x.shape[2], *strides, UNIT, SHARED=h // w.shape[1], **tile
        )
    return dx, dw


@normalise.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_by_token(q), empty_by_token(k)


@normalise_backward.register_fake
def _(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, factor: Tensor, limit: float
      ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_by_token(q), empty_by_token(k), factor.new_empty(factor.shape)


@project_out.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return empty_by_token(x)


@project_out_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return empty_by_token(x), empty_by_token(w)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    count = sum(x is None or isinstance(x, Tensor) for x in inputs)
    ctx.options = inputs[count:]
    ctx.save_for_backward(*inputs[:count])


def _normalise_gradients(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    return *normalise_backward(grad_q, grad_k, *ctx.saved_tensors, *ctx.options), None


def _project_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    refuse_second_derivative()
    dx, dw = project_out_backward(grad, *ctx.saved_tensors)
    return dx, dw


normalise.register_autograd(_normalise_gradients, setup_context=save_inputs)
project_out.register_autograd(_project_gradients, setup_context=save_inputs)


def find_gap(x: Tensor, w: Tensor | None = None) -> str | None:
    """Name what keeps these kernels from reading x, and w with as many rows, or return None."""
    for each in (x,) if w is None else (x, w):
        if gap := find_device_gap(each):
            return gap
        if each.dtype not in TYPES or each.dtype != x.dtype:
            return f"contexts in {x.dtype} and {each.dtype}"
        if each.dim() != 4 or each.shape[3] > WIDEST or each.shape[2] * each.stride(2) >= 2**31:
            return f"rows of {tuple(each.shape)}"
    return None


def make_grid(x: Tensor, heads: int, tile: dict[str, int]) -> tuple[int]:
    return (x.shape[0] * heads * divide_up(x.shape[2], tile["ROWS"]),)


@cache
def choose_row_tile(d: int) -> dict[str, int]:
    """Rows of a tile, and their sizes; callers must not change it."""
    wide = round_up(d)
    return {"ROWS": NUMBERS // wide, "D": d, "WIDE": wide}
