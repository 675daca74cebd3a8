"""What selective attention subtracts, for a band of queries: one program sums down some keys' columns of one example.

    M_ij = max(0, z_ij) where query i may mask key j     −F_i = −(before + Σ_{l < i} M_l)     after = before + Σ_l M_l
    dM_l = da − Σ_{i > l} d(−F)_i        dz = dM ∘ 1[z > 0]        d(before) = da − Σ_i d(−F)_i       da: of after

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
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    select_device,
)
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
    z, mask, first, before, fade, after, rows, keys, offset, m_b, m_i, m_j, f_b, f_i,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(keys, BJ)
    b = (tl.program_id(0) // columns).to(tl.int64)
    j = tl.program_id(0) % columns * BJ + tl.arange(0, BJ)
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
    z, mask, first, dfade, dafter, dz, dbefore, rows, keys, offset, m_b, m_i, m_j, f_b, f_i,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(keys, BJ)
    b = (tl.program_id(0) // columns).to(tl.int64)
    j = tl.program_id(0) % columns * BJ + tl.arange(0, BJ)
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
    z, before, (b, _, _, keys) = z.contiguous(), before.contiguous(), z.shape
    fade, after = torch.empty_like(z, dtype=torch.float32), torch.empty_like(before)
    pointers, numbers, flags = _describe(z, mask, causal, offset)
    with select_device(z):
        _sum_masking[(b * divide_up(keys, TILE["BJ"]),)](*pointers, before, fade, after, *numbers, **flags)
    return fade, after


@operator("attnlab::sum_masking_backward")
def sum_masking_backward(
    dfade: Tensor, dafter: Tensor, z: Tensor, mask: Tensor | None, causal: bool, offset: int
) -> tuple[Tensor, Tensor]:
    """dz, in the type of z, and the gradient of before."""
    z, dfade, dafter, (b, _, _, keys) = z.contiguous(), dfade.contiguous(), dafter.contiguous(), z.shape
    dz, dbefore = torch.empty_like(z), torch.empty_like(dafter)
    pointers, numbers, flags = _describe(z, mask, causal, offset)
    with select_device(z):
        grid = (b * divide_up(keys, TILE["BJ"]),)
        _sum_masking_backward[grid](*pointers, dfade, dafter, dz, dbefore, *numbers, **flags)
    return dz, dbefore


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
