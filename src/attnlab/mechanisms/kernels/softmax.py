"""Softmax attention over short rows: one program holds all queries and keys of a head at once.

    P = softmax(scale·QKᵀ) over visible keys      C = (P ∘ D) V           D: dropout's keep / (1 − rate)
    dV = (P ∘ D)ᵀ G        dP = (G Vᵀ) ∘ D        dS = P ∘ (dP − Σ_j P∘dP)        dQ = scale·dS K      dK = scale·dSᵀ Q

Sentences are shorter than flash attention's tiles, which are then mostly idle. Here only the inputs are stored for the
backward pass: it recomputes P, and dropout draws the same D from its seed. One program handles all query heads that
share a key head, so dK and dV are plain sums in a fixed order.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import empty_by_token, is_mapped, note_launch, select_device

LONGEST = 64  # queries or keys
WIDEST = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}  # head size


@triton.jit
def _weights(
    x, y, mask, seed, b, head, rows, keys, m_b, m_i, m_j, scale, rate,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """P and D of one head, (ROWS,KEYS) each; a row without visible keys is 0."""
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    seen = (i < rows)[:, None] & (j < keys)[None, :]
    if MASKED:
        place = mask + b * m_b + i[:, None] * m_i + j[None, :] * m_j
        seen = seen & (tl.load(place, mask=seen, other=0) != 0)
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + (keys - rows))
    s = tl.where(seen, tl.dot(x, tl.trans(y), input_precision="ieee") * scale, float("-inf"))
    top = tl.max(s, 1)
    p = tl.exp(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(p, 1)
    p = p / tl.where(total == 0.0, 1.0, total)[:, None]
    kept = tl.full((ROWS, KEYS), 1.0, tl.float32)
    if DROPPED:
        draw = tl.rand(tl.load(seed), ((head * rows + i[:, None]) * keys + j[None, :]).to(tl.uint32))
        kept = tl.where(draw >= rate, 1.0 / (1.0 - rate), 0.0)
    return p, kept


@triton.jit
def _forward(
    q, k, v, mask, seed, out, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d,
    m_b, m_i, m_j, scale, rate, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One query head."""
    program = tl.program_id(0).to(tl.int64)
    b, h = program // heads, program % heads
    g = h // SHARED
    i, j, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDE)
    inside, behind = (i < rows)[:, None] & (d < D)[None, :], (j < keys)[:, None] & (d < D)[None, :]
    x = tl.load(q + b * q_b + h * q_h + i[:, None] * q_i + d[None, :] * q_d, mask=inside, other=0.0)
    y = tl.load(k + b * k_b + g * k_h + j[:, None] * k_j + d[None, :] * k_d, mask=behind, other=0.0)
    z = tl.load(v + b * v_b + g * v_h + j[:, None] * v_j + d[None, :] * v_d, mask=behind, other=0.0)
    p, kept = _weights(
        x, y, mask, seed, b, program, rows, keys, m_b, m_i, m_j, scale, rate, MASKED, CAUSAL, DROPPED, ROWS, KEYS
    )
    context = tl.dot((p * kept).to(z.dtype), z, input_precision="ieee")
    tl.store(out + ((b * rows + i[:, None]) * heads + h) * D + d[None, :], context.to(x.dtype), mask=inside)


