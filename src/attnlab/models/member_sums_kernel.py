"""Gradients of members' activations, with their sums over tokens from the same read: the gradients of biases.

    rectify   y = max(z + b, 0) in place        dz = dy ∘ 1[y > 0],   db = Σ dz over tokens
    join      dz = [dq, dk, dv] side by side,   db = Σ dz over tokens

Tensors are (s,n,e): n tokens of each of s members. Sums are computed in parts, in float32 and in a fixed order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, remember_calls, round_up, select_device

TILE = 4096  # numbers of a program
WIDE = 256  # most features of a program


@remember_calls
@triton.jit(do_not_specialize=["rows"])
def _rectify(y, bias, rows, features, b_s, BT: tl.constexpr, BE: tl.constexpr):
    """BT tokens and BE features of one member, in place. b_s: the members' stride in the bias."""
    columns = tl.cdiv(features, BE)
    tiles = tl.cdiv(rows, BT) * columns
    member, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row, e = tile // columns * BT + tl.arange(0, BT), tile % columns * BE + tl.arange(0, BE)
    place = (member.to(tl.int64) * rows + row)[:, None] * features + e[None, :]
    inside = (row < rows)[:, None] & (e < features)[None, :]
    b = tl.load(bias + member.to(tl.int64) * b_s + e, mask=e < features, other=0.0).to(tl.float32)
    out = tl.load(y + place, mask=inside, other=0.0).to(tl.float32) + b[None, :]
    tl.store(y + place, tl.where(out < 0.0, 0.0, out), mask=inside)  # NaN stays


@remember_calls
@triton.jit(do_not_specialize=["rows"])
def _rectify_backward(grad, y, out, sums, rows, features, BT: tl.constexpr, BE: tl.constexpr):
    """dz of BT tokens and BE features of one member, and their sums; sums (s,tiles of tokens,features)."""
    columns, parts = tl.cdiv(features, BE), tl.cdiv(rows, BT)
    member, tile = tl.program_id(0) // (parts * columns), tl.program_id(0) % (parts * columns)
    part, e = tile // columns, tile % columns * BE + tl.arange(0, BE)
    row = part * BT + tl.arange(0, BT)
    place = (member.to(tl.int64) * rows + row)[:, None] * features + e[None, :]
    inside = (row < rows)[:, None] & (e < features)[None, :]
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(tl.load(y + place, mask=inside, other=0.0).to(tl.float32) > 0.0, g, 0.0)
    tl.store(out + place, g, mask=inside)
    tl.store(sums + (member * parts + part) * features + e, tl.sum(g, 0), mask=e < features)


@remember_calls
@triton.jit(do_not_specialize=["rows"])
def _join(
    x, out, sums, rows, width, first, features, BT: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Copy BT tokens and BE features of x (s,n,width) to features from `first` on, and sum them over the tokens."""
    columns, parts = tl.cdiv(width, BE), tl.cdiv(rows, BT)
    member, tile = tl.program_id(0) // (parts * columns), tl.program_id(0) % (parts * columns)
    part, e = tile // columns, tile % columns * BE + tl.arange(0, BE)
    row = part * BT + tl.arange(0, BT)
    token = (member.to(tl.int64) * rows + row)[:, None]
    inside = (row < rows)[:, None] & (e < width)[None, :]
    g = tl.load(x + token * width + e[None, :], mask=inside, other=0.0)
    tl.store(out + token * features + first + e[None, :], g, mask=inside)
    at = (member * parts + part) * features + first + e
    tl.store(sums + at, tl.sum(g.to(tl.float32), 0), mask=e < width)


def rectify(y: Tensor, bias: Tensor) -> None:
    """y ← max(y + b, 0), y (s,n,e) and b (s,e)."""
    (members, rows, features), tile = y.shape, _choose_tile(y.shape[2])
    with select_device(y):
        grid = members * divide_up(rows, tile["BT"]) * divide_up(features, tile["BE"])
        _rectify[(grid,)](y, bias, rows, features, bias.stride(0), **tile)


def rectify_backward(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """dz, and its sums (s,parts,e)."""
    grad, out = grad.contiguous(), torch.empty_like(y)
    (members, rows, features), tile = y.shape, _choose_tile(y.shape[2])
    parts = divide_up(rows, tile["BT"])
    sums = y.new_empty(members, parts, features, dtype=torch.float32)
    with select_device(y):
        grid = members * parts * divide_up(features, tile["BE"])
        _rectify_backward[(grid,)](grad, y, out, sums, rows, features, **tile)
    return out, sums


def join(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradients (s,n,·) side by side, (s,n,e), and their sums (s,parts,e)."""
    members, rows, _ = grads[0].shape
    features, tile = sum(x.shape[2] for x in grads), _choose_tile(min(x.shape[2] for x in grads))
    parts, first = divide_up(rows, tile["BT"]), 0
    out = grads[0].new_empty(members, rows, features)
    sums = out.new_empty(members, parts, features, dtype=torch.float32)
    with select_device(out):
        for x in grads:
            width = x.shape[2]
            grid = members * parts * divide_up(width, tile["BE"])
            _join[(grid,)](x.contiguous(), out, sums, rows, width, first, features, **tile)
            first += width
    return out, sums


def _choose_tile(features: int) -> dict[str, int]:
    wide = min(WIDE, round_up(features))
    return {"BT": max(1, TILE // wide), "BE": wide, "num_warps": 4}
