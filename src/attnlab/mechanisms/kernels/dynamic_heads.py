"""What DCMHA derives of its input: from two projections, each token's u, w and g; then the matrices that mix heads.

    sides      [U, W] = GELU(a) W₂      u = U / √(mean U² + ε) of each rank      g = tanh(c)      [a, c] = x [W₁; W_g]ᵀ
    matrices   M_t = W_b + Σ_r u_tr ⊗ w_tr + diag(g_t)

A program takes some tokens of the parameters for S, or of those for P. The backward pass computes GELU and U again; the
gradient of W₂ is one product of what it writes, and that of W_b one sum. All sums are in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    divide_up,
    find_device_gap,
    operator,
    refuse_second_derivative,
    remember_calls,
    round_up,
    select_device,
)

TOKENS, EPS = 16, tl.constexpr(1e-6)
MOST = 256  # hidden units
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _activate(ac, t, s, size, hidden, heads, TOKENS: tl.constexpr, HIDDEN: tl.constexpr):
    """GELU of a of tokens t, and its derivative, (TOKENS,HIDDEN) in float32; ac (size,2·hidden + 2·heads)."""
    m = tl.arange(0, HIDDEN)
    inside = (t < size)[:, None] & (m < hidden)[None, :]
    place = t[:, None] * (2 * hidden + 2 * heads) + s * hidden + m[None, :]
    x = tl.load(ac + place, mask=inside, other=0.0).to(tl.float32)
    share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * share, share + x * 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)


@triton.jit
def _load_rank(w, s, rank, hidden, heads, HIDDEN: tl.constexpr, H: tl.constexpr, T: tl.constexpr):
    """The columns of one rank of W₂ (2,hidden,hidden): (HIDDEN,H)."""
    m, h = tl.arange(0, HIDDEN), tl.arange(0, H)
    inside = (m < hidden)[:, None] & (h < heads)[None, :]
    return tl.load(w + (s * hidden + m[:, None]) * hidden + rank * heads + h[None, :], mask=inside, other=0.0).to(T)


@triton.jit
def _at_side(b, s, n, width, length):
    """Offsets of tokens n of example b in a side (b,2,n,width)."""
    return ((b * 2 + s) * length + n) * width


@remember_calls
@triton.jit(do_not_specialize=("size", "length"))
def _make_sides(
    ac, w, side, size, length, hidden, heads, RANK: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr,
    H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    t, s = tl.program_id(0) // 2 * TOKENS + tl.arange(0, TOKENS), tl.program_id(0) % 2
    h, width = tl.arange(0, H), (2 * RANK + 1) * heads
    place = side + _at_side(t // length, s, t % length, width, length)[:, None] + h[None, :]
    inside = (t < size)[:, None] & (h < heads)[None, :]
    y, _slope = _activate(ac, t, s, size, hidden, heads, TOKENS, HIDDEN)
    for rank in tl.static_range(2 * RANK):
        z = tl.dot(y.to(T), _load_rank(w, s, rank, hidden, heads, HIDDEN, H, T), input_precision="ieee")
        if rank < RANK:
            z *= tl.rsqrt(tl.sum(z * z, 1) / heads + EPS)[:, None]
        tl.store(place + rank * heads, z, mask=inside)
    row = t[:, None] * (2 * hidden + 2 * heads)
    g = tl.load(ac + row + 2 * hidden + s * heads + h[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(place + 2 * RANK * heads, 2.0 / (1.0 + tl.exp2(g * -2.8853900817779268)) - 1.0, mask=inside)


@remember_calls
@triton.jit(do_not_specialize=("size", "length"))
def _make_sides_backward(
    ac, w, side, grad, active, dz, dac, size, length, hidden, heads, RANK: tl.constexpr, TOKENS: tl.constexpr,
    HIDDEN: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """GELU(a) and dZ, (2,size,hidden), of which dW₂ is a product, and the gradient of ac."""
    t, s = tl.program_id(0) // 2 * TOKENS + tl.arange(0, TOKENS), tl.program_id(0) % 2
    h, m, width = tl.arange(0, H), tl.arange(0, HIDDEN), (2 * RANK + 1) * heads
    place = _at_side(t // length, s, t % length, width, length)[:, None] + h[None, :]
    inside, known = (t < size)[:, None] & (h < heads)[None, :], (t < size)[:, None] & (m < hidden)[None, :]
    y, slope = _activate(ac, t, s, size, hidden, heads, TOKENS, HIDDEN)
    flat = (s * size + t[:, None]) * hidden
    tl.store(active + flat + m[None, :], y, mask=known)
    back = tl.zeros((TOKENS, HIDDEN), dtype=tl.float32)
    for rank in tl.static_range(2 * RANK):
        matrix = _load_rank(w, s, rank, hidden, heads, HIDDEN, H, T)
        d = tl.load(grad + place + rank * heads, mask=inside, other=0.0).to(tl.float32)
        if rank < RANK:
            z = tl.dot(y.to(T), matrix, input_precision="ieee")
            inverse = tl.rsqrt(tl.sum(z * z, 1) / heads + EPS)[:, None]
            z *= inverse
            d = inverse * (d - z * (tl.sum(d * z, 1) / heads)[:, None])
        tl.store(dz + flat + rank * heads + h[None, :], d, mask=inside)
        back += tl.dot(d.to(T), tl.trans(matrix), input_precision="ieee")
    row = t[:, None] * (2 * hidden + 2 * heads)
    tl.store(dac + row + s * hidden + m[None, :], back * slope, mask=known)
    g = tl.load(side + place + 2 * RANK * heads, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + place + 2 * RANK * heads, mask=inside, other=0.0).to(tl.float32)
    tl.store(dac + row + 2 * hidden + s * heads + h[None, :], d * (1.0 - g * g), mask=inside)


@operator("attnlab::derive_heads")
def derive_heads(x: Tensor, w1: Tensor, w2: Tensor, wg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (b,n,e), W₁ (2·hidden,e), W₂ (2,hidden,hidden), W_g (2·h,e) -> u, w and g, (b,2,n,(2·rank+1)·h).

    Then what the backward pass reads: [a, c] and [W₁; W_g].
    """
    (b, n, _), numbers, tile, joined = x.shape, *_describe(w2, wg), torch.cat([w1, wg])
    ac, side = torch.mm(x.flatten(0, 1), joined.t()), x.new_empty(b, 2, n, w2.shape[1] + wg.shape[0] // 2)
    with select_device(x):
        _make_sides[(2 * divide_up(b * n, TOKENS),)](ac, w2, side, b * n, n, *numbers, **tile)
    return side, ac, joined


@operator("attnlab::derive_heads_backward")
def derive_heads_backward(
    grad: Tensor, x: Tensor, w2: Tensor, side: Tensor, ac: Tensor, joined: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of W₁ and W_g together, and of W₂."""
    (b, n, _), numbers, tile = x.shape, *_describe(w2, joined[2 * w2.shape[1] :])
    active, dz = ac.new_empty(2, b * n, w2.shape[1]), ac.new_empty(2, b * n, w2.shape[1])
    dac = ac.new_empty(ac.shape)
    with select_device(x):
        grid = (2 * divide_up(b * n, TOKENS),)
        _make_sides_backward[grid](ac, w2, side, grad.contiguous(), active, dz, dac, b * n, n, *numbers, **tile)
    return torch.mm(dac, joined).view(x.shape), torch.mm(dac.t(), x.flatten(0, 1)), torch.bmm(active.mT, dz)


def _describe(w2: Tensor, wg: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    hidden, heads = w2.shape[1], wg.shape[0] // 2
    sizes = {"RANK": hidden // (2 * heads), "TOKENS": TOKENS, "HIDDEN": round_up(hidden), "H": round_up(heads)}
    return (hidden, heads), sizes | {"T": TYPES[w2.dtype]}


def find_side_gap(x: Tensor, w2: Tensor) -> str | None:
    """Name what keeps the kernels from deriving sides from x, or return None."""
    if gap := find_device_gap(x):
        return gap
    if torch.is_autocast_enabled(x.device.type):
        return "autocast, which would give the products a type that their gradients do not have"
    if x.dtype not in TYPES or x.dtype != w2.dtype:
        return f"x in {x.dtype} with weights in {w2.dtype}"
    return f"{w2.shape[1]} hidden units (at most {MOST})" if w2.shape[1] > MOST else None


@triton.jit
def _read_token(side, place, part, heads, inside):
    return tl.load(side + place + part * heads, mask=inside, other=0.0).to(tl.float32)


@remember_calls
@triton.jit(do_not_specialize=("size", "others", "length", "other_length"))
def _make_matrices(
    query, key, base, of_query, of_key, size, others, length, other_length, heads, RANK: tl.constexpr,
    TOKENS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """M of TOKENS queries, then those of the keys, which have no base. size, others: number of queries and keys."""
    programs = 2 * tl.cdiv(size, TOKENS)
    if tl.program_id(0) < programs:
        _fill_matrices(query, base, of_query, tl.program_id(0), size, length, heads, True, RANK, TOKENS, H)
    else:
        program = tl.program_id(0) - programs
        _fill_matrices(key, base, of_key, program, others, other_length, heads, False, RANK, TOKENS, H)


@triton.jit
def _fill_matrices(
    side, base, out, program, size, length, heads, BASED: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    t, s, h = program // 2 * TOKENS + tl.arange(0, TOKENS), program % 2, tl.arange(0, H)
    place = _at_side(t // length, s, t % length, (2 * RANK + 1) * heads, length)[:, None] + h[None, :]
    inside = (t < size)[:, None] & (h < heads)[None, :]
    square = (h < heads)[:, None] & (h < heads)[None, :]
    at = h[:, None] * heads + h[None, :]
    gate = _read_token(side, place, 2 * RANK, heads, inside)
    m = tl.where((h[:, None] == h[None, :])[None, :, :], gate[:, :, None], 0.0)
    if BASED:
        m += tl.load(base + s * heads * heads + at, mask=square, other=0.0).to(tl.float32)[None, :, :]
    for rank in tl.static_range(RANK):
        u = _read_token(side, place, rank, heads, inside)
        m += u[:, :, None] * _read_token(side, place, RANK + rank, heads, inside)[:, None, :]
    where = (s * size + t).to(tl.int64)[:, None, None] * heads * heads + at[None, :, :]
    tl.store(out + where, m, mask=(t < size)[:, None, None] & square[None, :, :])


@remember_calls
@triton.jit(do_not_specialize=("size", "others", "length", "other_length"))
def _make_matrices_backward(
    query, key, of_query, of_key, dquery, dkey, parts, size, others, length, other_length, heads, RANK: tl.constexpr,
    TOKENS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    programs = 2 * tl.cdiv(size, TOKENS)
    if tl.program_id(0) < programs:
        _differentiate(query, of_query, dquery, parts, tl.program_id(0), size, length, heads, True, RANK, TOKENS, H)
    else:
        program = tl.program_id(0) - programs
        _differentiate(key, of_key, dkey, parts, program, others, other_length, heads, False, RANK, TOKENS, H)


@triton.jit
def _differentiate(
    side, grad, dside, parts, program, size, length, heads, BASED: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """The gradients of u, w and g of some tokens, and the sum of those of M."""
    t, s, h = program // 2 * TOKENS + tl.arange(0, TOKENS), program % 2, tl.arange(0, H)
    place = _at_side(t // length, s, t % length, (2 * RANK + 1) * heads, length)[:, None] + h[None, :]
    inside = (t < size)[:, None] & (h < heads)[None, :]
    square = (h < heads)[:, None] & (h < heads)[None, :]
    at = h[:, None] * heads + h[None, :]
    where = (s * size + t).to(tl.int64)[:, None, None] * heads * heads + at[None, :, :]
    d = tl.load(grad + where, mask=(t < size)[:, None, None] & square[None, :, :], other=0.0).to(tl.float32)
    for rank in tl.static_range(RANK):
        u = _read_token(side, place, rank, heads, inside)
        w = _read_token(side, place, RANK + rank, heads, inside)
        tl.store(dside + place + rank * heads, tl.sum(d * w[:, None, :], 2), mask=inside)
        tl.store(dside + place + (RANK + rank) * heads, tl.sum(d * u[:, :, None], 1), mask=inside)
    own = tl.sum(tl.where((h[:, None] == h[None, :])[None, :, :], d, 0.0), 2)
    tl.store(dside + place + 2 * RANK * heads, own, mask=inside)
    if BASED:
        tl.store(parts + program * heads * heads + at, tl.sum(d, 0), mask=square)  # of S and P, in turn


@operator("attnlab::make_matrices")
def make_matrices(query: Tensor, key: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """u, w and g of queries and keys, (b,2,·,(2·rank+1)·h), and W_b (2,h,h) -> matrices (2,b,·,h,h) of both."""
    numbers, tile, programs = _describe_tokens(query, key, base)
    of_query, of_key = _allocate(query, key, base)
    with select_device(query):
        _make_matrices[(sum(programs),)](query, key, base, of_query, of_key, *numbers, **tile)
    return of_query, of_key


@operator("attnlab::make_matrices_backward")
def make_matrices_backward(
    of_query: Tensor, of_key: Tensor, query: Tensor, key: Tensor, base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and base from those of the matrices."""
    numbers, tile, programs = _describe_tokens(query, key, base)
    dquery, dkey = query.new_empty(query.shape), key.new_empty(key.shape)
    parts = base.new_empty((programs[0] // 2, *base.shape), dtype=torch.float32)
    given = (query, key, of_query.contiguous(), of_key.contiguous())
    with select_device(query):
        _make_matrices_backward[(sum(programs),)](*given, dquery, dkey, parts, *numbers, **tile)
    return dquery, dkey, parts.sum(0).to(base.dtype)


def _describe_tokens(query: Tensor, key: Tensor, base: Tensor) -> tuple[tuple[int, ...], dict[str, int], list[int]]:
    """Numbers, constants, and the programs of queries and of keys."""
    heads, sizes = base.shape[1], [x.shape[0] * x.shape[2] for x in (query, key)]
    tile = {"RANK": (query.shape[3] // heads - 1) // 2, "TOKENS": TOKENS, "H": round_up(heads)}
    numbers = (*sizes, query.shape[2], key.shape[2], heads)
    return numbers, tile, [2 * divide_up(size, TOKENS) for size in sizes]


def _allocate(query: Tensor, key: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    of_query, of_key = (x.new_empty((2, x.shape[0], x.shape[2], *base.shape[1:])) for x in (query, key))
    return of_query, of_key


@derive_heads.register_fake
def _(x: Tensor, w1: Tensor, w2: Tensor, wg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (b, n, e), width = x.shape, w1.shape[0] + wg.shape[0]
    return x.new_empty(b, 2, n, w2.shape[1] + wg.shape[0] // 2), x.new_empty(b * n, width), w1.new_empty(width, e)


@derive_heads_backward.register_fake
def _(grad: Tensor, x: Tensor, w2: Tensor, side: Tensor, ac: Tensor, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), joined.new_empty(joined.shape), w2.new_empty(w2.shape)


@make_matrices.register_fake
def _(query: Tensor, key: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    return _allocate(query, key, base)


@make_matrices_backward.register_fake
def _(of_query: Tensor, of_key: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given)


def _save_derived(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], inputs[2], *output)


def _differentiate_sides(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, ...]:
    refuse_second_derivative()
    dx, djoined, dw2 = derive_heads_backward(grad, *ctx.saved_tensors)
    inward = 2 * dw2.shape[1]
    return dx, djoined[:inward], dw2, djoined[inward:]


def _save_sides(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_matrices(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor, ...]:
    refuse_second_derivative()
    made: tuple[Tensor, ...] = make_matrices_backward(of_query, of_key, *ctx.saved_tensors)
    return made


derive_heads.register_autograd(_differentiate_sides, setup_context=_save_derived)
make_matrices.register_autograd(_differentiate_matrices, setup_context=_save_sides)
