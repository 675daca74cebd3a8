"""Attention that passes its logits to the next layer: RealFormer, and CODA, whose heads collide in `coda.py`.

    attend     Z = scale·QKᵀ + bias + C + ε, C: the carry      P = softmax(sharp·Z) over visible keys, online
               O = (P ∘ D) V      L = log₂ Σ 2^Z'   D: dropout
               with σ, S = scale·QKᵀ + bias is written first (pair_products.py), and `collide` makes it Z (coda.py)
    backward   dV = (P ∘ D)ᵀ G      dZ = sharp·P ∘ ((G Vᵀ) ∘ D − δ) + the gradient of Z itself      δ = Σ_d G ∘ O
               S again, then dS and dC from dZ (coda.py; else dS = dC = dZ)      dQ = scale·dS K      dK = scale·dSᵀ Q

Z is written for the next layer, so the backward kernels read it too. Only `collide` holds more than one head, and no
other kernel draws the noise again. Tiles above the diagonal are skipped: Z is neither written nor read there, and the
gradient of C is 0. dZ has one buffer, which becomes dS and is returned as the gradient of C;
its sum is the gradient of a bias.
Every sum is computed in float32 and in a fixed order. Without σ a layer has four launches, with it seven.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels import coda, wide_sigma
from attnlab.mechanisms.kernels.launch import (
    divide_up,
    empty_by_token,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    select_device,
)
from attnlab.mechanisms.kernels.online import LOG2_E, at_pairs, attend
from attnlab.mechanisms.kernels.pair_products import PartSums, write_products, write_scores
from attnlab.mechanisms.kernels.pairs import (
    Visibility,
    count_examples,
    draw_dropout,
    first_query,
    is_multiple_of_8,
    is_visible,
    mark_multiple_of_8,
    read_bias,
    read_mask,
)  # fmt: skip
from attnlab.mechanisms.kernels.tiles import choose_tile, compute_delta, load_tile, locate_tile, write_tile


@remember_calls
@triton.jit(do_not_specialize=("rows", "keys", "m_b", "each"))
def _attend_backward(
    z, v, mask, seed, grad, grad_z, lse, delta, dz, dv, heads, rows, keys, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d,
    m_b, m_i, m_j, sharp, rate, each, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr,
    HANDED: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BJ keys of one key head: dV, and dZ of the query heads that share it, 0 where hidden.

    HANDED: the next layer's gradient grad_z. Keys are the rows of every tile, so that P is the first operand of dV's
    product as it is. each: as in `_attend`.
    """
    rows, keys, m_b = mark_multiple_of_8(rows, EVEN), mark_multiple_of_8(keys, EVEN), mark_multiple_of_8(m_b, EVEN)
    groups = heads // SHARED
    _unused, tile, b, group = locate_tile(tl.cdiv(keys, BJ), groups)
    j = tile * BJ + tl.arange(0, BJ)
    y = load_tile(v, b, group, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    sum_v = tl.zeros((BJ, WIDE), dtype=tl.float32)
    if DROPPED:
        own = tl.load(seed + b // each)
    start = first_query(tile * BJ, rows, keys, CAUSAL) // BI * BI
    for h in range(group * SHARED, (group + 1) * SHARED):
        head = b * heads + h
        for above in range(0, tl.minimum(start, rows), BI):
            i = above + tl.arange(0, BI)
            place, inside = at_pairs(head, i, j, rows, keys)
            tl.store(dz + place, tl.zeros((BI, BJ), dtype=tl.float32), mask=inside)
        for below in range(start, rows, BI):
            i = below + tl.arange(0, BI)
            seen = is_visible(mask, b, i[None, :], j[:, None], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
            place = head * rows * keys + i[None, :] * keys + j[:, None]
            inside = (j < keys)[:, None] & (i < rows)[None, :]
            s = tl.load(z + place, mask=inside, other=0.0).to(tl.float32) * (sharp * LOG2_E)
            level = tl.load(lse + head * rows + i, mask=i < rows, other=0.0)
            p = tl.where(seen, tl.exp2(s - level[None, :]), 0.0)
            g = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
            dp = tl.dot(y, tl.trans(g), input_precision="ieee")
            taken = p
            if DROPPED:
                quad, number = tile * BJ // 4 + tl.arange(0, BJ // 4), (b % each * heads + h).to(tl.int32)
                keep = tl.trans(draw_dropout(own, rate, number, i[:, None], quad[None, :]))
                taken, dp = p * keep, dp * keep
            sum_v = tl.dot(taken.to(g.dtype), g, sum_v, input_precision="ieee")
            ds = p * (dp - tl.load(delta + head * rows + i, mask=i < rows, other=0.0)[None, :]) * sharp
            if HANDED:
                ds += tl.where(seen, tl.load(grad_z + place, mask=inside, other=0.0).to(tl.float32), 0.0)
            tl.store(dz + place, ds, mask=inside)
    write_tile(dv, sum_v, b, group, j, groups, keys, D, WIDE)


@operator("attnlab::cascade")
def cascade(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, carry: Tensor | None,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None, w3: Tensor | None, b3: Tensor | None,
    noise: Tensor | None, dropping: Tensor | None, causal: bool, scale: float, sharp: float, rate: float, layer: int,
    own: bool, residual: bool, wide: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d), logits Z (b,h,i,j) and their log₂-sums (b,h,i); q (b,h,i,d), k and v (b,g,j,d).

    bias      added to S; floating-point, broadcastable to (b,h,i,j), or None
    w1 … b3   σ's parameters, with a leading axis (s,…) where members have their own, or None; own and residual: as in
              coda.py
    noise     the seed of ε, or None           dropping   the seed of dropout, or None; rate: of dropout
              a seed is one number (), or one for each member (s,), whose examples come one after another
    sharp     P = softmax(sharp·Z)             wide       Z in float32, else in q's type
    """
    note_launch("cascade")
    out, z, lse = _allocate_outputs(q, k, wide)
    seen, carry = read_mask(mask, causal, q, k), None if carry is None else carry.contiguous()
    common: dict[str, Any] = {"dropping": dropping, "out": out, "lse": lse, "sharp": sharp, "rate": rate}
    common["scale"] = scale
    if w1 is None or carry is None:
        more: dict[str, Any] = {"noise": noise, "layer": layer, "made": z, "carry": carry}
        attend(q, k, v, None, seen, read_bias(bias, q, k), None, **common, **more)
    else:
        write_scores(q, k, z, bias, causal=causal, scale=scale)
        form = (own, residual, bias is not None, q.dtype)
        _choose_sigma(q, w1).collide(z, carry, (w1, b1, w2, b2, w3, b3), seen, noise, layer, *form)
        attend(q, k, v, z, seen, read_bias(None, q, k), None, None, **common)
    return out, z, lse


@operator("attnlab::cascade_backward")
def cascade_backward(
    grad: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    carry: Tensor | None, w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    w3: Tensor | None, b3: Tensor | None, dropping: Tensor | None, out: Tensor, z: Tensor, lse: Tensor, causal: bool,
    scale: float, sharp: float, rate: float, layer: int, own: bool, residual: bool, wide: bool, learnt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV, and the gradients of bias, if it is learnt, carry and σ; one that there is not is empty.

    The gradient of σ is one vector: of w1, then of b1, …; each with all its members.
    """
    seen, carry = read_mask(mask, causal, q, k), None if carry is None else carry.contiguous()
    s, delta = z, lse.new_empty(lse.shape)
    if carry is not None and w1 is not None and (own or bias is not None):
        s = torch.empty_like(carry)
        write_scores(q, k, s, bias, causal=causal, scale=scale, delta=(grad, out, delta))
    else:
        compute_delta(grad, out, delta)
    dz, dv = torch.empty_like(z if carry is None else carry), empty_by_token(v)
    _write_slopes(grad, grad_z, v, seen, dropping, z, lse, delta, dz, dv, sharp, rate)
    sums, dcarry, dnet = None, dz if carry is not None else q.new_empty(0), q.new_empty(0)
    if carry is not None and w1 is not None:
        dcarry = dz if own else torch.zeros_like(carry)
        form = (own, residual, bias is not None, q.dtype)
        parts = _choose_sigma(q, w1).collide_backward(s, carry, (w1, b1, w2, b2, w3, b3), seen, dz, dcarry, *form)
        dnet = w1.new_empty(parts.shape[1])
        sums = PartSums(parts, dnet)
    dq, dk, _ = write_products(dz, q, k, causal=causal, scale=scale, sums=sums)
    dbias = dz.sum_to_size(bias.shape).to(bias.dtype, copy=True) if bias is not None and learnt else q.new_empty(0)
    return dq, dk, dv, dbias, dcarry, dnet


def _write_slopes(
    grad: Tensor, grad_z: Tensor | None, v: Tensor, seen: Visibility, dropping: Tensor | None, z: Tensor, lse: Tensor,
    delta: Tensor, dz: Tensor, dv: Tensor, sharp: float, rate: float,
) -> None:  # fmt: skip
    """Write dZ and dV."""
    (b, h, i, j), tile = z.shape, choose_tile(v, backward=True)
    if v.dtype != torch.float32 and v.shape[3] <= 64:
        tile |= {"BI": 32, "num_stages": 3}  # as measured
    with select_device(v):
        _attend_backward[(b * v.shape[1] * divide_up(j, tile["BJ"]),)](
            z, v, seen.mask, v if dropping is None else dropping, grad, z if grad_z is None else grad_z.contiguous(),
            lse, delta, dz, dv, h, i, j, *v.stride(), *grad.stride(), *seen.strides, sharp, rate,
            count_examples(b, dropping), DROPPED=dropping is not None, HANDED=grad_z is not None,
            SHARED=h // v.shape[1], EVEN=is_multiple_of_8(i, j, seen.strides[0]), **seen.flags, **tile,
        )  # fmt: skip


def _choose_sigma(q: Tensor, w1: Tensor) -> Any:
    """Return the module that computes σ: the kernels, or PyTorch where σ's weights are too large for them."""
    return coda if coda.holds_net(q.shape[1], w1.shape[-2], q.dtype) else wide_sigma


@cascade.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _allocate_outputs(q, k, rest[-1])


@cascade_backward.register_fake
def _(
    grad: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    carry: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dbias = bias.new_empty(bias.shape) if bias is not None and rest[-1] else q.new_empty(0)
    dcarry = q.new_empty(0) if carry is None else torch.empty_like(carry, memory_format=torch.contiguous_format)
    size = 0 if carry is None else sum(x.numel() for x in rest[:6] if x is not None)
    dnet = (q if rest[0] is None else rest[0]).new_empty(size)
    return empty_by_token(q), empty_by_token(k), empty_by_token(v), dbias, dcarry, dnet


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *given, _, dropping = inputs[:14]
    ctx.options = inputs[14:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*given, dropping, *output)


def _gradients(ctx: Any, grad: Tensor | None, grad_z: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    saved = ctx.saved_tensors  # a checkpoint lets them be read once
    bias, carry, net, out = saved[4], saved[5], saved[6:12], saved[13]
    learnt = bias is not None and ctx.needs_input_grad[4]
    grad = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv, dbias, dcarry, dnet = cascade_backward(grad, grad_z, *saved, *ctx.options, learnt)
    of_net: list[Tensor | None] = [None] * 6
    if carry is not None and net[0] is not None:
        there = [x for x in net if x is not None]
        parts = iter(dnet.split([x.numel() for x in there]))
        of_net = [None if x is None else next(parts).view(x.shape) for x in net]
    dcarry = None if carry is None else dcarry
    return dq, dk, dv, None, dbias if learnt else None, dcarry, *of_net, *(None,) * (2 + len(ctx.options))


cascade.register_autograd(_gradients, setup_context=_save_inputs)


def _allocate_outputs(q: Tensor, k: Tensor, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    b, h, i, _ = q.shape
    logits = q.new_empty(b, h, i, k.shape[2], dtype=torch.float32 if wide else q.dtype)
    return empty_by_token(q), logits, q.new_empty(b, h, i, dtype=torch.float32)
