"""The norms of `contribution.py` as Triton kernels, each map in one pass over the weights.

    vector   a program has a tile of keys of one head; it computes f(x_j) a few columns at a time and sums the squares
    head     |α|·size
    layer    a program has a tile of queries and keys and loops over every two heads; weights come from the cache again

Products of float32 are split into three of tf32, accurate to about 1e-6. Sums are in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import find_device_gap, select_device

KEYS = 32  # in a tile of f
COLUMNS = {16: 64, 32: 64, 64: 64, 128: 32, 256: 16}  # in that tile, by head size: fits the memory of a small GPU
QUERIES, ACROSS = 32, 32  # queries and keys in a tile of the maps


@triton.jit
def _vector(
    values, projection, out, heads, keys, depth, width, v_b, v_h, v_j, v_d, p_h, p_d, p_e,
    tile: tl.constexpr, padded: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Store ‖v_hj W_h‖. It has many parameters: Triton takes sizes and strides separately."""
    parts = tl.cdiv(keys, tile)
    program = tl.program_id(0).to(tl.int64)
    b, h = program // parts // heads, program // parts % heads
    j, d = program % parts * tile + tl.arange(0, tile), tl.arange(0, padded)
    own = values + b * v_b + h * v_h + j[:, None] * v_j + d[None, :].to(tl.int64) * v_d
    v = tl.load(own, mask=(j < keys)[:, None] & (d < depth)[None, :], other=0.0).to(tl.float32)
    square = tl.zeros((tile,), dtype=tl.float32)
    for start in range(0, width, columns):
        e = start + tl.arange(0, columns)
        there = projection + h * p_h + d[:, None].to(tl.int64) * p_d + e[None, :].to(tl.int64) * p_e
        w = tl.load(there, mask=(d < depth)[:, None] & (e < width)[None, :], other=0.0).to(tl.float32)
        f = tl.dot(v, w, input_precision="tf32x3")
        square += tl.sum(f * f, 1)
    tl.store(out + (b * heads + h) * keys + j, tl.sqrt(square), mask=j < keys)


@triton.jit
def _tile(keys, queries, rows: tl.constexpr, across: tl.constexpr):
    """Return the tile of a program: the index of its map, its queries and its keys."""
    down, right = tl.cdiv(queries, rows), tl.cdiv(keys, across)
    program = tl.program_id(0).to(tl.int64)
    i = program // right % down * rows + tl.arange(0, rows)
    return program // right // down, i, program % right * across + tl.arange(0, across)


@triton.jit
def _head(
    weights, size, out, heads, queries, keys, w_b, w_h, w_i, w_j, s_b, s_h, s_j, o_b, o_h, o_i, o_j,
    rows: tl.constexpr, across: tl.constexpr,
):  # fmt: skip
    """Store |α_hij|·size_hj. It has many parameters: Triton takes sizes and strides separately."""
    number, i, j = _tile(keys, queries, rows, across)
    b, h = number // heads, number % heads
    inside = (i < queries)[:, None] & (j < keys)[None, :]
    own = tl.load(size + b * s_b + h * s_h + j * s_j, mask=j < keys, other=0.0)
    alpha = tl.load(weights + b * w_b + h * w_h + i[:, None] * w_i + j[None, :] * w_j, mask=inside, other=0.0)
    tl.store(
        out + b * o_b + h * o_h + i[:, None] * o_i + j[None, :] * o_j, tl.abs(alpha.to(tl.float32)) * own[None, :],
        mask=inside,
    )  # fmt: skip


@triton.jit
def _layer(
    weights, gram, out, heads, queries, keys, w_b, w_h, w_i, w_j, o_b, o_i, o_j,
    rows: tl.constexpr, across: tl.constexpr,
):  # fmt: skip
    """Store √(α_ijᵀ G_j α_ij). It has many parameters: Triton takes sizes and strides separately."""
    b, i, j = _tile(keys, queries, rows, across)
    inside = (i < queries)[:, None] & (j < keys)[None, :]
    own = weights + b * w_b + i[:, None] * w_i + j[None, :] * w_j
    square = tl.zeros((rows, across), dtype=tl.float32)
    for h in range(heads):
        products = gram + ((b * heads + h) * heads) * keys + j
        alpha = tl.load(own + h * w_h, mask=inside, other=0.0).to(tl.float32)
        # every two heads once: half of the product of a head with itself, all of its products with earlier heads
        other = 0.5 * tl.load(products + h * keys, mask=j < keys, other=0.0)[None, :] * alpha
        for g in range(h):
            beside = tl.load(own + g * w_h, mask=inside, other=0.0).to(tl.float32)
            other += tl.load(products + g * keys, mask=j < keys, other=0.0)[None, :] * beside
        square += alpha * other
    found = tl.where(square < 0.0, 0.0, 2.0 * square)  # keeps NaN
    tl.store(out + b * o_b + i[:, None] * o_i + j[None, :] * o_j, tl.sqrt(found), mask=inside)


def vector(values: Tensor, projection: Tensor) -> Tensor:
    """Compute ‖v_hj W_h‖ (b,h,j) from values (b,h,j,d) and W (h,d,e)."""
    b, h, j, d = values.shape
    out = values.new_empty(b, h, j, dtype=torch.float32)
    padded = max(16, triton.next_power_of_2(d))
    with select_device(values):
        _vector[(b * h * triton.cdiv(j, KEYS),)](
            values, projection, out, h, j, d, projection.shape[2], *values.stride(), *projection.stride(),
            tile=KEYS, padded=padded, columns=COLUMNS[padded],
        )  # fmt: skip
    return out


def head(weights: Tensor, size: Tensor, out: Tensor) -> None:
    """Write |α_hij|·size_hj to out (b,h,i,j)."""
    b, h, i, j = weights.shape
    with select_device(weights):
        _head[(b * h * triton.cdiv(i, QUERIES) * triton.cdiv(j, ACROSS),)](
            weights, size, out, h, i, j, *weights.stride(), *size.stride(), *out.stride(), rows=QUERIES, across=ACROSS
        )


def layer(weights: Tensor, gram: Tensor, out: Tensor) -> None:
    """Write √(α_ijᵀ G_j α_ij) to out (b,i,j), given a contiguous G (b,h,h,j)."""
    b, h, i, j = weights.shape
    with select_device(weights):
        _layer[(b * triton.cdiv(i, QUERIES) * triton.cdiv(j, ACROSS),)](
            weights, gram, out, h, i, j, *weights.stride(), *out.stride(), rows=QUERIES, across=ACROSS
        )


def find_gap(values: Tensor, *others: Tensor) -> str | None:
    """Return why these kernels do not support a layer with values (b,h,j,d) and other tensors, or None."""
    if values.shape[-1] > max(COLUMNS):
        return f"a head size of {values.shape[-1]}"
    for each in (values, *others):
        if gap := find_tensor_gap(each):
            return gap
        if each.requires_grad and torch.is_grad_enabled():
            return "gradients"
    return None


def find_tensor_gap(x: Tensor) -> str | None:
    """Return why no kernel of an analysis supports a tensor, or None."""
    if gap := find_device_gap(x):
        return gap
    if torch.version.hip:
        return "AMD GPUs"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return str(x.dtype)
    return None if x.numel() else "an empty tensor"
