"""What selective attention subtracts, for a band of queries: one program sums down some keys' columns of one example.

    M_ij = max(0, z_ij) where query i may mask key j     −F_i = −(before + Σ_{l < i} M_l)     after = before + Σ_l M_l
    dM_l = da − Σ_{i > l} d(−F)_i        dz = dM ∘ 1[z > 0]        d(before) = da − Σ_i d(−F)_i       da: of after

`select_tokens` is the whole attention of one band: the first head's logits, −F, and softmax with the bias −F.

Query i is the key `offset` + i. It may mask the keys before its own that it sees, except for the first that it sees,
if it sees itself. Sums are in float32 and in the order of the rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    divide_up,
    empty_by_token,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    select_device,
)
from attnlab.mechanisms.kernels.one_pass import one_pass, one_pass_backward
from attnlab.mechanisms.kernels.online import SOFTMAX
from attnlab.mechanisms.kernels.pair_products import write_products, write_scores
from attnlab.mechanisms.kernels.pairs import is_visible, read_mask

TILE = {"BI": 32, "BJ": 32, "num_warps": 4}


@triton.jit
def _may_mask(
    mask, first, b, i, j, rows, keys, offset, m_b, m_i, m_j, f_b, f_i, MASKED: tl.constexpr, CAUSAL: tl.constexpr
):
    """Whether query i may mask key j, (BI,BJ); first: the first key that each query sees."""
    own = i + offset
    seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
    present = is_visible(mask, b, i, own, rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
    begin = tl.zeros_like(i)
    if MASKED:
        begin = tl.load(first + b * f_b + i * f_i, mask=i < rows, other=0)
    return seen & present[:, None] & (j[None, :] < own[:, None]) & (j[None, :] > begin[:, None])


@remember_calls
@triton.jit
def _sum_masking(
    z, mask, first, before, fade, after, rows, keys, offset, m_b, m_i, m_j, f_b, f_i, CONTINUED: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(keys, BJ)
    b = (tl.program_id(0) // columns).to(tl.int64)
    j = tl.program_id(0) % columns * BJ + tl.arange(0, BJ)
    total = tl.zeros((BJ,), dtype=tl.float32)
    if CONTINUED:
        total = tl.load(before + b * keys + j, mask=j < keys, other=0.0)
    for top in range(0, rows, BI):
        i = top + tl.arange(0, BI)
        place, inside = (b * rows + i[:, None]) * keys + j[None, :], (i < rows)[:, None] & (j < keys)[None, :]
        may = _may_mask(mask, first, b, i, j, rows, keys, offset, m_b, m_i, m_j, f_b, f_i, MASKED, CAUSAL)
        s = tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
        masking = tl.where(may, tl.maximum(s, 0.0), 0.0)
        tl.store(fade + place, masking - tl.cumsum(masking, 0) - total[None, :], mask=inside)
        total += tl.sum(masking, 0)
    tl.store(after + b * keys + j, total, mask=j < keys)


@remember_calls
@triton.jit
def _sum_masking_backward(
    z, mask, first, dfade, dafter, dz, dbefore, rows, keys, offset, m_b, m_i, m_j, f_b, f_i, CONTINUED: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(keys, BJ)
    b = (tl.program_id(0) // columns).to(tl.int64)
    j = tl.program_id(0) % columns * BJ + tl.arange(0, BJ)
    total = tl.zeros((BJ,), dtype=tl.float32)
    if CONTINUED:
        total = tl.load(dafter + b * keys + j, mask=j < keys, other=0.0)
    tiles = tl.cdiv(rows, BI)
    for tile in range(0, tiles):
        i = (tiles - 1 - tile) * BI + tl.arange(0, BI)
        place, inside = (b * rows + i[:, None]) * keys + j[None, :], (i < rows)[:, None] & (j < keys)[None, :]
        may = _may_mask(mask, first, b, i, j, rows, keys, offset, m_b, m_i, m_j, f_b, f_i, MASKED, CAUSAL)
        s = tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(dfade + place, mask=inside, other=0.0)
        whole = tl.sum(slope, 0)
        later = whole[None, :] - tl.cumsum(slope, 0)
        tl.store(dz + place, tl.where(may & (s > 0.0), total[None, :] - later, 0.0), mask=inside)
        total -= whole
    tl.store(dbefore + b * keys + j, total, mask=j < keys)


@operator("attnlab::sum_masking")
def sum_masking(z: Tensor, mask: Tensor | None, before: Tensor, causal: bool, offset: int) -> tuple[Tensor, Tensor]:
    """−F (b,1,i,j) and after (b,1,1,j), in float32, of the first head's logits z (b,1,i,j); before (b,1,1,j)."""
    note_launch("selective")
    return _write_sums(z.contiguous(), mask, before.contiguous(), causal, offset)


