"""Attention whose heads are mixed, by bands of queries, as one operator: what it keeps is linear in the length.

    S_R = scale·q̃_R Kᵀ        W_R: by kernels/mixed_heads.py        C_R = (W_R ∘ D_R) V        R: rows; D: dropout

    backward   S_R and W_R again, with the known levels of the rows      dW_R = (G_R Vᵀ) ∘ D_R      dS_R by the kernels
               dV = Σ_R (W_R ∘ D_R)ᵀ G_R        dq̃_R = dS_R K        dK = Σ_R dS_Rᵀ q̃_R, summed in float32

q̃_i is the queries i − count + 1, …, i side by side; 0 before the first. A single band keeps S and W ∘ D instead.
Recorded one by one and computed again by a checkpoint, as in by_rows.py, the operations of the bands would take the
host three times as long as the device. The products are those of kernels/pair_products.py, which skip hidden tiles and
read heads where they lie, unless heads are too wide for them or count is not 1: then they are PyTorch's.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.mechanisms.by_rows import cut_pairs, draw_kept
from attnlab.mechanisms.kernels.launch import empty_by_token, operator, refuse_second_derivative
from attnlab.mechanisms.mechanism import repeat_heads


class Band(NamedTuple):
    """One band of queries: its rows, the end of its keys, and the arguments of `mix_heads` after the logits."""

    rows: slice
    end: int
    seed: Tensor | None  # of dropout
    given: tuple[Any, ...]


@operator("attnlab::mix_bands")
def mix_bands(
    q: Tensor, k: Tensor, v: Tensor, near: Tensor | None, before: Tensor | None, after: Tensor, keyed: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, causal: bool, scale: float, rate: float, size: int, count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d), the levels (b,h,i) of the rows, and S and W ∘ D of a single band; else these are empty.

    q (b,h,i,e), k (b,g,j,count·e), v (b,g,j,d)
    near, before, after, keyed   see `mix_heads`; of all rows and keys
    seed, rate                   of dropout; seed is None without it
    size                         number of queries in a band
    """
    from attnlab.mechanisms.kernels.mixed_heads import mix_heads

    products, contexts, levels, kept = choose_products(q, k, v, causal, scale, count), [], [], (q.new_empty(0),) * 2
    for band in _split(q, k, near, before, after, keyed, mask, seed, causal, size):
        s = products.score(band)
        weights, level = mix_heads.function(s, *band.given, causal)
        weights = _drop(weights, band, rate)
        contexts.append(products.apply(weights, band))
        levels.append(level)
        kept = (s, weights)
    if len(contexts) == 1:
        return contexts[0], levels[0], *kept
    return _join(contexts), torch.cat(levels, dim=2), q.new_empty(0), q.new_empty(0)


@operator("attnlab::mix_bands_backward")
def mix_bands_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, near: Tensor | None, before: Tensor | None, after: Tensor,
    keyed: Tensor | None, mask: Tensor | None, seed: Tensor | None, lse: Tensor, s: Tensor, weights: Tensor,
    causal: bool, scale: float, rate: float, size: int, count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, near, before and after together, and keyed; that of one that is None is empty."""
    from attnlab.mechanisms.kernels.mixed_heads import compute_slopes, mix_heads_again

    products = choose_products(q, k, v, causal, scale, count)
    bands = list(_split(q, k, near, before, after, keyed, mask, seed, causal, size))
    sums = None if len(bands) == 1 else _Sums(is_tiled(q, k, v, count), q, k, v, near, after, keyed)
    for band in bands:
        level = lse
        if sums is not None:
            s, level = products.score(band), lse[:, :, band.rows].contiguous()
            weights = _drop(mix_heads_again(s, level, causal, *band.given), band, rate)
        g = grad[:, :, band.rows]
        dweights = _drop(products.differ(g, band), band, rate)
        ds, dnear, drows, dkeys = compute_slopes(dweights, s, level, causal, *band.given)
        made = products.multiply(ds, weights, g, band, drows if after.dim() == 2 else None)
        drows = drows if made.sums is None else made.sums
        if sums is not None:
            sums.add(band, made, dnear, drows, dkeys)
    if sums is not None:
        return sums.finish(count)
    dq = made.dq if count == 1 else _roll(made.dq, count)[:, :, count - 1 :].to(q.dtype).contiguous()
    return dq, made.dk, made.dv, dnear, drows, dkeys


class Made(NamedTuple):
    """Products of a band: dq̃, dK and dV, and the sums of the parts of dM, (2,h,h), where M is the same for all rows."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    sums: Tensor | None


