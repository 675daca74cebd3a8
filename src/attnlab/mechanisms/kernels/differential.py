"""The difference of two attentions whose heads alternate, row by row: each row is read once and written once.

    divide_heads   the halves of head h, each beside zeros, as heads 2h and 2h + 1
    subtract       y = x_2h − λ x_2h+1          λ: a number for each row, or one for all; then an RMS norm, if wanted

Tensors (b,h,n,d) may have any strides. Results have the memory layout (b,n,h,d), which the output projection reads.
Sums are computed in float32 and in a fixed order, so results are deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    empty_by_token,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    select_device,
)
from attnlab.mechanisms.kernels.tiles import ANY_VALUE, load_tile, locate_tile, write_tile
from attnlab.mechanisms.kernels.unit_rows import choose_row_tile, make_grid, save_inputs


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _divide(
    x, out, heads, rows, x_b, x_h, x_i, x_d, JOINED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Head h of x to heads 2h and 2h + 1 of out; JOINED: the left half of 2h and the right one of 2h + 1 to h."""
    _, tile, b, h = locate_tile(tl.cdiv(rows, ROWS), heads)
    i, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    right = (d >= D // 2)[None, :]
    if JOINED:
        inside = (i < rows)[:, None] & (d < D)[None, :]
        place = x + b * x_b + (2 * h + right.to(tl.int32)) * x_h + i[:, None] * x_i + d[None, :] * x_d
        write_tile(out, tl.load(place, mask=inside, other=0.0), b, h, i, heads, rows, D, WIDE)
    else:
        y = load_tile(x, b, h, i, rows, x_b, x_h, x_i, x_d, D, WIDE)
        write_tile(out, tl.where(right, 0.0, y), b, 2 * h, i, 2 * heads, rows, D, WIDE)
        write_tile(out, tl.where(right, y, 0.0), b, 2 * h + 1, i, 2 * heads, rows, D, WIDE)


@triton.jit
def _exponential(first, second, number, D: tl.constexpr, WIDE: tl.constexpr):
    """exp(a·b) of rows `number` of two (2,D/2)."""
    d = tl.arange(0, WIDE)
    at, inside = number * (D // 2) + d, d < D // 2
    a, b = tl.load(first + at, mask=inside, other=0.0), tl.load(second + at, mask=inside, other=0.0)
    return tl.exp(tl.sum(a.to(tl.float32) * b.to(tl.float32), 0))


@triton.jit
def _read_level(
    first, second, b, h, i, rows, l_b, l_h, l_i, initial, VECTORS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr
):
    """λ of rows i."""
    if VECTORS:
        one = _exponential(first, second, 0, D, WIDE) - _exponential(first, second, 1, D, WIDE)
        level = tl.zeros(i.shape, dtype=tl.float32) + (one + initial)
    else:
        level = tl.load(first + b * l_b + h * l_h + i * l_i, mask=i < rows, other=0.0).to(tl.float32)
    return level


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _subtract(
    x, first, second, gain, out, heads, rows, x_b, x_h, x_i, x_d, l_b, l_h, l_i, initial, scale, eps,
    VECTORS: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _, tile, b, h = locate_tile(tl.cdiv(rows, ROWS), heads)
    i, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    y = load_tile(x, b, 2 * h, i, rows, x_b, x_h, x_i, x_d, D, WIDE).to(tl.float32)
    z = load_tile(x, b, 2 * h + 1, i, rows, x_b, x_h, x_i, x_d, D, WIDE).to(tl.float32)
    y -= _read_level(first, second, b, h, i, rows, l_b, l_h, l_i, initial, VECTORS, D, WIDE)[:, None] * z
    if NORMED:
        y *= (scale / tl.sqrt(tl.sum(y * y, 1) / D + eps))[:, None]
        y *= tl.load(gain + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    write_tile(out, y, b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _subtract_backward(
    x, first, second, gain, grad, dx, dlevel, dgain, heads, rows, x_b, x_h, x_i, x_d, g_b, g_h, g_i, g_d, l_b, l_h,
    l_i, initial, scale, eps, VECTORS: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """dx; dλ of each row (b,n,h), or the sum of each program; and a part of the gradient of the gain, (programs,d)."""
    _, tile, b, h = locate_tile(tl.cdiv(rows, ROWS), heads)
    i, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    z = load_tile(x, b, 2 * h + 1, i, rows, x_b, x_h, x_i, x_d, D, WIDE).to(tl.float32)
    g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE).to(tl.float32)
    level = _read_level(first, second, b, h, i, rows, l_b, l_h, l_i, initial, VECTORS, D, WIDE)[:, None]
    if NORMED:
        y = load_tile(x, b, 2 * h, i, rows, x_b, x_h, x_i, x_d, D, WIDE).to(tl.float32) - level * z
        inverse = (1.0 / tl.sqrt(tl.sum(y * y, 1) / D + eps))[:, None]
        y *= inverse
        g *= scale
        tl.store(dgain + tl.program_id(0).to(tl.int64) * D + d, tl.sum(g * y, 0), mask=d < D)
        g *= tl.load(gain + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        g = (g - y * (tl.sum(g * y, 1) / D)[:, None]) * inverse
    write_tile(dx, g, b, 2 * h, i, 2 * heads, rows, D, WIDE)
    write_tile(dx, -level * g, b, 2 * h + 1, i, 2 * heads, rows, D, WIDE)
    if VECTORS:
        tl.store(dlevel + tl.program_id(0), -tl.sum(g * z))
    else:
        tl.store(dlevel + (b * rows + i) * heads + h, -tl.sum(g * z, 1), mask=i < rows)


@remember_calls
@triton.jit(do_not_specialize=["count"])
def _sum_levels(parts, first, second, dfirst, dsecond, count, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients of a and b, from the parts of dλ: ± dλ exp(a·b) b and ± dλ exp(a·b) a."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        n = start + tl.arange(0, BLOCK)
        total += tl.load(parts + n, mask=n < count, other=0.0)
    d, slope = tl.arange(0, WIDE), tl.sum(total, 0)
    for number in tl.static_range(2):
        at, inside = number * (D // 2) + d, d < D // 2
        each = slope * _exponential(first, second, number, D, WIDE) * (1 - 2 * number)
        tl.store(dfirst + at, each * tl.load(second + at, mask=inside, other=0.0).to(tl.float32), mask=inside)
        tl.store(dsecond + at, each * tl.load(first + at, mask=inside, other=0.0).to(tl.float32), mask=inside)


@operator("attnlab::divide_heads")
def divide_heads(x: Tensor, joined: bool) -> Tensor:
    """(b,h,n,d) -> (b,2h,n,d); joined: the transposed map, (b,2h,n,d) -> (b,h,n,d)."""
    h = x.shape[1] // 2 if joined else x.shape[1]
    out, tile = _empty(x, h if joined else 2 * h), choose_row_tile(x.shape[3])
    with select_device(x):
        _divide[make_grid(x, h, tile)](x, out, h, x.shape[2], *x.stride(), JOINED=joined, **tile)
    return out


@operator("attnlab::subtract")
def subtract(
    x: Tensor, first: Tensor, second: Tensor | None, gain: Tensor | None, initial: float, scale: float, eps: float
) -> Tensor:
    """y (b,h,n,d) of x (b,2h,n,d); with a gain (d,) the RMS norm of y, times scale.

    first    λ, (b,h,n,1)
    second   with it, both are vectors (2,d/2), and λ = exp(a₁·b₁) − exp(a₂·b₂) + initial
    """
    note_launch("differential")
    h, tile, (first, other, weight) = x.shape[1] // 2, choose_row_tile(x.shape[3]), _pack(first, second, gain)
    out, strides = _empty(x, h), (*x.stride(), *_level_strides(first, second))
    flags = {"VECTORS": second is not None, "NORMED": gain is not None}
    with select_device(x):
        _subtract[make_grid(x, h, tile)](
            x, first, other, weight, out, h, x.shape[2], *strides, initial, scale, eps, **flags, **tile
        )
    return out


@operator("attnlab::subtract_backward")
def subtract_backward(
    grad: Tensor, x: Tensor, first: Tensor, second: Tensor | None, gain: Tensor | None, initial: float, scale: float,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """dx and the gradients of first, and of second and gain where they are given."""
    (b, h, n, d), tile, (first, other, weight) = x.shape, choose_row_tile(x.shape[3]), _pack(first, second, gain)
    h, dx, grid = h // 2, empty_by_token(x), make_grid(x, h // 2, tile)
    by_rows = second is None
    dlevel = x.new_empty((b, n, h) if by_rows else grid, dtype=first.dtype if by_rows else torch.float32)
    dgain = dx if gain is None else x.new_empty((*grid, d), dtype=torch.float32)
    strides = (*x.stride(), *grad.stride(), *_level_strides(first, second))
    with select_device(x):
        _subtract_backward[grid](
            x, first, other, weight, grad, dx, dlevel, dgain, h, n, *strides, initial, scale, eps, VECTORS=not by_rows,
            NORMED=gain is not None, **tile,
        )  # fmt: skip
        if by_rows:
            found = [dx, dlevel.transpose(1, 2).unsqueeze(-1)]
        else:
            found = [dx, torch.empty_like(first), torch.empty_like(other)]
            sizes = {"D": d, "WIDE": tile["WIDE"], "BLOCK": 1024}
            _sum_levels[(1,)](dlevel, first, other, *found[1:], grid[0], **sizes)
    return found if gain is None else [*found, dgain.sum(0).to(gain.dtype)]


@divide_heads.register_fake
def _(x: Tensor, joined: bool) -> Tensor:
    return _empty(x, x.shape[1] // 2 if joined else 2 * x.shape[1])


@subtract.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return _empty(x, x.shape[1] // 2)


@subtract_backward.register_fake
def _(grad: Tensor, x: Tensor, first: Tensor, second: Tensor | None, gain: Tensor | None, *rest: float) -> list[Tensor]:
    b, h, n, _ = grad.shape
    level = first.new_empty(b, n, h).transpose(1, 2).unsqueeze(-1) if second is None else first
    return [empty_by_token(x), *(torch.empty_like(each) for each in (level, second, gain) if each is not None)]


def _divide_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return divide_heads(grad, not ctx.options[0]), None


def _subtract_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    given = ctx.saved_tensors
    found = subtract_backward(grad, *given, *ctx.options)
    return *(None if x is None else found.pop(0) for x in given), None, None, None


divide_heads.register_autograd(_divide_gradients, setup_context=save_inputs)
subtract.register_autograd(_subtract_gradients, setup_context=save_inputs)


def _empty(x: Tensor, heads: int) -> Tensor:
    """Allocate like x (b,·,n,d), with other heads and the memory layout (b,n,h,d)."""
    b, _, n, d = x.shape
    return x.new_empty_strided((b, heads, n, d), (n * heads * d, d, heads * d, 1))


def _pack(first: Tensor, second: Tensor | None, gain: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return vectors without gaps, and `first` for those that are not read; λ of rows may have any strides."""
    if second is not None:
        first, second = first.contiguous(), second.contiguous()
    return first, first if second is None else second, first if gain is None else gain.contiguous()


def _level_strides(first: Tensor, second: Tensor | None) -> tuple[int, ...]:
    return first.stride()[:3] if second is None else (0, 0, 0)
