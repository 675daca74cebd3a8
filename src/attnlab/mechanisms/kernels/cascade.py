"""Attention that passes its logits to the next layer: RealFormer, and CODA, whose heads collide in `coda.py`.

    scores     S = scale·QKᵀ + bias; without σ already Z = S + C + ε, C: the carry      collide   S becomes Z (coda.py)
    attend     P = softmax(sharp·Z) over visible keys, online      O = (P ∘ D) V      L = log₂ Σ 2^Z'   D: dropout
    backward   dV = (P ∘ D)ᵀ G      dZ = sharp·P ∘ ((G Vᵀ) ∘ D − δ) + the gradient of Z itself      δ = Σ_d G ∘ O
               S again, then dS and dC from dZ (coda.py; else dS = dC = dZ)      dQ = scale·dS K      dK = scale·dSᵀ Q

Z is written for the next layer, so the other kernels read it too. Only `collide` holds more than one head, and no other
kernel draws the noise again. Tiles above the diagonal are skipped: Z is neither written nor read there, and the
gradient of C is 0. dZ has one buffer, which becomes dS and is returned as the gradient of C;
its sum is the gradient of a bias.
Every sum is computed in float32 and in a fixed order.
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
from attnlab.mechanisms.kernels.pairs import (
    add_bias,
    count_examples,
    draw_dropout,
    first_query,
    is_multiple_of_8,
    is_visible,
    last_key,
    mark_multiple_of_8,
    read_bias,
    read_mask,
)  # fmt: skip
from attnlab.mechanisms.kernels.tiles import choose_tile, compute_delta, load_tile, locate_tile, score_tile, write_tile


@remember_calls
@triton.jit(do_not_specialize=("rows", "keys", "layer", "each"))
def _scores(
    q, k, carry, bias, seed, out, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, a_b, a_h, a_i, a_j, scale,
    layer, each, CAUSAL: tl.constexpr, CARRIED: tl.constexpr, BIAS: tl.constexpr, NOISY: tl.constexpr,
    SHARED: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of one head. Its values at hidden pairs are never used. each: number of examples with the same seed."""
    keys = mark_multiple_of_8(keys, EVEN)
    columns = tl.cdiv(keys, BJ)
    tiles = tl.cdiv(rows, BI) * columns
    head, tile, b, h = locate_tile(tiles, heads)
    top, left = tile // columns * BI, tile % columns * BJ
    if left < last_key(top + BI, rows, keys, CAUSAL):
        i, j = top + tl.arange(0, BI), left + tl.arange(0, BJ)
        x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
        y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
        z = score_tile(x, y, seed + b // each, b % each, h, i, left, rows, keys, scale, layer, NOISY, CAUSAL, BJ)
        z = add_bias(z, bias, b, h, top, i, j, rows, keys, a_b, a_h, a_i, a_j, BIAS, 1.0)
        place, inside = at_pairs(head, i, j, rows, keys)
        if CARRIED:
            z += tl.load(carry + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, z, mask=inside)


@remember_calls
@triton.jit(do_not_specialize=("rows", "keys", "m_b", "each"))
def _attend_backward(
    z, v, mask, seed, grad, grad_z, lse, delta, dz, dv, heads, rows, keys, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d,
    m_b, m_i, m_j, sharp, rate, each, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr,
    HANDED: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BJ keys of one query head: dV, and dZ, 0 where hidden. HANDED: the next layer's gradient grad_z.

    Keys are the rows of every tile, so that P is the first operand of dV's product as it is. each: as in `_attend`.
    """
    rows, keys, m_b = mark_multiple_of_8(rows, EVEN), mark_multiple_of_8(keys, EVEN), mark_multiple_of_8(m_b, EVEN)
    head, tile, b, h = locate_tile(tl.cdiv(keys, BJ), heads)
    j = tile * BJ + tl.arange(0, BJ)
    y = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    sum_v = tl.zeros((BJ, WIDE), dtype=tl.float32)
    if DROPPED:
        own, number = tl.load(seed + b // each), (b % each * heads + h).to(tl.int32)
    start = first_query(tile * BJ, rows, keys, CAUSAL) // BI * BI
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
            quad = tile * BJ // 4 + tl.arange(0, BJ // 4)
            keep = tl.trans(draw_dropout(own, rate, number, i[:, None], quad[None, :]))
            taken, dp = p * keep, dp * keep
        sum_v = tl.dot(taken.to(g.dtype), g, sum_v, input_precision="ieee")
        ds = p * (dp - tl.load(delta + head * rows + i, mask=i < rows, other=0.0)[None, :]) * sharp
        if HANDED:
            ds += tl.where(seen, tl.load(grad_z + place, mask=inside, other=0.0).to(tl.float32), 0.0)
        tl.store(dz + place, ds, mask=inside)
    write_tile(dv, sum_v, b, h, j, heads, keys, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=("rows", "keys"))
def _product(
    ds, x, out, heads, rows, keys, x_b, x_h, x_n, x_d, scale, CAUSAL: tl.constexpr, TURNED: tl.constexpr,
    SHARED: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """scale·dS x for BI queries of one head; with TURNED, scale·dSᵀ x for BJ keys."""
    keys = mark_multiple_of_8(keys, EVEN)
    tiles = tl.cdiv(keys, BJ) if TURNED else tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    if TURNED:
        j = tile * BJ + tl.arange(0, BJ)
        total = tl.zeros((BJ, WIDE), dtype=tl.float32)
        for top in range(first_query(tile * BJ, rows, keys, CAUSAL) // BI * BI, rows, BI):
            i = top + tl.arange(0, BI)
            place, inside = at_pairs(head, i, j, rows, keys)
            y = load_tile(x, b, h, i, rows, x_b, x_h, x_n, x_d, D, WIDE)
            part = tl.load(ds + place, mask=inside, other=0.0).to(y.dtype)
            total = tl.dot(tl.trans(part), y, total, input_precision="ieee")
        write_tile(out, total * scale, b, h, j, heads, keys, D, WIDE)
    else:
        first = (tiles - 1 - tile) * BI
        i = first + tl.arange(0, BI)
        total = tl.zeros((BI, WIDE), dtype=tl.float32)
        for left in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
            j = left + tl.arange(0, BJ)
            place, inside = at_pairs(head, i, j, rows, keys)
            y = load_tile(x, b, h // SHARED, j, keys, x_b, x_h, x_n, x_d, D, WIDE)
            part = tl.load(ds + place, mask=inside, other=0.0).to(y.dtype)
            total = tl.dot(part, y, total, input_precision="ieee")
        write_tile(out, total * scale, b, h, i, heads, rows, D, WIDE)


@operator("attnlab::cascade")
def cascade(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, carry: Tensor | None,
    net: Tensor | None, noise: Tensor | None, dropping: Tensor | None, causal: bool, scale: float, sharp: float,
    rate: float, layer: int, width: int, own: bool, residual: bool, wide: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d), logits Z (b,h,i,j) and their log₂-sums (b,h,i); q (b,h,i,d), k and v (b,g,j,d).

    bias      added to S; floating-point, broadcastable to (b,h,i,j), or None
    net       σ's parameters as one vector for each member (s,size), or None; width, own and residual: as in coda.py
    noise     the seed of ε, or None           dropping   the seed of dropout, or None; rate: of dropout
              a seed is one number (), or one for each member (s,), whose examples come one after another
    sharp     P = softmax(sharp·Z)             wide       Z in float32, else in q's type
    """
    note_launch("cascade")
    out, z, lse = _allocate_outputs(q, k, wide)
    seen, carry = read_mask(mask, causal, q, k), None if carry is None else carry.contiguous()
    mixed = net is not None and carry is not None
    _write_scores(q, k, z, bias, None if mixed else carry, None if mixed else noise, causal, scale, layer)
    if net is not None and carry is not None:
        form = (width, own, residual, bias is not None, q.dtype)
        _choose_sigma(q, width).collide(z, carry, net, seen, noise, layer, *form)
    attend(q, k, v, z, seen, read_bias(None, q, k), None, None, dropping, out, lse, scale=sharp, rate=rate)
    return out, z, lse


@operator("attnlab::cascade_backward")
def cascade_backward(
    grad: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    carry: Tensor | None, net: Tensor | None, dropping: Tensor | None, out: Tensor, z: Tensor, lse: Tensor,
    causal: bool, scale: float, sharp: float, rate: float, layer: int, width: int, own: bool, residual: bool,
    wide: bool, learnt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV, and the gradients of bias, if it is learnt, carry and net; one that there is not is empty."""
    seen, carry = read_mask(mask, causal, q, k), None if carry is None else carry.contiguous()
    (b, h, i, j), dz = z.shape, torch.empty_like(z if carry is None else carry)
    dv, shared = _empty_by_head(v, h), h // v.shape[1]
    delta, tile = compute_delta(grad, out), choose_tile(v, backward=True)
    if v.dtype != torch.float32 and v.shape[3] <= 64:
        tile |= {"BI": 32, "num_stages": 3}  # as measured
    handed = z if grad_z is None else grad_z.contiguous()
    with select_device(v):
        _attend_backward[(b * h * divide_up(j, tile["BJ"]),)](
            z, v, seen.mask, v if dropping is None else dropping, grad, handed, lse, delta, dz, dv, h, i, j,
            *v.stride(), *grad.stride(), *seen.strides, sharp, rate, count_examples(b, dropping),
            DROPPED=dropping is not None, HANDED=grad_z is not None, SHARED=shared,
            EVEN=is_multiple_of_8(i, j, seen.strides[0]), **seen.flags, **tile,
        )  # fmt: skip
    dcarry, dnet = dz if carry is not None else dz.new_empty(0), q.new_empty(0)
    if carry is not None and net is not None:
        s, form = torch.empty_like(carry), (width, own, residual, bias is not None, q.dtype)
        if own or bias is not None:
            _write_scores(q, k, s, bias, None, None, causal, scale, layer)
        if not own:
            dcarry = torch.zeros_like(carry)
        dnet = _choose_sigma(q, width).collide_backward(s, carry, net, seen, dz, dcarry, *form)
    dq, dk, tile = empty_by_token(q), _empty_by_head(k, h), choose_tile(q)
    flags = {"CAUSAL": causal, "EVEN": is_multiple_of_8(j)} | tile
    with select_device(q):
        queries, keys = (b * h * divide_up(i, tile["BI"]),), (b * h * divide_up(j, tile["BJ"]),)
        _product[queries](dz, k, dq, h, i, j, *k.stride(), scale, TURNED=False, SHARED=shared, **flags)
        _product[keys](dz, q, dk, h, i, j, *q.stride(), scale, TURNED=True, SHARED=shared, **flags)
    dbias = dz.sum_to_size(bias.shape).to(bias.dtype, copy=True) if bias is not None and learnt else q.new_empty(0)
    return dq, _sum_groups(dk, k), _sum_groups(dv, v), dbias, dcarry, dnet


def _choose_sigma(q: Tensor, width: int) -> Any:
    """Return the module that computes σ: the kernels, or PyTorch where σ's weights are too large for them."""
    return coda if coda.holds_net(q.shape[1], width, q.dtype) else wide_sigma


def _write_scores(
    q: Tensor, k: Tensor, out: Tensor, bias: Tensor | None, carry: Tensor | None, noise: Tensor | None, causal: bool,
    scale: float, layer: int,
) -> None:  # fmt: skip
    """Write out = scale·qkᵀ + bias + carry + ε, except in tiles that are hidden as a whole."""
    (b, h, i, _), j, tile, added = q.shape, k.shape[2], choose_tile(q), read_bias(bias, q, k)
    with select_device(q):
        _scores[(b * h * divide_up(i, tile["BI"]) * divide_up(j, tile["BJ"]),)](
            q, k, q if carry is None else carry, added.values, q if noise is None else noise, out, h, i, j,
            *q.stride(), *k.stride(), *added.strides, scale, layer, count_examples(b, noise), CAUSAL=causal,
            CARRIED=carry is not None, BIAS=added.kind, NOISY=noise is not None, SHARED=h // k.shape[1],
            EVEN=is_multiple_of_8(j), **tile,
        )  # fmt: skip


def _empty_by_head(x: Tensor, heads: int) -> Tensor:
    """Allocate the gradient of grouped keys or values for each of the query heads; in float32 if they share any."""
    b, g, n, d = x.shape
    made = x.new_empty(b, n, heads, d, dtype=x.dtype if g == heads else torch.float32)
    return made.transpose(1, 2)


def _sum_groups(grad: Tensor, x: Tensor) -> Tensor:
    """Sum a gradient (b,h,n,d) over the query heads that share a head of x (b,g,n,d)."""
    b, g, n, d = x.shape
    if grad.shape[1] == g:
        return grad
    return grad.transpose(1, 2).reshape(b, n, g, -1, d).sum(3).to(x.dtype).transpose(1, 2)


@cascade.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _allocate_outputs(q, k, rest[-1])


@cascade_backward.register_fake
def _(
    grad: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    carry: Tensor | None, net: Tensor | None, dropping: Tensor | None, out: Tensor, z: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dbias = bias.new_empty(bias.shape) if bias is not None and rest[-1] else q.new_empty(0)
    dcarry = z.new_empty(0) if carry is None else torch.empty_like(carry, memory_format=torch.contiguous_format)
    dnet = q.new_empty(0) if carry is None or net is None else net.new_empty(net.shape)
    return empty_by_token(q), empty_by_token(k), empty_by_token(v), dbias, dcarry, dnet


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, bias, carry, net, _, dropping, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, mask, bias, carry, net, dropping, *output)


def _gradients(ctx: Any, grad: Tensor | None, grad_z: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    saved = ctx.saved_tensors  # a checkpoint lets them be read once
    _, _, _, _, bias, carry, net, _, out, *_ = saved
    learnt = bias is not None and ctx.needs_input_grad[4]
    grad = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv, dbias, dcarry, dnet = cascade_backward(grad, grad_z, *saved, *ctx.options, learnt)
    carried = (None if carry is None else dcarry, None if carry is None or net is None else dnet)
    return dq, dk, dv, None, dbias if learnt else None, *carried, *(None,) * (2 + len(ctx.options))


cascade.register_autograd(_gradients, setup_context=_save_inputs)


def _allocate_outputs(q: Tensor, k: Tensor, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    b, h, i, _ = q.shape
    logits = q.new_empty(b, h, i, k.shape[2], dtype=torch.float32 if wide else q.dtype)
    return empty_by_token(q), logits, q.new_empty(b, h, i, dtype=torch.float32)