def _write_sums(
    z: Tensor, mask: Tensor | None, before: Tensor | None, causal: bool, offset: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, _, _, keys = z.shape
    fade, after = torch.empty_like(z, dtype=torch.float32), z.new_empty((b, 1, 1, keys), dtype=torch.float32)
    pointers, numbers, flags = _describe(z, mask, causal, offset)
    flags["CONTINUED"] = before is not None
    with select_device(z):
        grid = (b * divide_up(keys, TILE["BJ"]),)
        _sum_masking[grid](*pointers, z if before is None else before, fade, after, *numbers, **flags)
    return fade, after


@operator("attnlab::sum_masking_backward")
def sum_masking_backward(
    dfade: Tensor, dafter: Tensor, z: Tensor, mask: Tensor | None, causal: bool, offset: int
) -> tuple[Tensor, Tensor]:
    """dz, in the type of z, and the gradient of before."""
    return _write_sums_backward(dfade.contiguous(), dafter.contiguous(), z.contiguous(), mask, causal, offset)


def _write_sums_backward(
    dfade: Tensor, dafter: Tensor | None, z: Tensor, mask: Tensor | None, causal: bool, offset: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, _, _, keys = z.shape
    dz, dbefore = torch.empty_like(z), z.new_empty((b, 1, 1, keys), dtype=torch.float32)
    pointers, numbers, flags = _describe(z, mask, causal, offset)
    flags["CONTINUED"] = dafter is not None
    with select_device(z):
        grid = (b * divide_up(keys, TILE["BJ"]),)
        _sum_masking_backward[grid](
            *pointers, dfade, z if dafter is None else dafter, dz, dbefore, *numbers, **flags
        )  # fmt: skip
    return dz, dbefore


@operator("attnlab::select_tokens")
def select_tokens(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropping: Tensor | None, causal: bool, scale: float,
    rate: float, kept: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Selective attention of all queries at once: context (b,h,i,d), levels, the first head's logits z, and −F.

    dropping   the seed of dropout, or None
    kept       whether z and −F are kept for the backward pass; else it computes them again, and they are empty
    """
    note_launch("selective")
    z, fade = _write_fade(q, k, mask, causal, scale)
    given = (mask, fade, None, None, None, dropping, SOFTMAX.value, causal, scale, rate, 0, 0.0)
    out, lse = one_pass.function(q, k, v, *given)
    return (out, lse, z, fade) if kept else (out, lse, z.new_empty(0), fade.new_empty(0))


def _write_fade(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The first head's logits and −F, (b,1,i,j)."""
    z = q.new_empty(len(q), 1, q.shape[2], k.shape[2])
    write_scores(q[:, :1], k[:, :1], z, None, causal=causal, scale=scale)
    return z, _write_sums(z, mask, None, causal, k.shape[2] - q.shape[2])[0]


@operator("attnlab::select_tokens_backward")
def select_tokens_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropping: Tensor | None, out: Tensor,
    lse: Tensor, z: Tensor, fade: Tensor, causal: bool, scale: float, rate: float, kept: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV."""
    if not kept:
        z, fade = _write_fade(q, k, mask, causal, scale)
    form = (SOFTMAX.value, causal, scale, rate, 0, 0.0)
    given = (grad, q, k, v, mask, fade, None, None, dropping, out, lse)
    dq, dk, dv, dfade = one_pass_backward.function(*given, *form, True, False)
    dz, _ = _write_sums_backward(dfade, None, z, mask, causal, k.shape[2] - q.shape[2])
    more = write_products(dz, q[:, :1], k[:, :1], causal=causal, scale=scale)
    dq[:, :1] += more[0]
    dk[:, :1] += more[1]
    return dq, dk, dv


def _describe(
    z: Tensor, mask: Tensor | None, causal: bool, offset: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Pointers, numbers and constants that both kernels take."""
    (b, _, rows, keys), seen, first = z.shape, read_mask(mask, causal, z, z.mT), z
    steps: tuple[int, ...] = (0, 0)
    if mask is not None:
        first = mask[(None,) * (4 - mask.dim())].int().argmax(-1)[:, 0].int()  # (b|1,i|1)
        steps = first.expand(b, rows).stride()
    return (z, seen.mask, first), (rows, keys, offset, *seen.strides, *steps), seen.flags | TILE


@sum_masking.register_fake
def _(z: Tensor, mask: Tensor | None, before: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape, dtype=torch.float32), before.new_empty(before.shape)


@sum_masking_backward.register_fake
def _(dfade: Tensor, dafter: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), dafter.new_empty(dafter.shape)


def _save_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, mask, _, *ctx.options = inputs
    ctx.save_for_backward(z, mask)


def _gradients(ctx: Any, dfade: Tensor, dafter: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    dz, dbefore = sum_masking_backward(dfade, dafter, *ctx.saved_tensors, *ctx.options)
    return dz, None, dbefore, None, None


sum_masking.register_autograd(_gradients, setup_context=_save_logits)


@select_tokens.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (b, h, i, _), j = q.shape, k.shape[2]
    lse, z = q.new_empty((b, h, i), dtype=torch.float32), q.new_empty((b, 1, i, j) if rest[-1] else (0,))
    return empty_by_token(q), lse, z, torch.empty_like(z, dtype=torch.float32)


@select_tokens_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_token(q), empty_by_token(k), empty_by_token(v)


def _save_tokens(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask, dropping, *ctx.options = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, dropping, *output)


def _differentiate(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    return *select_tokens_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 6


select_tokens.register_autograd(_differentiate, setup_context=_save_tokens)
