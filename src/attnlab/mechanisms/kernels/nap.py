"""The rows of normalized attention pooling (NAP), whose weights need two numbers of each row before the first is known.

    forward    μ = mean s, σ = std s, at least 10⁻⁶        z = (s − μ) / (σ + ε)        weights g z + c
    backward   dS = g / (σ + ε) · (dP − m − z e)           m = mean (dP − z e)    e = Σ z dP · (σ + ε) / (n σ)
               dg = Σ z dP, dc = Σ dP over the rows of a head

All over the n visible keys of a row; e = 0 where σ is at its least. The kernels here find the numbers of the rows, and
those of `online.py` and `one_pass.py` do the rest. Statistics of tiles are merged as by Chan et al. 1979, so that a
large mean costs the variance no digits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, remember_calls, select_device
from attnlab.mechanisms.kernels.online import NAP, PARTS, hide, read_part, standardize
from attnlab.mechanisms.kernels.pairs import Bias, Visibility, add_bias, draw_dropout, is_visible, last_key, whole_keys
from attnlab.mechanisms.kernels.tiles import choose_pass_tile, load_tile, locate_tile, score_tile

LEAST = tl.constexpr(1e-12)  # variance


@triton.jit
def _write_parts(x, head, i, rows, first, second, third, fourth):
    """Store four numbers of each row i of x (b,h,PARTS,i)."""
    place = x + head * PARTS * rows + i
    tl.store(place, first, mask=i < rows)
    tl.store(place + rows, second, mask=i < rows)
    tl.store(place + 2 * rows, third, mask=i < rows)
    tl.store(place + 3 * rows, fourth, mask=i < rows)


@remember_calls
@triton.jit
def _measure(
    q, k, mask, bias, lse, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, m_b, m_i, m_j, a_b, a_h, a_i,
    a_j, scale, eps, BIAS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """μ, 1/(σ + ε), n σ/(σ + ε) and n of BI queries of one head. The third is ∞ where σ is at its least."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    i = first + tl.arange(0, BI)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    mean = tl.zeros((BI,), dtype=tl.float32)
    squares, count = mean, mean
    whole = whole_keys(first, rows, keys, CAUSAL, BJ)
    for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
        start, end = (whole, last_key(first + BI, rows, keys, CAUSAL)) if part else (0, whole)
        for left in range(start, end, BJ):
            j = left + tl.arange(0, BJ)
            y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            s = score_tile(x, y, x, b, h, i, left, rows, keys, scale, 0, False, CAUSAL, BJ)
            s = add_bias(s, bias, b, h, first, i, j, rows, keys, a_b, a_h, a_i, a_j, BIAS, 1.0)
            seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL, part == 0)
            s, seen = hide(s, seen, NAP, BIAS)
            more = tl.sum(tl.where(seen, 1.0, 0.0 * s), 1)  # 0.0 * s: in the registers that hold s
            middle = tl.sum(s, 1) / tl.maximum(more, 1.0)
            away = tl.where(seen, s - middle[:, None], 0.0)
            former, count = count, count + more
            step, share = middle - mean, more / tl.maximum(count, 1.0)
            squares += tl.sum(away * away, 1) + step * step * former * share
            mean += step * share
    variance = squares / tl.maximum(count, 1.0)
    deviation = tl.sqrt(tl.maximum(variance, LEAST))
    inverse = 1.0 / (deviation + eps)
    pull = tl.where(variance > LEAST, count * deviation * inverse, float("inf"))
    _write_parts(lse, head, i, rows, mean, inverse, pull, count)


@remember_calls
@triton.jit
def _measure_slopes(
    q, k, v, mask, bias, dropping, grad, lse, delta, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, v_b,
    v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, a_b, a_h, a_i, a_j, scale, rate, BIAS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr,
    BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """m, e, Σ z dP and Σ dP of BI queries of one head."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    i = first + tl.arange(0, BI)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    c = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
    mean, inverse = read_part(lse, 0, head, i, rows), read_part(lse, 1, head, i, rows)
    plain = tl.zeros((BI,), dtype=tl.float32)
    moment, rest = plain, plain  # rest: Σ z, not quite 0, so that Σ dS is, whatever the keys have in common
    whole = whole_keys(first, rows, keys, CAUSAL, BJ)
    for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
        start, end = (whole, last_key(first + BI, rows, keys, CAUSAL)) if part else (0, whole)
        for left in range(start, end, BJ):
            j = left + tl.arange(0, BJ)
            y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            z = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            s = score_tile(x, y, x, b, h, i, left, rows, keys, scale, 0, False, CAUSAL, BJ)
            s = add_bias(s, bias, b, h, first, i, j, rows, keys, a_b, a_h, a_i, a_j, BIAS, 1.0)
            seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL, part == 0)
            s, seen = hide(s, seen, NAP, BIAS)
            dp = tl.where(seen, tl.dot(c, tl.trans(z), input_precision="ieee"), 0.0)
            if DROPPED:
                dp *= draw_dropout(
                    tl.load(dropping), rate, head, i[:, None], (left // 4 + tl.arange(0, BJ // 4))[None, :]
                )
            s = tl.where(seen, standardize(s, mean, inverse), 0.0)
            plain += tl.sum(dp, 1)
            moment += tl.sum(s * dp, 1)
            rest += tl.sum(s, 1)
    pull, count = read_part(lse, 2, head, i, rows), read_part(lse, 3, head, i, rows)
    pull = moment / tl.where(pull > 0.0, pull, 1.0)  # 0 in rows without keys
    _write_parts(delta, head, i, rows, (plain - pull * rest) / tl.maximum(count, 1.0), pull, moment, plain)


def measure_rows(q: Tensor, k: Tensor, seen: Visibility, bias: Bias, lse: Tensor, scale: float, eps: float) -> None:
    """Write the numbers of the rows, lse (b,h,PARTS,i), which the weights need."""
    (b, h, i, _), tile = q.shape, choose_pass_tile(q, "forward")
    strides = (*q.stride(), *k.stride(), *seen.strides, *bias.strides)
    with select_device(q):
        _measure[(b * h * divide_up(i, tile["BI"]),)](
            q, k, seen.mask, bias.values, lse, h, i, k.shape[2], *strides, scale, eps, BIAS=bias.kind,
            SHARED=h // k.shape[1], **seen.flags, **tile,
        )  # fmt: skip


def measure_slopes(
    q: Tensor, k: Tensor, v: Tensor, seen: Visibility, bias: Bias, dropping: Tensor | None, grad: Tensor, lse: Tensor,
    scale: float, rate: float,
) -> Tensor:  # fmt: skip
    """The numbers of the rows that the backward pass needs, (b,h,PARTS,i), from those of the forward pass."""
    (b, h, i, _), tile, delta = q.shape, choose_pass_tile(q, "queries"), torch.empty_like(lse)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), *seen.strides, *bias.strides)
    with select_device(q):
        _measure_slopes[(b * h * divide_up(i, tile["BI"]),)](
            q, k, v, seen.mask, bias.values, q if dropping is None else dropping, grad, lse, delta, h, i, k.shape[2],
            *strides, scale, rate, BIAS=bias.kind, DROPPED=dropping is not None, SHARED=h // k.shape[1], **seen.flags,
            **tile,
        )  # fmt: skip
    return delta
