"""Softmax attention over short rows: one program holds all queries and keys of a head at once.

    P = softmax(scale·QKᵀ) over visible keys      C = (P ∘ D) V           D: dropout's keep / (1 − rate)
    dV = (P ∘ D)ᵀ G        dP = (G Vᵀ) ∘ D        dS = P ∘ (dP − Σ_j P∘dP)        dQ = scale·dS K      dK = scale·dSᵀ Q

Sentences are shorter than flash attention's tiles, which are then mostly idle. Here only the inputs are stored for the
backward pass: it recomputes P, and dropout draws the same D from its seed. One program handles all query heads that
share a key head, so dK and dV are plain sums in a fixed order.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    empty_by_token,
    find_head_gap,
    note_launch,
    operator,
    remember_calls,
    round_up,
    select_device,
)
from attnlab.mechanisms.kernels.pairs import count_examples, draw_dropout, is_visible, read_mask
from attnlab.mechanisms.kernels.tiles import load_tile, write_tile

LONGEST = 64  # queries or keys
SIZES = [
    "heads",
    "rows",
    "keys",
    "each",
    "m_b",
    "m_i",
]  # one compiled kernel serves all of them


@triton.jit
def _weights(
    x, y, mask, seed, b, head, each, rows, keys, m_b, m_i, m_j, scale, rate,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """P and D of one head, (ROWS,KEYS) each; a row without visible keys is 0. each: heads with the same seed."""
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
    s = tl.where(seen, tl.dot(x, tl.trans(y), input_precision="ieee") * scale, float("-inf"))
    top = tl.max(s, 1)
    p = tl.exp(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(p, 1)
    p = p / tl.where(total == 0.0, 1.0, total)[:, None]
    kept = tl.full((ROWS, KEYS), 1.0, tl.float32)
    if DROPPED:
        quad = tl.arange(0, KEYS // 4)
        kept = draw_dropout(tl.load(seed + head // each), rate, head % each, i[:, None], quad[None, :])
    return p, kept


@remember_calls
@triton.jit(do_not_specialize=SIZES)
def _forward(
    q, k, v, mask, seed, out, heads, rows, keys, each, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d,
    m_b, m_i, m_j, scale, rate, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One query head."""
    program = tl.program_id(0).to(tl.int64)
    b, h = program // heads, program % heads
    g = h // SHARED
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    y = load_tile(k, b, g, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
    z = load_tile(v, b, g, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    p, kept = _weights(
        x, y, mask, seed, b, program, each, rows, keys, m_b, m_i, m_j, scale, rate, MASKED, CAUSAL, DROPPED, ROWS, KEYS
    )
    write_tile(out, tl.dot((p * kept).to(z.dtype), z, input_precision="ieee"), b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=SIZES)
def _backward(
    q, k, v, mask, seed, grad, dq, dk, dv, heads, rows, keys, each, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One key head, and the query heads that share it."""
    program = tl.program_id(0).to(tl.int64)
    groups = heads // SHARED
    b, g = program // groups, program % groups
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    y = load_tile(k, b, g, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
    z = load_tile(v, b, g, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    sum_k = tl.zeros((KEYS, WIDE), dtype=tl.float32)
    sum_v = tl.zeros((KEYS, WIDE), dtype=tl.float32)
    for n in range(SHARED):
        h = g * SHARED + n
        x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
        c = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
        head = b * heads + h
        p, kept = _weights(
            x, y, mask, seed, b, head, each, rows, keys, m_b, m_i, m_j, scale, rate, MASKED, CAUSAL, DROPPED, ROWS, KEYS
        )
        sum_v += tl.dot(tl.trans((p * kept).to(c.dtype)), c, input_precision="ieee")
        dp = tl.dot(c, tl.trans(z), input_precision="ieee") * kept
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(x.dtype)
        write_tile(dq, tl.dot(ds, y, input_precision="ieee"), b, h, i, heads, rows, D, WIDE)
        sum_k += tl.dot(tl.trans(ds), x, input_precision="ieee")
    write_tile(dk, sum_k, b, g, j, groups, keys, D, WIDE)
    write_tile(dv, sum_v, b, g, j, groups, keys, D, WIDE)


@operator("attnlab::short_softmax")
def short_softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, causal: bool, scale: float, rate: float
) -> Tensor:
    """Context (b,h,i,d) of q (b,h,i,d), k and v (b,g,j,d); mask bool, broadcastable to (b,1,i,j).

    seed   of dropout: one number (), or one for each member (s,), whose examples come one after another; or None
    """
    note_launch("softmax")
    out, seen = empty_by_token(q), read_mask(mask, causal, q, k)
    strides = (*q.stride(), *k.stride(), *v.stride(), *seen.strides)
    with select_device(q):
        _forward[(q.shape[0] * q.shape[1],)](
            q, k, v, seen.mask, q if seed is None else seed, out, q.shape[1], q.shape[2], k.shape[2],
            q.shape[1] * count_examples(len(q), seed), *strides, scale, rate, DROPPED=seed is not None, **seen.flags,
            **_tile(q, k),
        )  # fmt: skip
    return out


@operator("attnlab::short_softmax_backward")
def short_softmax_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None,
    causal: bool, scale: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV."""
    dq, dk, dv = empty_by_token(q), empty_by_token(k), empty_by_token(v)
    seen = read_mask(mask, causal, q, k)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), *seen.strides)
    with select_device(q):
        _backward[(k.shape[0] * k.shape[1],)](
            q, k, v, seen.mask, q if seed is None else seed, grad, dq, dk, dv, q.shape[1], q.shape[2], k.shape[2],
            q.shape[1] * count_examples(len(q), seed), *strides, scale, rate, DROPPED=seed is not None, **seen.flags,
            **_tile(q, k),
        )  # fmt: skip
    return dq, dk, dv


@short_softmax.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return empty_by_token(q)


@short_softmax_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_token(q), empty_by_token(k), empty_by_token(v)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, seed, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, mask, seed)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *short_softmax_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


short_softmax.register_autograd(_gradients, setup_context=_save_inputs)


def find_gap(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Name what this kernel does not cover, or return None."""
    if gap := find_head_gap(q):
        return gap
    if max(q.shape[2], k.shape[2]) > LONGEST:
        return f"rows longer than {LONGEST}"
    return None if v.shape[3] == q.shape[3] else f"head_dim={q.shape[3]} with values of {v.shape[3]}"


def _tile(q: Tensor, k: Tensor) -> dict[str, int]:
    rows, keys, wide = (round_up(n) for n in (q.shape[2], k.shape[2], q.shape[3]))
    return {"ROWS": rows, "KEYS": keys, "D": q.shape[3], "WIDE": wide, "SHARED": q.shape[1] // k.shape[1]}
