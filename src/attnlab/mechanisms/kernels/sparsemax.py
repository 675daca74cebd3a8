"""Sparsemax and 1.5-entmax of stored logits: one program holds a row. No sorting: Newton's method finds the threshold.

    sparsemax    p = [z − τ]₊        z = s − max s            Σ [z − τ]₊ = 1
    1.5-entmax   p = [z − τ]₊²       z = (s − max s) / 2      ‖[z − τ]₊‖ = 1         both norms are convex in τ

From τ = −1, where the norm is at least 1, each step goes up to at most the root: τ + (‖u‖ − 1) ‖u‖ / Σ u for entmax,
τ + (Σ u − 1) / |u| for sparsemax, with u = [z − τ]₊. With a constant support both norms are linear or nearly so, so few
steps reach the rounding of float32. Gradients, of the weights p that are stored (r = √p for entmax, 1[p > 0] else):

    ds = r (dp − Σ r dp / Σ r)

Logits are in float32, since rounding them changes which keys have a weight. `wide_logits` computes them.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    find_device_gap,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    round_up,
    select_device,
)
from attnlab.mechanisms.kernels.pairs import is_visible, read_mask
from attnlab.mechanisms.kernels.tiles import TYPES

SPARSEMAX, ENTMAX = (tl.constexpr(form) for form in range(2))
LONGEST = 16_384  # keys: a row stays in registers
STEPS = tl.constexpr(32)
CLOSE = tl.constexpr(1e-5)  # after a step as small as this, τ has the precision of float32


@remember_calls
@triton.jit
def _project(
    s, mask, out, heads, rows, keys, m_b, m_i, m_j, FORM: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The weights of one row; 0 where it sees nothing."""
    row = tl.program_id(0).to(tl.int64)
    b, j = row // (heads * rows), tl.arange(0, KEYS)
    i = (row % rows).to(tl.int32) + tl.zeros((1,), dtype=tl.int32)
    seen = is_visible(mask, b, i, j, rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
    z = tl.load(s + row * keys + j, mask=j < keys, other=0.0).to(tl.float32)  # whole, so that loads are wide
    z = tl.where(seen, z, float("-inf"))
    top = tl.max(z, 0)
    z = z - tl.where(top == float("-inf"), 0.0, top)
    if FORM == ENTMAX:
        z = z * 0.5
    threshold, moved, steps = -1.0, 1.0, 0
    while (moved > CLOSE) & (steps < STEPS):
        u = tl.maximum(z - threshold, 0.0)
        total = tl.sum(u, 0)
        if FORM == ENTMAX:
            norm = tl.sqrt(tl.sum(u * u, 0))
            moved = (norm - 1.0) * norm / tl.maximum(total, 1e-30)
        else:
            moved = (total - 1.0) / tl.maximum(tl.sum(tl.where(u > 0.0, 1.0, 0.0), 0), 1.0)
        threshold += moved
        steps += 1
    u = tl.maximum(z - threshold, 0.0)
    p = u * u if FORM == ENTMAX else u
    tl.store(out + row * keys + j, p, mask=j < keys)


@remember_calls
@triton.jit
def _differentiate(p, dp, ds, keys, FORM: tl.constexpr, KEYS: tl.constexpr):
    """The gradient of the logits of one row."""
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, KEYS)
    weight = tl.load(p + row * keys + j, mask=j < keys, other=0.0).to(tl.float32)
    grad = tl.load(dp + row * keys + j, mask=j < keys, other=0.0).to(tl.float32)
    r = tl.sqrt(weight) if FORM == ENTMAX else tl.where(weight > 0.0, 1.0, 0.0)
    mean = tl.sum(r * grad, 0) / tl.maximum(tl.sum(r, 0), 1e-30)
    tl.store(ds + row * keys + j, r * (grad - mean), mask=j < keys)


@operator("attnlab::wide_logits")
def wide_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale·qkᵀ in float32, (b,h,i,j), of q (b,h,i,d) and k (b,h,j,d) in any type, whose products are exact."""
    power = 2.0 ** round(math.log2(scale))  # q times this is exact
    x, y = (q * power).flatten(0, 1), k.flatten(0, 1).mT
    if q.is_cuda and q.dtype != torch.float32:
        s = torch.bmm(x, y, out_dtype=torch.float32)
    else:
        s = torch.bmm(x.float(), y.float())
    s = s if scale == power else s.mul_(scale / power)
    return s.view(*q.shape[:3], k.shape[2])


@operator("attnlab::wide_logits_backward")
def wide_logits_backward(grad: Tensor, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """dq and dk, by products in the type of q and k."""
    grad = grad.to(q.dtype)
    return (grad @ k).mul_(scale), (grad.mT @ q).mul_(scale)


@wide_logits.register_fake
def _(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.float32)


@wide_logits_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *factors, ctx.scale = inputs
    ctx.save_for_backward(*factors)


def _pass_to_factors(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *wide_logits_backward(grad, *ctx.saved_tensors, ctx.scale), None


wide_logits.register_autograd(_pass_to_factors, setup_context=_save_factors)


@operator("attnlab::project_rows")
def project_rows(s: Tensor, mask: Tensor | None, causal: bool, form: int, dtype: torch.dtype) -> Tensor:
    """Weights of logits s (b,h,i,j), in dtype. A logit of −∞ hides its key."""
    note_launch("sparsemax")
    s, seen = s.contiguous(), read_mask(mask, causal, s, s.mT)
    out, (_, heads, rows, keys) = torch.empty_like(s, dtype=dtype), s.shape
    with select_device(s):
        _project[(s.numel() // max(keys, 1),)](
            s, seen.mask, out, heads, rows, keys, *seen.strides, FORM=form, **seen.flags, **choose_row(keys)
        )
    return out


@operator("attnlab::project_rows_backward")
def project_rows_backward(grad: Tensor, weights: Tensor, form: int, dtype: torch.dtype) -> Tensor:
    """Gradient of the logits, in dtype."""
    grad, out, keys = grad.contiguous(), torch.empty_like(weights, dtype=dtype), weights.shape[3]
    with select_device(weights):
        _differentiate[(weights.numel() // max(keys, 1),)](weights, grad, out, keys, FORM=form, **choose_row(keys))
    return out


@project_rows.register_fake
def _(s: Tensor, *rest: Any) -> Tensor:
    return s.new_empty(s.shape, dtype=rest[-1])


@project_rows_backward.register_fake
def _(grad: Tensor, weights: Tensor, form: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(weights, dtype=dtype)


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.form, ctx.dtype = inputs[3], inputs[0].dtype
    ctx.save_for_backward(output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    return project_rows_backward(grad, *ctx.saved_tensors, ctx.form, ctx.dtype), None, None, None, None


project_rows.register_autograd(_gradients, setup_context=_save_weights)


def choose_row(keys: int) -> dict[str, int]:
    """The width of a row in registers, and its warps: 16 numbers in each of their threads, or more in long rows."""
    wide = round_up(keys)
    return {"KEYS": wide, "num_warps": min(16, max(1, wide // 512))}


def find_gap(q: Tensor, k: Tensor) -> str | None:
    """Name what these kernels do not cover, or return None."""
    if gap := find_device_gap(q):
        return gap
    if q.dtype not in TYPES or k.dtype != q.dtype:
        return f"q and k in {q.dtype} and {k.dtype}"
    return f"{k.shape[2]:,} keys (at most {LONGEST:,})" if k.shape[2] > LONGEST else None
