"""Attention whose heads are mixed, by bands of queries, as one operator: what it keeps is linear in the length.

    S_R = q̃_R Kᵀ        W_R: by kernels/mixed_heads.py        C_R = (W_R ∘ D_R) V        R: a band's rows; D: dropout

    backward   S_R and W_R again, with the known levels of the rows      dW_R = (G_R Vᵀ) ∘ D_R      dS_R by the kernels
               dV = Σ_R (W_R ∘ D_R)ᵀ G_R        dq̃_R = dS_R K        dK = Σ_R dS_Rᵀ q̃_R, summed in float32

q̃_i is the queries i − count + 1, …, i side by side; 0 before the first. Recorded one by one and computed again by a
checkpoint, as in by_rows.py, the operations of the bands would take the host three times as long as the device.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.mechanisms.by_rows import cut_pairs, draw_kept
from attnlab.mechanisms.kernels.launch import operator, refuse_second_derivative


class Band(NamedTuple):
    """One band of queries: its rows, the end of its keys, and the arguments of `mix_heads` after the logits."""

    rows: slice
    end: int
    seed: Tensor | None  # of dropout
    given: tuple[Any, ...]


@operator("attnlab::mix_bands")
def mix_bands(
    q: Tensor, k: Tensor, v: Tensor, near: Tensor | None, before: Tensor | None, after: Tensor, keyed: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, causal: bool, rate: float, size: int, count: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d) and the levels (b,h,i) of the rows; q (b,h,i,e), k (b,h,j,count·e), v (b,h,j,d).

    near, before, after, keyed   see `mix_heads`; of all rows and keys
    seed, rate                   of dropout; seed is None without it
    size                         number of queries in a band
    """
    from attnlab.mechanisms.kernels.mixed_heads import mix_heads

    k, v, contexts, levels = k.contiguous(), v.contiguous(), [], []
    padded = _pad(q, count)
    for band in _split(q, k, near, before, after, keyed, mask, seed, causal, size):
        s = (_unroll(padded, band.rows, count) @ k[:, :, : band.end].mT).to(q.dtype)
        weights, level = mix_heads.function(s, *band.given, causal)
        contexts.append(_drop(weights, band, rate) @ v[:, :, : band.end])
        levels.append(level)
    return torch.cat(contexts, dim=2), torch.cat(levels, dim=2)


@operator("attnlab::mix_bands_backward")
def mix_bands_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, near: Tensor | None, before: Tensor | None, after: Tensor,
    keyed: Tensor | None, mask: Tensor | None, seed: Tensor | None, lse: Tensor, causal: bool, rate: float, size: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, near, before, after and keyed; that of an argument that is None is empty."""
    from attnlab.mechanisms.kernels.mixed_heads import mix_heads_again, mix_heads_backward

    k, v, padded = k.contiguous(), v.contiguous(), _pad(q, count)
    given = (padded, k, v, near, before, after, keyed)
    dq, dk, dv, *slopes = (q.new_zeros(0 if x is None else x.shape, dtype=torch.float32) for x in given)
    for band in _split(q, k, near, before, after, keyed, mask, seed, causal, size):
        rows, end = band.rows, band.end
        queries, level, g = _unroll(padded, rows, count), lse[:, :, rows].contiguous(), grad[:, :, rows].contiguous()
        s = queries @ k[:, :, :end].mT
        dv[:, :, :end] += _drop(mix_heads_again(s, level, causal, *band.given), band, rate).mT @ g
        dweights = _drop(g @ v[:, :, :end].mT, band, rate)
        ds, *others = mix_heads_backward.function(dweights, s, *band.given, level, causal)
        dk[:, :, :end] += ds.mT @ queries
        for part, x in enumerate((ds @ k[:, :, :end]).chunk(count, dim=-1)):
            dq[:, :, rows.start + part : rows.stop + part] += x
        places = (
            (slice(None), slice(None), rows),
            (slice(None), rows),
            (slice(None), rows),
            (slice(None),) * 2 + (slice(end),),
        )
        for whole, x, place in zip(slopes, others, places, strict=True):
            if whole.dim() > 2:
                whole[place] += x
            elif whole.numel():
                whole += x
    made = (dq[:, :, count - 1 :], dk, dv, *slopes)
    types = (q.dtype if x is None else x.dtype for x in given)
    return tuple(x.to(dtype).contiguous() for x, dtype in zip(made, types, strict=True))  # type: ignore[return-value]


def _split(
    q: Tensor, k: Tensor, near: Tensor | None, before: Tensor | None, after: Tensor, keyed: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, causal: bool, size: int,
) -> Iterator[Band]:  # fmt: skip
    """Yield the bands of `size` queries. A causal band has no keys after its last row."""
    length, keys = q.shape[2], k.shape[2]
    for first in range(0, length, size):
        last = min(first + size, length)
        end = min(keys, max(0, keys - length + last)) if causal else keys
        matrices = (x if x is None or x.dim() == 2 else x[:, first:last] for x in (before, after))
        given = (
            None if near is None else near[:, :, first:last],
            *matrices,
            None if keyed is None else keyed[:, :, :end],
        )
        yield Band(slice(first, last), end, seed, (*given, cut_pairs(mask, first, last, end)))


def _pad(q: Tensor, count: int) -> Tensor:
    return F.pad(q, (0, 0, count - 1, 0)) if count > 1 else q.contiguous()


def _unroll(padded: Tensor, rows: slice, count: int) -> Tensor:
    """q̃ of a band."""
    parts = [padded[:, :, rows.start + part : rows.stop + part] for part in range(count)]
    return torch.cat(parts, dim=-1) if count > 1 else parts[0]


def _drop(weights: Tensor, band: Band, rate: float) -> Tensor:
    """Apply dropout in place."""
    if band.seed is None:
        return weights
    return weights.mul_(draw_kept.function(weights, band.seed, rate, band.rows.start))


@mix_bands.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@mix_bands_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, *rest[:4]))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, ctx.causal, ctx.rate, ctx.size, ctx.count = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*given, output[1])


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    saved = ctx.saved_tensors
    made = mix_bands_backward(grad, *saved, ctx.causal, ctx.rate, ctx.size, ctx.count)
    return *(None if x is None else dx for x, dx in zip(saved[:7], made, strict=True)), *(None,) * 6


mix_bands.register_autograd(_gradients, setup_context=_save_inputs)
