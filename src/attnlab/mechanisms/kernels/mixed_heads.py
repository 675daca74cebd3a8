"""Softmax over rows of logits in memory, whose heads are mixed before and after it, at every (query, key).

    Z = compose(S)        P = softmax(Z) over visible keys        W = compose'(P)        s, p: the entries of all heads

    compose(S)_:ij = s (M_i + K_j)        M_i, K_j (h,h): of the row, or the same for all rows; of the key, or none

Without a first matrix Z = S.

    forward        sweep 1: L = log₂ Σ_j 2^Z'        sweep 2: P = 2^{Z'−L}, then W                  Z' = Z log₂ e
    of the rows    dP = compose'ᵀ(dW)    δ = Σ_j P dP    dM' = Σ_j p ⊗ dw    dM = Σ_j s ⊗ (p ∘ dp) − (Σ_j s ⊗ p) ∘ δ
    of the keys    dZ = P (dP − δ)       dS = composeᵀ(dZ)    dK' = Σ_i p ⊗ dw    dK = Σ_i s ⊗ dz

A tile has BI rows, BJ keys and all heads, (BI,BJ,H). Its products with M have the rows as their batch, so one warp has
one row or more. Its products with K have the keys as their batch. Sums over the keys belong to the programs of rows.
Sums over the rows belong to the programs of keys, in parts of SPAN rows. All sums are computed in float32 and in a
fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.head_scores import (
    compose_heads,
    load_matrices,
    place_pairs,
    score_heads,
)
from attnlab.mechanisms.kernels.head_tiles import TYPES, choose_keys, choose_rows
from attnlab.mechanisms.kernels.launch import (
    divide_up,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    round_up,
    select_device,
)
from attnlab.mechanisms.kernels.pairs import first_query, last_key, read_mask


@remember_calls
@triton.jit
def _forward(
    s, before, after, key_before, key_after, mask, out, lse, heads, rows, keys, x_b, x_i, x_r, x_c, y_r, y_c,
    m_b, m_i, m_j, T: tl.constexpr, FIRST: tl.constexpr, KEYED: tl.constexpr,
    EACH: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, KNOWN: tl.constexpr, H: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """BI rows of one example: W, 0 where hidden, and L, unless it is KNOWN."""
    tiles = tl.cdiv(rows, BI)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tiles - 1 - tl.program_id(0) % tiles) * BI  # causal: the longest rows are the last, and start first
    i, h = first + tl.arange(0, BI), tl.arange(0, H)
    s += b * heads * rows * keys
    out += b * heads * rows * keys
    key_before += b * keys * heads * heads
    key_after += b * keys * heads * heads
    m = load_matrices(before + b * x_b, i, h, heads, rows, x_i, x_r, x_c, T)
    end = last_key(first + BI, rows, keys, CAUSAL)
    plane = (b * heads + h[None, :]) * rows + i[:, None]
    exists = (i < rows)[:, None] & (h < heads)[None, :]
    if KNOWN:
        level = tl.load(lse + plane, mask=exists, other=0.0)
    else:
        top, total = tl.full((BI, H), float("-inf"), tl.float32), tl.zeros((BI, H), dtype=tl.float32)
        for left in range(0, end, BJ):
            j = left + tl.arange(0, BJ)
            _, z, _ = score_heads(s, m, key_before, mask, b, i, j, h, heads, rows, keys, m_b, m_i, m_j, T, FIRST, KEYED,
                                  MASKED, CAUSAL)  # fmt: skip
            higher = tl.maximum(top, tl.max(z, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(top - level) + tl.sum(tl.exp2(z - level[:, None, :]), 1)
            top = higher
        level = tl.where(total == 0.0, 0.0, top + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse + plane, level, mask=exists)
    n = load_matrices(after + b * x_b, i, h, heads, rows, x_i, y_r, y_c, T)
    for left in range(0, end, BJ):
        j = left + tl.arange(0, BJ)
        _, z, _ = score_heads(s, m, key_before, mask, b, i, j, h, heads, rows, keys, m_b, m_i, m_j, T, FIRST, KEYED,
                              MASKED, CAUSAL)  # fmt: skip
        w = compose_heads(tl.exp2(z - level[:, None, :]), n, key_after, j, h, heads, keys, T, KEYED, False)
        place, inside = place_pairs(i, j, h, heads, rows, keys)
        tl.store(out + place, w, mask=inside)
    for left in range(tl.cdiv(end, BJ) * BJ, keys, BJ):
        place, inside = place_pairs(i, left + tl.arange(0, BJ), h, heads, rows, keys)
        tl.store(out + place, tl.zeros((BI, BJ, H), dtype=tl.float32), mask=inside)


@triton.jit
def _store_sums(
    dbefore, dafter, sum_m, sum_n, b, i, h, heads, rows, FIRST: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Store the gradients of the matrices of rows i, or their sum, as those of this program."""
    square = (h < heads)[:, None] & (h < heads)[None, :]
    place = h[:, None] * heads + h[None, :]
    if EACH:
        place = (b * rows + i)[:, None, None] * heads * heads + place[None, :, :]
        square = (i < rows)[:, None, None] & square[None, :, :]
    else:
        place = tl.program_id(0) * (2 if FIRST else 1) * heads * heads + place  # dbefore, if there is one, and dafter
        sum_n, sum_m = tl.sum(sum_n, 0), tl.sum(sum_m, 0)
    tl.store(dafter + place, sum_n, mask=square)
    if FIRST:
        tl.store(dbefore + place, sum_m, mask=square)


