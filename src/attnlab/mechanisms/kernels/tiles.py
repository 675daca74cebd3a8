"""Tiles of queries and keys of one head: how the kernels load, score and store them."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, find_device_gap, remember_calls, round_up, select_device
from attnlab.mechanisms.kernels.pairs import normals

WIDEST = 256  # head size
ANY_VALUE = ["heads", "rows", "layer", "each"]  # numbers for whose values, such as 1 or 16, nothing is compiled again
TYPES = (torch.float32, torch.float16, torch.bfloat16)
Work = Literal[
    "forward", "keys", "queries"
]  # of a kernel: the context, sums over queries (dK, dV), sums over keys (dQ)
USUAL: dict[Work, dict[str, int]] = {
    "forward": {"BI": 64, "BJ": 64, "num_warps": 4, "num_stages": 3},
    "keys": {"BI": 64, "BJ": 64, "num_warps": 4, "num_stages": 2},
    "queries": {"BI": 64, "BJ": 64, "num_warps": 4, "num_stages": 2},
}


@triton.jit
def load_tile(x, b, h, n, size, x_b, x_h, x_n, x_d, D: tl.constexpr, WIDE: tl.constexpr):
    """Load rows n of x (b,h,size,D), with any strides; 0 outside."""
    d = tl.arange(0, WIDE)
    inside = (n < size)[:, None] & (d < D)[None, :]
    return tl.load(x + b * x_b + h * x_h + n[:, None] * x_n + d[None, :] * x_d, mask=inside, other=0.0)


@triton.jit
def write_tile(x, value, b, h, n, heads, size, D: tl.constexpr, WIDE: tl.constexpr):
    """Store rows n of an x with the memory layout (b,size,h,D)."""
    d = tl.arange(0, WIDE)
    inside = (n < size)[:, None] & (d < D)[None, :]
    tl.store(x + ((b * size + n[:, None]) * heads + h) * D + d[None, :], value, mask=inside)


@triton.jit
def score_tile(
    x, y, seed, b, h, i, left, rows, keys, scale, layer, NOISY: tl.constexpr, CAUSAL: tl.constexpr, BJ: tl.constexpr,
    UNIT: tl.constexpr = 1.0,
):  # fmt: skip
    """UNIT·(scale·x yᵀ + ε) of queries i and the BJ keys from `left` on, in float32."""
    z = tl.dot(x, tl.trans(y), input_precision="ieee") * (scale * UNIT)
    if NOISY:
        at, quad = i, left // 4 + tl.arange(0, BJ // 4)
        if CAUSAL:
            at = i + (keys - rows)
        z += normals(tl.load(seed), layer, b, h, at[:, None], quad[None, :]) * UNIT
    return z


@triton.jit
def locate_tile(tiles, heads):
    """The place of a program with one of `tiles` tiles of one head: the head in the batch, tile, example and head."""
    head = (tl.program_id(0) // tiles).to(tl.int64)
    return head, tl.program_id(0) % tiles, head // heads, head % heads


@triton.jit
def store_delta(
    grad, context, delta, head, b, h, i, heads, rows, g_b, g_h, g_i, g_d, D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Store δ = Σ_d grad ∘ context of queries i of one head; context has the memory layout (b,i,h,d)."""
    g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE).to(tl.float32)
    o = load_tile(context, b, h, i, rows, rows * heads * D, D, heads * D, 1, D, WIDE).to(tl.float32)
    tl.store(delta + head * rows + i, tl.sum(g * o, 1), mask=i < rows)


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _delta(grad, out, delta, heads, rows, g_b, g_h, g_i, g_d, BI: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    head, tile, b, h = locate_tile(tl.cdiv(rows, BI), heads)
    i = tile * BI + tl.arange(0, BI)
    store_delta(grad, out, delta, head, b, h, i, heads, rows, g_b, g_h, g_i, g_d, D, WIDE)


def compute_delta(grad: Tensor, out: Tensor, delta: Tensor | None = None) -> Tensor:
    """δ = Σ_d grad ∘ out, (b,h,i); out has the memory layout (b,i,h,d). delta: where to write it."""
    b, h, i, _ = out.shape
    delta, tile = out.new_empty(b, h, i, dtype=torch.float32) if delta is None else delta, choose_tile(out)
    sizes = {name: tile[name] for name in ("BI", "D", "WIDE")}
    with select_device(out):
        _delta[(b * h * divide_up(i, tile["BI"]),)](grad, out, delta, h, i, *grad.stride(), **sizes)
    return delta


def find_tile_gap(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Name what keeps q, k and v from being read by tiles, or return None."""
    if gap := find_device_gap(q):
        return gap
    if q.dtype not in TYPES or not q.dtype == k.dtype == v.dtype:
        return f"q, k, v in {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[2] * k.shape[2] >= 2**31 or max(x.shape[2] * x.stride(2) for x in (q, k, v)) >= 2**31:
        return f"{q.shape[2]:,} queries on {k.shape[2]:,} keys, whose offsets exceed 31 bits"
    if q.shape[3] > WIDEST or v.shape[3] != q.shape[3]:
        return f"head_dim={q.shape[3]} with values of {v.shape[3]} (at most {WIDEST}, and equal)"
    return None


def choose_tile(x: Tensor, *, backward: bool = False) -> dict[str, Any]:
    """Queries and keys of a tile, and its launch options: more warps where it keeps more in registers."""
    d, single = x.shape[3], x.dtype == torch.float32
    side = 32 if single or d > 128 else 64
    sizes = {"BI": side, "BJ": side, "D": d, "WIDE": round_up(d)}
    if not backward:
        few = {"BI": 16} if x.shape[2] <= 16 else {}  # as in decoding
        return sizes | few | {"num_warps": 4}
    return sizes | {"num_warps": 8 if single or d > 64 else 4, "num_stages": 1 if single else 2}


def choose_pass_tile(x: Tensor, work: Work) -> dict[str, Any]:
    """The tile of a kernel in one_pass.py or nap.py, with options of its own for the usual heads, in half precision."""
    tile = choose_tile(x, backward=work != "forward")
    usual = x.dtype != torch.float32 and x.shape[2] > 16 and x.shape[3] <= 64
    return tile | USUAL[work] if usual else tile


def choose_logits_tile(x: Tensor, *, aligned: bool) -> dict[str, Any]:
    """The tile of a forward pass with logits in memory: narrower if their addresses would fill the registers."""
    tile = choose_pass_tile(x, "forward")
    return tile if aligned else tile | {"BJ": 32}