class TileProducts:
    """The products of bands by kernels."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> None:
        self.q, self.k, self.v, self.causal, self.scale = q, k, v, causal, scale

    def score(self, band: Band) -> Tensor:
        return self.write(self.q[:, :, band.rows], self.k[:, :, : band.end], self.scale)

    def differ(self, g: Tensor, band: Band) -> Tensor:
        return self.write(g, self.v[:, :, : band.end], 1.0)

    def write(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        from attnlab.mechanisms.kernels.pair_products import write_scores

        s = x.new_empty((*x.shape[:3], y.shape[2]))
        write_scores(x, y, s, None, causal=self.causal, scale=scale)
        return s

    def apply(self, weights: Tensor, band: Band) -> Tensor:
        from attnlab.mechanisms.kernels.pair_products import apply_weights

        return apply_weights(weights, self.v[:, :, : band.end], causal=self.causal)

    def multiply(self, ds: Tensor, weights: Tensor, g: Tensor, band: Band, parts: Tensor | None) -> Made:
        from attnlab.mechanisms.kernels.pair_products import Sums, write_products

        q, k = self.q[:, :, band.rows], self.k[:, :, : band.end]
        out = None if parts is None else q.new_empty(parts.shape[1:])
        sums = None if parts is None or out is None else Sums(parts.flatten(1), out)
        made = write_products(ds, q, k, causal=self.causal, scale=self.scale, weighted=(weights, g), sums=sums)
        return Made(*made, out)


class BatchedProducts:
    """The products of bands by PyTorch, for longer vectors: those of `count` queries side by side."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, count: int) -> None:
        self.count, self.scale, heads = count, scale, q.shape[1]
        self.groups = k.shape[1], v.shape[1]
        self.k, self.v = (repeat_heads(x, heads).contiguous() for x in (k, v))
        self.padded = F.pad(q, (0, 0, count - 1, 0)) if count > 1 else q.contiguous()

    def unroll(self, band: Band) -> Tensor:
        """q̃ of a band."""
        rows = band.rows
        parts = [self.padded[:, :, rows.start + part : rows.stop + part] for part in range(self.count)]
        return torch.cat(parts, dim=-1) if self.count > 1 else parts[0]

    def score(self, band: Band) -> Tensor:
        s = self.unroll(band) @ self.k[:, :, : band.end].mT
        return s if self.scale == 1 else s * self.scale

    def differ(self, g: Tensor, band: Band) -> Tensor:
        return g @ self.v[:, :, : band.end].mT

    def apply(self, weights: Tensor, band: Band) -> Tensor:
        return weights @ self.v[:, :, : band.end]

    def multiply(self, ds: Tensor, weights: Tensor, g: Tensor, band: Band, parts: Tensor | None) -> Made:
        ds = ds if self.scale == 1 else ds * self.scale
        made = ds.mT @ self.unroll(band), weights.mT @ g.contiguous()
        dk, dv = (_sum_groups(x, groups) for x, groups in zip(made, self.groups, strict=True))
        dq = ds @ self.k[:, :, : band.end]
        return Made(dq, dk, dv, None if parts is None else parts.sum(0).to(ds.dtype))


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum a gradient (b,h,n,d) over the heads that share one of `groups` heads."""
    b, h, n, d = x.shape
    return x if h == groups else x.view(b, groups, h // groups, n, d).sum(2)


def choose_products(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, count: int) -> Any:
    """Return the products of bands: by kernels where they cover q, k and v."""
    tiled = is_tiled(q, k, v, count)
    return TileProducts(q, k, v, causal, scale) if tiled else BatchedProducts(q, k, v, causal, scale, count)


def is_tiled(q: Tensor, k: Tensor, v: Tensor, count: int) -> bool:
    """Whether the kernels cover the products of bands. Contexts and gradients then lie by tokens, (b,n,h,d)."""
    from attnlab.mechanisms.kernels.tiles import find_tile_gap

    return count == 1 and find_tile_gap(q, k, v) is None


def _join(parts: list[Tensor]) -> Tensor:
    """Join the rows of bands (b,h,r,d) in the memory layout that they have."""
    if parts[0].is_contiguous():
        return torch.cat(parts, dim=2)
    return torch.cat([x.transpose(1, 2) for x in parts], dim=1).transpose(1, 2)


def _roll(dq: Tensor, count: int) -> Tensor:
    """The gradient of the padded queries (b,h,i+count−1,e) from that of q̃, (b,h,i,count·e), in float32 if count > 1."""
    if count == 1:
        return dq
    b, h, i, e = dq.shape
    out = dq.new_zeros((b, h, i + count - 1, e // count), dtype=torch.float32)
    for part, x in enumerate(dq.chunk(count, dim=-1)):
        out[:, :, part : part + i] += x
    return out


class _Sums:
    """The sums of the gradients of several bands, in float32."""

    def __init__(
        self, tiled: bool, q: Tensor, k: Tensor, v: Tensor, near: Tensor | None, after: Tensor, keyed: Tensor | None
    ) -> None:
        if tiled:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        made = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
        self.dk, self.dv = (x.transpose(1, 2) if tiled else x for x in made)
        self.near = q.new_zeros(0 if near is None else near.shape, dtype=torch.float32)
        self.rows = q.new_zeros((2, *after.shape), dtype=torch.float32)
        self.keys = q.new_zeros((2, 0) if keyed is None else keyed.shape, dtype=torch.float32)
        self.q, self.types = q, tuple(q.dtype if x is None else x.dtype for x in (q, k, v, near, after, keyed))
        self.parts: list[tuple[slice, Tensor]] = []

    def add(self, band: Band, made: Made, dnear: Tensor, drows: Tensor, dkeys: Tensor) -> None:
        self.parts.append((band.rows, made.dq))
        self.dk[:, :, : band.end] += made.dk
        self.dv[:, :, : band.end] += made.dv
        if self.near.numel():
            self.near[:, :, band.rows] += dnear
        whole = self.rows if self.rows.dim() == 3 else self.rows[:, :, band.rows]
        whole += drows
        if self.keys.numel():
            self.keys[:, :, : band.end] += dkeys

    def finish(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        if count == 1:
            dq = _join([x for _, x in self.parts])
        else:
            b, h, i, e = self.q.shape
            dq = self.dk.new_zeros((b, h, i + count - 1, e))
            for rows, x in self.parts:
                dq[:, :, rows.start : rows.stop + count - 1] += _roll(x, count)
            dq = dq[:, :, count - 1 :].contiguous()
        made = (dq, self.dk, self.dv, self.near, self.rows, self.keys)
        return tuple(x.to(dtype) for x, dtype in zip(made, self.types, strict=True))  # type: ignore[return-value]


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


def _drop(weights: Tensor, band: Band, rate: float) -> Tensor:
    """Apply dropout in place."""
    if band.seed is None:
        return weights
    return weights.mul_(draw_kept.function(weights, band.seed, rate, band.rows.start))


@mix_bands.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (b, h, i, _), d, tiled = q.shape, v.shape[3], is_tiled(q, k, v, rest[-1])
    context = q.new_empty(b, i, h, d).transpose(1, 2) if tiled else q.new_empty(b, h, i, d)
    kept = (b, h, i, k.shape[2]) if rest[-2] >= i else (0,)
    return context, q.new_empty((b, h, i), dtype=torch.float32), q.new_empty(kept), q.new_empty(kept)


@mix_bands_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tiled = is_tiled(q, k, v, rest[-1])
    made = (empty_by_token(x) if tiled else x.new_empty(x.shape) for x in (q, k, v))
    near, _, after, keyed = rest[:4]
    dnear = q.new_empty(0 if near is None else near.shape)
    return *made, dnear, after.new_empty(2, *after.shape), after.new_empty((2, 0) if keyed is None else keyed.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, ctx.causal, ctx.scale, ctx.rate, ctx.size, ctx.count = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.save_for_backward(*given, *output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    saved = ctx.saved_tensors
    options = (ctx.causal, ctx.scale, ctx.rate, ctx.size, ctx.count)
    *first, drows, dkeys = mix_bands_backward(grad, *saved, *options)
    made = (*first, *drows.unbind(), dkeys)
    return *(None if x is None else dx for x, dx in zip(saved[:7], made, strict=True)), *(None,) * 7


mix_bands.register_autograd(_gradients, setup_context=_save_inputs)