@remember_calls
@triton.jit
def _backward_rows(
    s, before, after, key_before, key_after, mask, grad, lse, delta, dbefore, dafter, heads, rows, keys,
    x_b, x_i, x_r, x_c, y_r, y_c,
    m_b, m_i, m_j, T: tl.constexpr, FIRST: tl.constexpr, KEYED: tl.constexpr,
    EACH: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, H: tl.constexpr, BI: tl.constexpr,
    BJ: tl.constexpr,
):  # fmt: skip
    """BI rows of one example: δ and the gradients of their matrices, of each row or, without EACH, their sum."""
    tiles = tl.cdiv(rows, BI)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tiles - 1 - tl.program_id(0) % tiles) * BI
    i, h = first + tl.arange(0, BI), tl.arange(0, H)
    s += b * heads * rows * keys
    grad += b * heads * rows * keys
    key_before += b * keys * heads * heads
    key_after += b * keys * heads * heads
    m = load_matrices(before + b * x_b, i, h, heads, rows, x_i, x_r, x_c, T)
    n = load_matrices(after + b * x_b, i, h, heads, rows, x_i, y_r, y_c, T)
    plane = (b * heads + h[None, :]) * rows + i[:, None]
    known = (i < rows)[:, None] & (h < heads)[None, :]
    level = tl.load(lse + plane, mask=known, other=0.0)
    total = tl.zeros((BI, H), dtype=tl.float32)
    sum_n, sum_m = tl.zeros((BI, H, H), dtype=tl.float32), tl.zeros((BI, H, H), dtype=tl.float32)
    sum_up = tl.zeros((BI, H, H), dtype=tl.float32)
    for left in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
        j = left + tl.arange(0, BJ)
        a, z, seen = score_heads(s, m, key_before, mask, b, i, j, h, heads, rows, keys, m_b, m_i, m_j, T, FIRST, KEYED,
                                 MASKED, CAUSAL)  # fmt: skip
        p = tl.exp2(z - level[:, None, :])
        place, inside = place_pairs(i, j, h, heads, rows, keys)
        g = tl.where(seen, tl.load(grad + place, mask=inside, other=0.0).to(tl.float32), 0.0)
        turned = tl.permute(p.to(T), (0, 2, 1))
        sum_n = tl.dot(turned, g.to(T), sum_n, input_precision="ieee")
        if FIRST or KEYED:
            up = p * compose_heads(g, tl.permute(n, (0, 2, 1)), key_after, j, h, heads, keys, T, KEYED, True)
        if FIRST:
            turned = tl.permute(a.to(T), (0, 2, 1))
            sum_up = tl.dot(turned, up.to(T), sum_up, input_precision="ieee")
            sum_m = tl.dot(turned, p.to(T), sum_m, input_precision="ieee")
        if KEYED:
            total += tl.sum(up, 1)
    if not KEYED:
        total = tl.sum(sum_n * n.to(tl.float32), 2)  # Σ_j P dP = Σ_g n_hg Σ_j p_h dw_g
    tl.store(delta + plane, total, mask=known)
    sum_m = sum_up - sum_m * total[:, None, :]
    _store_sums(dbefore, dafter, sum_m, sum_n, b, i, h, heads, rows, FIRST, EACH)