@triton.jit
def _backward(
    q, k, v, mask, seed, grad, dq, dk, dv, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One key head, and the query heads that share it."""
    program = tl.program_id(0).to(tl.int64)
    groups = heads // SHARED
    b, g = program // groups, program % groups
    i, j, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDE)
    inside, behind = (i < rows)[:, None] & (d < D)[None, :], (j < keys)[:, None] & (d < D)[None, :]
    y = tl.load(k + b * k_b + g * k_h + j[:, None] * k_j + d[None, :] * k_d, mask=behind, other=0.0)
    z = tl.load(v + b * v_b + g * v_h + j[:, None] * v_j + d[None, :] * v_d, mask=behind, other=0.0)
    sum_k = tl.zeros((KEYS, WIDE), dtype=tl.float32)
    sum_v = tl.zeros((KEYS, WIDE), dtype=tl.float32)
    for n in range(SHARED):
        h = g * SHARED + n
        x = tl.load(q + b * q_b + h * q_h + i[:, None] * q_i + d[None, :] * q_d, mask=inside, other=0.0)
        c = tl.load(grad + b * g_b + h * g_h + i[:, None] * g_i + d[None, :] * g_d, mask=inside, other=0.0)
        head = b * heads + h
        p, kept = _weights(
            x, y, mask, seed, b, head, rows, keys, m_b, m_i, m_j, scale, rate, MASKED, CAUSAL, DROPPED, ROWS, KEYS
        )
        sum_v += tl.dot(tl.trans((p * kept).to(c.dtype)), c, input_precision="ieee")
        dp = tl.dot(c, tl.trans(z), input_precision="ieee") * kept
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(x.dtype)
        back = tl.dot(ds, y, input_precision="ieee")
        tl.store(dq + ((b * rows + i[:, None]) * heads + h) * D + d[None, :], back.to(x.dtype), mask=inside)
        sum_k += tl.dot(tl.trans(ds), x, input_precision="ieee")
    place = ((b * keys + j[:, None]) * groups + g) * D + d[None, :]
    tl.store(dk + place, sum_k.to(y.dtype), mask=behind)
    tl.store(dv + place, sum_v.to(z.dtype), mask=behind)


@torch.library.custom_op("attnlab::short_softmax", mutates_args=())
def short_softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, causal: bool, scale: float, rate: float
) -> Tensor:
    """Context (b,h,i,d) of q (b,h,i,d), k and v (b,g,j,d); mask bool, broadcastable to (b,1,i,j); seed of dropout."""
    note_launch("softmax")
    out = empty_by_token(q)
    strides = (*q.stride(), *k.stride(), *v.stride(), *_strides(mask, q, k))
    with select_device(q):
        _forward[(q.shape[0] * q.shape[1],)](
            q, k, v, *_choose_pointers(q, mask, seed), out, q.shape[1], q.shape[2], k.shape[2], *strides, scale, rate,
            MASKED=mask is not None, CAUSAL=causal, DROPPED=seed is not None, **_tile(q, k),
        )  # fmt: skip
    return out


@torch.library.custom_op("attnlab::short_softmax_backward", mutates_args=())
def short_softmax_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None,
    causal: bool, scale: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV."""
    dq, dk, dv = empty_by_token(q), empty_by_token(k), empty_by_token(v)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), *_strides(mask, q, k))
    with select_device(q):
        _backward[(k.shape[0] * k.shape[1],)](
            q, k, v, *_choose_pointers(q, mask, seed), grad, dq, dk, dv, q.shape[1], q.shape[2], k.shape[2], *strides,
            scale, rate, MASKED=mask is not None, CAUSAL=causal, DROPPED=seed is not None, **_tile(q, k),
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
    if not q.is_cuda and not os.environ.get("TRITON_INTERPRET"):
        return f"tensors on {q.device}"
    if is_mapped(q):
        return "tensors that torch.func maps over"
    if q.dtype not in WIDEST:
        return str(q.dtype)
    if max(q.shape[2], k.shape[2]) > LONGEST:
        return f"rows longer than {LONGEST}"
    if q.shape[3] > WIDEST[q.dtype] or v.shape[3] != q.shape[3]:
        return f"head_dim={q.shape[3]} in {q.dtype} with values of {v.shape[3]} (at most {WIDEST[q.dtype]}, and equal)"
    return None


def _choose_pointers(q: Tensor, mask: Tensor | None, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pointers to mask and seed; a missing one is replaced by a pointer that is never read."""
    return q if mask is None else mask.view(torch.uint8), q if seed is None else seed


def _strides(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[int, int, int]:
    if mask is None:
        return 0, 0, 0
    b, _, i, j = mask[(None,) * (4 - mask.dim())].expand(q.shape[0], 1, q.shape[2], k.shape[2]).stride()
    return b, i, j


def _tile(q: Tensor, k: Tensor) -> dict[str, int]:
    def wide(n: int) -> int:
        return max(16, int(triton.next_power_of_2(n)))

    sizes = {"ROWS": wide(q.shape[2]), "KEYS": wide(k.shape[2]), "D": q.shape[3], "WIDE": wide(q.shape[3])}
    return sizes | {"SHARED": q.shape[1] // k.shape[1]}
