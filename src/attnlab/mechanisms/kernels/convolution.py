"""The convolution of multi-token attention over queries and keys of logits in memory, and its gradients.

    Z_ij = Σ_mn θ_mn Ŝ_{i+m−M+1, j+n−N/2}      Ŝ = S where visible, else 0      θ (M,N), one for each head
    dS_ij = Σ_mn θ_mn dZ_{i−m+M−1, j−n+N/2} where visible, else 0      dθ_mn = Σ_ij dZ_ij Ŝ_{i+m−M+1, j+n−N/2}

Along the keys it is a product of a window of keys and a band matrix of θ's row m, on tensor cores; along the queries
it is a sum of M such products. Windows begin at a multiple of 16 keys, so that loads are wide. S may have rows before
those of Z, which are the last. The gradient of θ comes in parts, which are summed in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, remember_calls, round_up, select_device
from attnlab.mechanisms.kernels.pairs import is_multiple_of_8, is_visible, last_key, mark_multiple_of_8, read_mask
from attnlab.mechanisms.kernels.tiles import locate_tile

ALIGNED = 16  # keys
PLAIN = ("heads", "rows", "keys", "former", "m_b")


@triton.jit
def _load_window(
    s, mask, head, b, i, w, rows, keys, m_b, m_i, m_j, MASKED: tl.constexpr, CAUSAL: tl.constexpr, HIDDEN: tl.constexpr
):  # fmt: skip
    """Rows i and keys w of one head, 0 outside and, if HIDDEN, where hidden."""
    inside = ((i >= 0) & (i < rows))[:, None] & ((w >= 0) & (w < keys))[None, :]
    x = tl.load(s + head * rows * keys + i[:, None] * keys + w[None, :], mask=inside, other=0.0)
    if HIDDEN:
        row, key = tl.maximum(i, 0)[:, None], tl.maximum(w, 0)[None, :]  # the mask has none before the first
        seen = is_visible(mask, b, row, key, rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
        x = tl.where(seen & inside, x, 0.0)
    return x


@triton.jit
def _multiply(
    s, theta, mask, head, b, h, i, j, w, rows, keys, former, m_b, m_i, m_j, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, TURNED: tl.constexpr, HIDDEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of Z, or of dS from dZ if TURNED; w: the keys of its window."""
    total = tl.zeros((i.shape[0], j.shape[0]), dtype=tl.float32)
    for m in tl.static_range(M):
        shift = (M - 1 - m) - former if TURNED else former + m - (M - 1)
        size = rows - former if TURNED else rows
        x = _load_window(s, mask, head, b, i + shift, w, size, keys, m_b, m_i, m_j, MASKED, CAUSAL, HIDDEN)
        n = (j[None, :] - w[:, None] if TURNED else w[:, None] - j[None, :]) + N // 2
        band = tl.load(theta + (h * M + m) * N + n, mask=(n >= 0) & (n < N), other=0.0)
        total = tl.dot(x, band.to(x.dtype), total, input_precision="ieee")
    return total


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _convolve(
    s, theta, mask, out, heads, rows, keys, former, m_b, m_i, m_j, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    TURNED: tl.constexpr, EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PAD: tl.constexpr, BI: tl.constexpr,
    BJ: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """One tile of Z, whose rows follow `former` rows of S; or of dS, from dZ, if TURNED. rows: of S."""
    keys = mark_multiple_of_8(keys, EVEN)
    own = rows if TURNED else rows - former  # of the result
    columns = tl.cdiv(keys, BJ)
    head, tile, b, h = locate_tile(tl.cdiv(own, BI) * columns, heads)
    top, left = tile // columns * BI, tile % columns * BJ
    i, j, w = top + tl.arange(0, BI), left + tl.arange(0, BJ), left - PAD + tl.arange(0, BW)
    place, inside = head * own * keys + i[:, None] * keys + j[None, :], (i < own)[:, None] & (j < keys)[None, :]
    if left < last_key(top + BI, own, keys, CAUSAL):
        if TURNED:
            total = _multiply(s, theta, mask, head, b, h, i, j, w, rows, keys, former, m_b, m_i, m_j, MASKED, CAUSAL,
                              True, False, M, N)  # fmt: skip
            seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
            tl.store(out + place, tl.where(seen, total, 0.0), mask=inside)
        elif MASKED or _sees_all(left - PAD + BW, top + former - (M - 1), rows, keys, CAUSAL) == 0:
            total = _multiply(s, theta, mask, head, b, h, i, j, w, rows, keys, former, m_b, m_i, m_j, MASKED, CAUSAL,
                              False, True, M, N)  # fmt: skip
            tl.store(out + place, total, mask=inside)
        else:
            total = _multiply(s, theta, mask, head, b, h, i, j, w, rows, keys, former, m_b, m_i, m_j, MASKED, CAUSAL,
                              False, False, M, N)  # fmt: skip
            tl.store(out + place, total, mask=inside)
    elif TURNED:
        tl.store(out + place, tl.zeros((BI, BJ), dtype=tl.float32), mask=inside)


@triton.jit
def _sees_all(end, first, rows, keys, CAUSAL: tl.constexpr):
    """Whether no key before `end` comes after a query from `first` on."""
    return (end <= first + (keys - rows) + 1) if CAUSAL else (end >= end)


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _differentiate(
    s, dz, mask, parts, heads, rows, keys, former, m_b, m_i, m_j, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PAD: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    """What BJ keys of one head add to row m of dθ, (b·tiles,h,M,N)."""
    keys = mark_multiple_of_8(keys, EVEN)
    tiles, own, m = tl.cdiv(keys, BJ), rows - former, tl.program_id(0) % M
    number = tl.program_id(0) // M
    tile, head = number % tiles, (number // tiles).to(tl.int64)
    b, h, left = head // heads, head % heads, tile * BJ
    j, w, shift = left + tl.arange(0, BJ), left - PAD + tl.arange(0, BW), former + m - (M - 1)
    total = tl.zeros((BJ, BW), dtype=tl.float32)
    start, whole = 0, 0  # the first tile of rows that sees these keys, and the first that sees the whole window
    if CAUSAL:
        start = tl.maximum(0, left - (keys - own)) // BI * BI
        whole = tl.cdiv(tl.maximum(0, left - PAD + BW - 1 - (keys - rows) - shift), BI) * BI
    if MASKED:
        whole = own
    whole = tl.maximum(start, tl.minimum(whole, tl.cdiv(own, BI) * BI))
    for part in tl.static_range(2):
        for top in range(whole if part else start, own if part else whole, BI):
            i = top + tl.arange(0, BI)
            x = _load_window(s, mask, head, b, i + shift, w, rows, keys, m_b, m_i, m_j, MASKED, CAUSAL, part == 0)
            g = _load_window(dz, mask, head, b, i, j, own, keys, m_b, m_i, m_j, MASKED, CAUSAL, False)
            total = tl.dot(tl.trans(g), x, total, input_precision="ieee")
    n = w[None, :] - j[:, None] + N // 2
    own_part = parts + (((b * tiles + tile) * heads + h) * M + m) * N
    for each in tl.static_range(N):
        tl.store(own_part + each, tl.sum(tl.sum(tl.where(n == each, total, 0.0), 1), 0))


def convolve(s: Tensor, theta: Tensor, mask: Tensor | None, causal: bool, former: int) -> Tensor:
    """Z (b,h,i,j) of S (b,h,former+i,j) and θ (h,M,N); hidden tiles stay unwritten. mask: of the rows of S."""
    b, h, i, j = s.shape
    out = s.new_empty(b, h, i - former, j)
    numbers, flags, tile = _describe(s, theta, mask, causal, former)
    with select_device(s):
        grid = (b * h * divide_up(i - former, tile["BI"]) * divide_up(j, tile["BJ"]),)
        _convolve[grid](*_point(s, theta, mask), out, *numbers, TURNED=False, **flags, **tile)
    return out


def convolve_backward(
    dz: Tensor, s: Tensor, theta: Tensor, mask: Tensor | None, causal: bool, former: int
) -> tuple[Tensor, Tensor]:
    """dS, 0 where hidden, and parts of dθ, (·,h,M,N) in float32, from dZ, which is 0 where hidden."""
    (b, h, i, j), ds = s.shape, torch.empty_like(s)
    numbers, flags, tile = _describe(s, theta, mask, causal, former)
    programs = b * divide_up(j, tile["BJ"])
    parts = s.new_empty((programs, *theta.shape), dtype=torch.float32)
    _, weights, seen = _point(s, theta, mask)
    with select_device(s):
        grid = (b * h * divide_up(i, tile["BI"]) * divide_up(j, tile["BJ"]),)
        _convolve[grid](dz, weights, seen, ds, *numbers, TURNED=True, **flags, **tile)
        _differentiate[(programs * h * theta.shape[1],)](s, dz, seen, parts, *numbers, **flags, **tile)
    return ds, parts


def _point(s: Tensor, theta: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return s, theta.contiguous(), s if mask is None else mask.view(torch.uint8)


def _describe(
    s: Tensor, theta: Tensor, mask: Tensor | None, causal: bool, former: int
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, int]]:
    """Numbers, flags, and the tile of the kernels."""
    (_, h, i, j), seen, (_, m, n) = s.shape, read_mask(mask, causal, s, s.mT), theta.shape
    half, even = s.dtype != torch.float32, is_multiple_of_8(j, seen.strides[0])
    wide, pad = 64 if half else 32, divide_up(n // 2, ALIGNED) * ALIGNED
    warps = 4 if half and even else 8  # else a thread has too few registers
    flags = {"EVEN": even, "M": m, "N": n, "PAD": pad}
    tile = {"BI": wide, "BJ": 32, "BW": round_up(pad + 32 + n // 2), "num_warps": warps}
    return (h, i, j, former, *seen.strides), flags | seen.flags, tile