@triton.jit
def _clear(x, start, end, j, h, heads, rows, keys, BI: tl.constexpr, BJ: tl.constexpr, H: tl.constexpr):
    """Write 0 at the pairs of keys j and the tiles of rows from `start` to `end`."""
    for above in range(start, end, BI):
        place, inside = place_pairs(above + tl.arange(0, BI), j, h, heads, rows, keys)
        tl.store(x + place, tl.zeros((BI, BJ, H), dtype=tl.float32), mask=inside)


@triton.jit
def _store_key_sums(dkey_before, dkey_after, sum_m, sum_n, first, j, h, heads, keys):
    """Store a span's part of the gradients of the matrices of keys j; first: where its parts begin."""
    place = h[None, :, None] * heads + h[None, None, :] + ((first + j) * heads * heads)[:, None, None]
    inside = (j < keys)[:, None, None] & (h < heads)[None, :, None] & (h < heads)[None, None, :]
    tl.store(dkey_before + place, sum_m, mask=inside)
    tl.store(dkey_after + place, sum_n, mask=inside)


@remember_calls
@triton.jit
def _backward_keys(
    s, before, after, key_before, key_after, mask, grad, lse, delta, ds, dkey_before, dkey_after, heads,
    rows, keys, x_b, x_i, x_r, x_c, y_r, y_c,
    m_b, m_i, m_j, T: tl.constexpr, FIRST: tl.constexpr, KEYED: tl.constexpr,
    EACH: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, H: tl.constexpr, BI: tl.constexpr,
    BJ: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """BJ keys and SPAN rows of one example: dS, 0 where hidden, and these rows' part of the gradients of K.

    Over 50 lines, because the sums of both K stay in registers while dS is written.
    """
    spans, tiles = tl.cdiv(rows, SPAN), tl.cdiv(keys, BJ)
    b = (tl.program_id(0) // (spans * tiles)).to(tl.int64)
    begin, left = tl.program_id(0) // tiles % spans * SPAN, tl.program_id(0) % tiles * BJ
    j, h = left + tl.arange(0, BJ), tl.arange(0, H)
    s += b * heads * rows * keys
    grad += b * heads * rows * keys
    ds += b * heads * rows * keys
    key_before += b * keys * heads * heads
    key_after += b * keys * heads * heads
    end = tl.minimum(begin + SPAN, rows)
    start = tl.minimum(end, tl.maximum(begin, first_query(left, rows, keys, CAUSAL) // BI * BI))
    _clear(ds, begin, start, j, h, heads, rows, keys, BI, BJ, H)
    if not EACH:
        m = load_matrices(before, tl.arange(0, BI), h, heads, BI, 0, x_r, x_c, T)
        n = tl.permute(load_matrices(after, tl.arange(0, BI), h, heads, BI, 0, y_r, y_c, T), (0, 2, 1))
    if KEYED:
        sum_m, sum_n = tl.zeros((BJ, H, H), dtype=tl.float32), tl.zeros((BJ, H, H), dtype=tl.float32)
    for below in range(start, end, BI):
        i = below + tl.arange(0, BI)
        if EACH:
            m = load_matrices(before + b * x_b, i, h, heads, rows, x_i, x_r, x_c, T)
            n = tl.permute(load_matrices(after + b * x_b, i, h, heads, rows, x_i, y_r, y_c, T), (0, 2, 1))
        a, z, seen = score_heads(s, m, key_before, mask, b, i, j, h, heads, rows, keys, m_b, m_i, m_j, T, FIRST, KEYED,
                                 MASKED, CAUSAL)  # fmt: skip
        plane = (b * heads + h[None, :]) * rows + i[:, None]
        known = (i < rows)[:, None] & (h < heads)[None, :]
        p = tl.exp2(z - tl.load(lse + plane, mask=known, other=0.0)[:, None, :])
        place, inside = place_pairs(i, j, h, heads, rows, keys)
        g = tl.where(seen, tl.load(grad + place, mask=inside, other=0.0).to(tl.float32), 0.0)
        dp = compose_heads(g, n, key_after, j, h, heads, keys, T, KEYED, True)
        dz = p * (dp - tl.load(delta + plane, mask=known, other=0.0)[:, None, :])
        back = dz
        if FIRST:
            back = compose_heads(dz, tl.permute(m, (0, 2, 1)), key_before, j, h, heads, keys, T, KEYED, True)
        tl.store(ds + place, back, mask=inside)
        if KEYED:
            turned = tl.permute(p.to(T), (1, 2, 0))
            sum_n = tl.dot(turned, tl.permute(g.to(T), (1, 0, 2)), sum_n, input_precision="ieee")
            turned = tl.permute(a.to(T), (1, 2, 0))
            sum_m = tl.dot(turned, tl.permute(dz.to(T), (1, 0, 2)), sum_m, input_precision="ieee")
    if KEYED:
        first = (b * spans + begin // SPAN) * keys
        _store_key_sums(dkey_before, dkey_after, sum_m, sum_n, first, j, h, heads, keys)


@operator("attnlab::mix_heads")
def mix_heads(
    s: Tensor, before: Tensor | None, after: Tensor, keyed: Tensor | None, mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights W (b,h,i,j) of logits s (b,h,i,j), and the rows' levels L (b,h,i), in base 2.

    before, after   M of S and of P, (b,i,h,h) or (h,h), heads in, heads out; before may be None
    keyed           K of S and of P, (2,b,j,h,h), or None
    mask            bool, broadcastable to (b,1,i,j), or None; causal is aligned bottom-right
    """
    note_launch("mixed_heads")
    out, lse = _allocate_outputs(s)
    _compute_weights(s, before, after, keyed, mask, out, lse, causal, known=False)
    return out, lse


def mix_heads_again(
    s: Tensor, lse: Tensor, causal: bool, before: Tensor | None, after: Tensor,
    keyed: Tensor | None, mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """The weights alone, from the levels that `mix_heads` returned, in one sweep; not recorded by autograd."""
    out = torch.empty_like(s)
    _compute_weights(s, before, after, keyed, mask, out, lse, causal, known=True)
    return out


def _compute_weights(
    s: Tensor, before: Tensor | None, after: Tensor, keyed: Tensor | None, mask: Tensor | None,
    out: Tensor, lse: Tensor, causal: bool, *, known: bool,
) -> None:  # fmt: skip
    pointers, numbers, flags = _describe(s, before, after, keyed, mask, causal)
    tile = choose_rows(s, keyed=flags["KEYED"])
    with select_device(s):
        grid = (len(s) * divide_up(s.shape[2], tile["BI"]),)
        _forward[grid](*pointers, out, lse, *numbers, KNOWN=known, **flags, **tile)


@operator("attnlab::mix_heads_backward")
def mix_heads_backward(
    grad: Tensor, s: Tensor, before: Tensor | None, after: Tensor, keyed: Tensor | None,
    mask: Tensor | None, lse: Tensor, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of s, of before, if there is one, and after together, and of keyed, empty if that is None."""
    ds, drows, dkeys = compute_slopes(grad, s, lse, causal, before, after, keyed, mask)
    if after.dim() == 2:
        drows = drows.sum(0).to(after.dtype)
    return ds, drows, dkeys


def compute_slopes(
    grad: Tensor, s: Tensor, lse: Tensor, causal: bool, before: Tensor | None, after: Tensor,
    keyed: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of s, before and after together, and keyed; those of matrices that all rows share in parts.

    before, if there is one, and after: (1 or 2,b,i,h,h), or parts in float32 (·,1 or 2,h,h).
    """
    pointers, numbers, flags = _describe(s, before, after, keyed, mask, causal)
    (b, h, i, j), tile = s.shape, choose_rows(s, keyed=flags["KEYED"], backward=True)
    programs, each = b * divide_up(i, tile["BI"]), flags["EACH"]
    (ds, delta), grad = _allocate_outputs(s), grad.contiguous()
    kinds = 1 if before is None else 2
    shape = (kinds, b, i, h, h) if each else (programs, kinds, h, h)
    drows = s.new_empty(shape, dtype=after.dtype if each else torch.float32)
    with select_device(s):
        halves = drows.unbind(0 if each else 1)
        _backward_rows[(programs,)](*pointers, grad, lse, delta, halves[0], halves[-1], *numbers, **flags, **tile)
    tile = choose_keys(s, keyed=flags["KEYED"])
    spans = divide_up(i, tile["SPAN"])
    dkeys = after.new_empty(2, 0)
    if keyed is not None:
        dkeys = s.new_empty((2, b, spans, j, h, h), dtype=keyed.dtype if spans == 1 else torch.float32)
    with select_device(s):
        programs = b * spans * divide_up(j, tile["BJ"])
        _backward_keys[(programs,)](*pointers, grad, lse, delta, ds, *dkeys.unbind(), *numbers, **flags, **tile)
    if keyed is not None:
        dkeys = dkeys.squeeze(2) if spans == 1 else dkeys.sum(2).to(keyed.dtype)
    return ds, drows, dkeys


def _describe(
    s: Tensor, before: Tensor | None, after: Tensor, keyed: Tensor | None, mask: Tensor | None,
    causal: bool,
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """Return the pointers, the numbers and the flags that all kernels take."""
    s, after = s.contiguous(), after.contiguous() if after.dim() == 4 else after
    (_, h, i, j), each, seen = s.shape, after.dim() == 4, read_mask(mask, causal, s, s.mT)
    first = after if before is None else before.contiguous() if each else before
    keys = (s, s) if keyed is None else keyed.contiguous().unbind()
    flags = {
        "FIRST": before is not None,
        "KEYED": keyed is not None,
        "EACH": each,
        "T": TYPES[s.dtype],
    }
    strides = (*((i * h * h, h * h) if each else (0, 0)), *first.stride()[-2:], *after.stride()[-2:])
    pointers = (s, first, after, *keys, seen.mask)
    return pointers, (h, i, j, *strides, *seen.strides), flags | seen.flags | {"H": round_up(h)}


@mix_heads.register_fake
def _(s: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _allocate_outputs(s)


@mix_heads_backward.register_fake
def _(grad: Tensor, s: Tensor, before: Tensor | None, after: Tensor, keyed: Tensor | None,
      *rest: Any) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dkeys = after.new_empty((2, 0) if keyed is None else keyed.shape)
    return s.new_empty(s.shape), after.new_empty(1 if before is None else 2, *after.shape), dkeys


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.save_for_backward(*given, output[1])


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    saved = ctx.saved_tensors  # a checkpoint computes them again, and once
    ds, drows, dkeys = mix_heads_backward(grad, *saved, ctx.causal)
    made = (ds, drows[0], drows[-1], dkeys)
    return *(None if x is None else dx for x, dx in zip(saved[:4], made, strict=True)), None, None


mix_heads.register_autograd(_gradients, setup_context=_save_inputs)


def _allocate_outputs(s: Tensor) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), s.new_empty(s.shape[:3], dtype=torch.float32)
