"""Linear maps and norms of many members on a GPU. x (s,n,·): n tokens of each of s members.

    affine      y = x Wᵀ + b                     one product for all members; b is added in place
    normalise   y = g (x − μ) r + b              r = 1 / √(mean (x − μ)² + ε); RMS norm has no μ and no b
                dx = r (u − mean u − x̂ mean(u x̂)),  u = g dy,  x̂ = (x − μ) r        dg = Σ dy x̂,  db = Σ dy over tokens

torch adds the bias of a batched product by first writing it to every row, and normalises, scales and shifts in three
passes. Here each is one pass. Sums over tokens are computed in parts, in float32 and in a fixed order. Gains and biases
(s,e) may be slices of a wider matrix (s,·).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, operator, remember_calls, round_up, select_device

TILE = 4096  # numbers of a tile
WARP_TILE = 512  # numbers of a tile that one warp has: its sums over a token need no barrier
PARTS = 2112  # programs that sum over tokens: sixteen for each multiprocessor of a large GPU


@triton.jit
def _locate(member, row, e, rows, features):
    """Offsets of features e of tokens `row` of a member, and which exist."""
    place = (member.to(tl.int64) * rows + row)[:, None] * features + e[None, :]
    return place, (row < rows)[:, None] & (e < features)[None, :]


@remember_calls
@triton.jit(do_not_specialize=["rows"])
def _add_bias(y, bias, rows, features, b_s, BT: tl.constexpr, BE: tl.constexpr):
    """BT tokens and BE features of one member, in place. b_s: the members' stride in the bias."""
    columns = tl.cdiv(features, BE)
    tiles = tl.cdiv(rows, BT) * columns
    member, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row, e = tile // columns * BT + tl.arange(0, BT), tile % columns * BE + tl.arange(0, BE)
    place, inside = _locate(member, row, e, rows, features)
    b = tl.load(bias + member.to(tl.int64) * b_s + e, mask=e < features, other=0.0).to(tl.float32)
    tl.store(y + place, tl.load(y + place, mask=inside, other=0.0).to(tl.float32) + b[None, :], mask=inside)


@remember_calls
@triton.jit(do_not_specialize=["rows", "parts", "each"])
def _sum_tokens(x, out, rows, features, parts, each, BT: tl.constexpr, BE: tl.constexpr):
    """Sum BE features of one member over `each` tokens; out (s,parts,features)."""
    columns = tl.cdiv(features, BE)
    member, part = tl.program_id(0) // (parts * columns), tl.program_id(0) // columns % parts
    e = tl.program_id(0) % columns * BE + tl.arange(0, BE)
    total = tl.zeros((BT, BE), dtype=tl.float32)
    for first in range(part * each, tl.minimum((part + 1) * each, rows), BT):
        row = first + tl.arange(0, BT)
        place, inside = _locate(member, row, e, rows, features)
        total += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (member * parts + part) * features + e, tl.sum(total, 0), mask=e < features)


@remember_calls
@triton.jit(do_not_specialize=["parts"])
def _sum_parts(x, out, more, parts, size, members, out_s, more_s, BP: tl.constexpr, BE: tl.constexpr):
    """Σ over the parts of BE numbers of one sum; x (sums,parts,size). The first s sums go to out, others to more.

    out_s, more_s: the members' strides in them.
    """
    columns = tl.cdiv(size, BE)
    member, e = tl.program_id(0) // columns, tl.program_id(0) % columns * BE + tl.arange(0, BE)
    total = tl.zeros((BP, BE), dtype=tl.float32)
    for first in range(0, parts, BP):
        place, inside = _locate(member, first + tl.arange(0, BP), e, parts, size)
        total += tl.load(x + place, mask=inside, other=0.0)
    if member < members:
        tl.store(out + member.to(tl.int64) * out_s + e, tl.sum(total, 0), mask=e < size)
    else:
        tl.store(more + (member - members).to(tl.int64) * more_s + e, tl.sum(total, 0), mask=e < size)


