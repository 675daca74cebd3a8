"""Softmax attention with noise on its logits, P = softmax(scale·QKᵀ + ε), in O(n) memory.

    forward    O = (P ∘ D) V, online        L = log₂ Σ 2^Z'        D: dropout
    backward   dV = (P ∘ D)ᵀ G      dS = P ∘ ((G Vᵀ) ∘ D − δ)      δ = Σ_d G ∘ O
               dQ = scale·dS K      dK = scale·dSᵀ Q

No logit is ever written. ε is a function of its position, so each pass draws it again. In the backward pass one kernel
loops over the queries for dK and dV, and one over the keys for dQ. Every sum has a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import empty_by_token, note_launch, select_device
from attnlab.mechanisms.kernels.online import LOG2_E, attend
from attnlab.mechanisms.kernels.pairs import draw_dropout, first_query, is_visible, last_key, read_mask
from attnlab.mechanisms.kernels.tiles import choose_tile, compute_delta, load_tile, locate_tile, score_tile, write_tile


@triton.jit
def _slope(
    x, y, z, g, mask, noise, dropping, lse, delta, head, b, h, i, left, rows, keys, m_b, m_i, m_j, scale, rate, layer,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """P ∘ D and dS of queries i (rows x, gradients g) and the BJ keys from `left` on (rows y, values z)."""
    j = left + tl.arange(0, BJ)
    s = score_tile(x, y, noise, b, h, i, left, rows, keys, scale, layer, True, CAUSAL, BJ) * LOG2_E
    seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
    level = tl.load(lse + head * rows + i, mask=i < rows, other=0.0)
    p = tl.where(seen, tl.exp2(s - level[:, None]), 0.0)
    taken, dp = p, tl.dot(g, tl.trans(z), input_precision="ieee")
    if DROPPED:
        keep = draw_dropout(tl.load(dropping), rate, head, i[:, None], (left // 4 + tl.arange(0, BJ // 4))[None, :])
        taken, dp = p * keep, dp * keep
    return taken, p * (dp - tl.load(delta + head * rows + i, mask=i < rows, other=0.0)[:, None])


@triton.jit
def _backward(
    q, k, v, mask, noise, dropping, grad, lse, delta, dq, dk, dv, heads, rows, keys, q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, scale, rate, layer,
    OF_KEYS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of BI queries of one head; with OF_KEYS, dK and dV of BJ keys."""
    tiles = tl.cdiv(keys, BJ) if OF_KEYS else tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    if OF_KEYS:
        left = tile * BJ
        j = left + tl.arange(0, BJ)
        y = load_tile(k, b, h, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
        z = load_tile(v, b, h, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
        sum_k, sum_v = tl.zeros((BJ, WIDE), dtype=tl.float32), tl.zeros((BJ, WIDE), dtype=tl.float32)
        for above in range(first_query(left, rows, keys, CAUSAL) // BI * BI, rows, BI):
            i = above + tl.arange(0, BI)
            x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
            g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
            taken, ds = _slope(
                x, y, z, g, mask, noise, dropping, lse, delta, head, b, h, i, left, rows, keys, m_b, m_i, m_j,
                scale, rate, layer, MASKED, CAUSAL, DROPPED, BJ,
            )  # fmt: skip
            sum_v = tl.dot(tl.trans(taken.to(g.dtype)), g, sum_v, input_precision="ieee")
            sum_k = tl.dot(tl.trans(ds.to(x.dtype)), x, sum_k, input_precision="ieee")
        write_tile(dk, sum_k * scale, b, h, j, heads, keys, D, WIDE)
        write_tile(dv, sum_v, b, h, j, heads, keys, D, WIDE)
    else:
        first = (tiles - 1 - tile) * BI
        i = first + tl.arange(0, BI)
        x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
        g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
        sum_q = tl.zeros((BI, WIDE), dtype=tl.float32)
        for left in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
            j = left + tl.arange(0, BJ)
            y = load_tile(k, b, h, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            z = load_tile(v, b, h, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            _, ds = _slope(
                x, y, z, g, mask, noise, dropping, lse, delta, head, b, h, i, left, rows, keys, m_b, m_i, m_j,
                scale, rate, layer, MASKED, CAUSAL, DROPPED, BJ,
            )  # fmt: skip
            sum_q = tl.dot(ds.to(y.dtype), y, sum_q, input_precision="ieee")
        write_tile(dq, sum_q * scale, b, h, i, heads, rows, D, WIDE)


@torch.library.custom_op("attnlab::noisy_softmax", mutates_args=())
def noisy_softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, noise: Tensor, dropping: Tensor | None, causal: bool,
    scale: float, rate: float, layer: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d) and log₂-sums L (b,h,i). noise and dropping are the seeds of ε and of dropout."""
    note_launch("coda_cs")
    out, lse = _empty(q)
    attend(q, k, v, None, read_mask(mask, causal, q, k), noise, dropping, out, lse, scale=scale, rate=rate, layer=layer)
    return out, lse


@torch.library.custom_op("attnlab::noisy_softmax_backward", mutates_args=())
def noisy_softmax_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, noise: Tensor, dropping: Tensor | None,
    out: Tensor, lse: Tensor, causal: bool, scale: float, rate: float, layer: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV."""
    (b, h, i, _), j, seen = q.shape, k.shape[2], read_mask(mask, causal, q, k)
    dq, dk, dv = (empty_by_token(x) for x in (q, k, v))
    tile, delta = choose_tile(q, backward=True), compute_delta(grad, out)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), *seen.strides)
    with select_device(q):
        for of_keys, programs in ((True, triton.cdiv(j, tile["BJ"])), (False, triton.cdiv(i, tile["BI"]))):
            _backward[(b * h * programs,)](
                q, k, v, seen.mask, noise, noise if dropping is None else dropping, grad, lse, delta, dq, dk, dv,
                h, i, j, *strides, scale, rate, layer, OF_KEYS=of_keys, DROPPED=dropping is not None, **seen.flags,
                **tile,
            )  # fmt: skip
    return dq, dk, dv


@noisy_softmax.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(q)


@noisy_softmax_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_token(q), empty_by_token(k), empty_by_token(v)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, noise, dropping, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, mask, noise, dropping, *output)


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise NotImplementedError("the fused kernel of coda-cs has no second derivative; use impl='reference'")
    return *noisy_softmax_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * (3 + len(ctx.options))


noisy_softmax.register_autograd(_gradients, setup_context=_save_inputs)


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_by_token(q), q.new_empty(q.shape[:3], dtype=torch.float32)