@remember_calls
@triton.jit(do_not_specialize=["rows"])
def _normalise(
    x, gain, bias, y, rows, features, g_s, b_s, eps, CENTRED: tl.constexpr, BIASED: tl.constexpr, BT: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """BT tokens of one member. g_s and b_s: the members' strides in gain and bias."""
    tiles = tl.cdiv(rows, BT)
    member, row, e = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BT + tl.arange(0, BT), tl.arange(0, BE)
    place, inside = _locate(member, row, e, rows, features)
    hat, _ = _standardise(tl.load(x + place, mask=inside, other=0.0), inside, features, eps, CENTRED)
    known = e < features
    out = hat * tl.load(gain + member.to(tl.int64) * g_s + e, mask=known, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        out += tl.load(bias + member.to(tl.int64) * b_s + e, mask=known, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, out, mask=inside)


@triton.jit
def _standardise(x, inside, features, eps, CENTRED: tl.constexpr):
    """x̂ (·,BE) in float32, 0 outside, and r (·,)."""
    x = x.to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - (tl.sum(x, 1) / features)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / features + eps)
    return x * inverse[:, None], inverse


@remember_calls
@triton.jit(do_not_specialize=["rows", "parts", "each"])
def _normalise_backward(
    grad, x, gain, dx, sums, rows, features, g_s, parts, each, eps, CENTRED: tl.constexpr, BT: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """dx of `each` tokens of one member, and their sums of dy x̂ and of dy; sums (2,s,parts,features)."""
    member, part, e = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.arange(0, BE)
    known = e < features
    g = tl.load(gain + member.to(tl.int64) * g_s + e, mask=known, other=0.0).to(tl.float32)
    sum_gain, sum_bias = tl.zeros((BT, BE), dtype=tl.float32), tl.zeros((BT, BE), dtype=tl.float32)
    for first in range(part * each, tl.minimum((part + 1) * each, rows), BT):
        row = first + tl.arange(0, BT)
        place, inside = _locate(member, row, e, rows, features)
        hat, inverse = _standardise(tl.load(x + place, mask=inside, other=0.0), inside, features, eps, CENTRED)
        dy = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        sum_gain += dy * hat
        sum_bias += dy
        u = dy * g[None, :]
        slope = u - hat * (tl.sum(u * hat, 1) / features)[:, None]
        if CENTRED:
            slope -= (tl.sum(u, 1) / features)[:, None]
        tl.store(dx + place, slope * inverse[:, None], mask=inside)
    at = tl.program_id(0) * features + e
    tl.store(sums + at, tl.sum(sum_gain, 0), mask=known)
    tl.store(sums + at + tl.num_programs(0) * features, tl.sum(sum_bias, 0), mask=known)


@operator("attnlab::member_affine")
def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x Wᵀ + b of s maps: (s,n,i), (s,o,i), (s,o) -> (s,n,o)."""
    y = torch.bmm(x, weight.mT)
    members, rows, features = y.shape
    tile = _choose_tile(min(256, round_up(features)))
    with select_device(x):
        grid = members * divide_up(rows, tile["BT"]) * divide_up(features, tile["BE"])
        _add_bias[(grid,)](y, bias, rows, features, bias.stride(0), **tile)
    return y


@operator("attnlab::member_sum_tokens")
def sum_tokens(x: Tensor) -> Tensor:
    """Σ over tokens: (s,n,e) -> (s,e)."""
    out = x.new_empty(x.shape[0], x.shape[2])
    sum_tokens_into(x, out)
    return out


def sum_tokens_into(x: Tensor, out: Tensor) -> None:
    """Write Σ over tokens of x (s,n,e) into out (s,e), whose rows may lie apart."""
    x = x.contiguous()
    members, rows, features = x.shape
    tile = _choose_tile(min(256, round_up(features)))
    columns = divide_up(features, tile["BE"])
    parts, each = _split_tokens(rows, members * columns, tile["BT"])
    sums = x.new_empty(members, parts, features, dtype=torch.float32)
    with select_device(x):
        _sum_tokens[(members * parts * columns,)](x, sums, rows, features, parts, each, **tile)
    add_parts(sums, out)


@operator("attnlab::member_normalise")
def normalise(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """The norms of s members: x (s,n,e), gain and bias (s,e) -> (s,n,e)."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    (members, rows, features), tile = x.shape, _choose_tile(round_up(x.shape[2]))
    with select_device(x):
        _normalise[(members * divide_up(rows, tile["BT"]),)](
            x, gain, gain if bias is None else bias, y, rows, features, gain.stride(0),
            0 if bias is None else bias.stride(0), eps, CENTRED=centred, BIASED=bias is not None, **tile,
        )  # fmt: skip
    return y


@operator("attnlab::member_normalise_backward")
def normalise_backward(grad: Tensor, x: Tensor, gain: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """dx (s,n,e), and the gradients of gain and bias, (2,s,e), in the type of the gain."""
    sums = gain.new_empty(2, x.shape[0], x.shape[2])
    return normalise_backward_into(grad, x, gain, eps, centred, *sums), sums


def normalise_backward_into(
    grad: Tensor, x: Tensor, gain: Tensor, eps: float, centred: bool, dgain: Tensor, dbias: Tensor | None
) -> Tensor:
    """Return dx (s,n,e); write the gradients of gain and bias into dgain and dbias (s,e), whose rows may lie apart."""
    grad, x, dx = grad.contiguous(), x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    (members, rows, features), wide = x.shape, round_up(x.shape[2])
    warps = max(1, min(8, wide // WARP_TILE))
    tile = {"BT": max(1, warps * WARP_TILE // wide), "BE": wide, "num_warps": warps}
    parts, each = _split_tokens(rows, members, tile["BT"])
    sums = x.new_empty(2 * members, parts, features, dtype=torch.float32)
    with select_device(x):
        _normalise_backward[(members * parts,)](
            grad, x, gain, dx, sums, rows, features, gain.stride(0), parts, each, eps, CENTRED=centred, **tile
        )
    add_parts(sums, dgain, dbias)
    return dx


def add_parts(x: Tensor, out: Tensor, more: Tensor | None = None) -> None:
    """Σ over the second axis of x (sums,parts,size), in float32: the first s into out (s,size), the next into more."""
    (_, parts, size), members = x.shape, len(out)
    pair, count = (out, members) if more is None else (more, 2 * members)
    sizes = (parts, size, members, out.stride(0), pair.stride(0))
    with select_device(x):
        _sum_parts[(count * divide_up(size, 32),)](x, out, pair, *sizes, BP=128, BE=32)


def _choose_tile(wide: int) -> dict[str, int]:
    return {"BT": max(1, TILE // wide), "BE": wide, "num_warps": 4 if wide <= 1024 else 8}


def _split_tokens(rows: int, others: int, least: int) -> tuple[int, int]:
    """Return the number of parts in which tokens are summed, and the tokens of each: `others` sums run beside it."""
    tiles = max(1, divide_up(rows, least))
    each = divide_up(tiles, min(tiles, max(1, PARTS // others)))
    return divide_up(tiles, each), each * least


@affine.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], weight.shape[1])


@sum_tokens.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2])


@normalise.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@normalise_backward.register_fake
def _(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sums = rest[0].new_empty(2, x.shape[0], x.shape[2])
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


def _save_affine(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _affine_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needed = ctx.needs_input_grad
    dx = torch.bmm(grad, weight) if needed[0] else None
    dw = torch.bmm(grad.mT, x) if needed[1] else None
    return dx, dw, sum_tokens(grad) if needed[2] else None


affine.register_autograd(_affine_gradients, setup_context=_save_affine)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gain, bias, ctx.eps, ctx.centred = inputs
    ctx.is_biased = bias is not None
    ctx.save_for_backward(x, gain)


def _norm_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, gain = ctx.saved_tensors
    dx, sums = normalise_backward(grad, x, gain, ctx.eps, ctx.centred)
    dgain, dbias = sums.unbind()
    return dx, dgain, dbias if ctx.is_biased else None, None, None


normalise.register_autograd(_norm_gradients, setup_context=_save_norm)
