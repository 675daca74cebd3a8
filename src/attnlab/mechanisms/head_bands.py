"""Attention whose heads are mixed, by bands of queries, as one operator: what it keeps is linear in the length.

    S_R = scale·Q_R Kᵀ       W_R: by kernels/mixed_heads.py       C_R = (W_R ∘ D_R) V       R: rows; D: dropout

    backward   S_R and W_R again, with the known levels of the rows      dW_R = (G_R Vᵀ) ∘ D_R      dS_R by the kernels
               dV = Σ_R (W_R ∘ D_R)ᵀ G_R        dQ_R = scale·dS_R K        dK = scale·Σ_R dS_Rᵀ Q_R, summed in float32

With θ, S is first convolved (kernels/convolution.py), and R begins with as many former rows as θ reads. A single band
keeps S and W ∘ D. Recorded one by one and computed again by a checkpoint, as in by_rows.py, the operations of the
bands would take the host three times as long as the device. The products are those of kernels/pair_products.py, which
skip hidden tiles and read heads where they lie, unless heads are too wide for them: then they are PyTorch's.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab.mechanisms.by_rows import cut_pairs, draw_kept
from attnlab.mechanisms.kernels.launch import empty_by_token, operator, refuse_second_derivative
from attnlab.mechanisms.mechanism import repeat_heads

MOST_PARTS = 1024  # of a sum in the launch of the products, where one program adds up one after another


class Band(NamedTuple):
    """One band of queries: its rows, `former` rows before them, and the end of its keys."""

    rows: slice
    former: int
    end: int
    seed: Tensor | None  # of dropout
    mask: Tensor | None  # of the former rows, too
    given: tuple[Any, ...]  # the arguments of `mix_heads` after the logits

    @property
    def all_rows(self) -> slice:
        return slice(self.rows.start - self.former, self.rows.stop)


@operator("attnlab::mix_bands")
def mix_bands(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, before: Tensor | None, after: Tensor, keyed: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, causal: bool, scale: float, rate: float, size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d), the levels (b,h,i) of the rows, and S and W ∘ D of a single band; else these are empty.

    q (b,h,i,e), k (b,g,j,e), v (b,g,j,d)
    theta                  of the convolution, (h,M,N), or None
    before, after, keyed   see `mix_heads`; of all rows and keys
    seed, rate             of dropout; seed is None without it
    size                   number of queries in a band
    """
    from attnlab.mechanisms.kernels.mixed_heads import mix_heads

    products, contexts, levels, kept = choose_products(q, k, v, causal, scale), [], [], (q.new_empty(0),) * 2
    for band in _split(q, k, theta, before, after, keyed, mask, seed, causal, size):
        s = products.score(band)
        weights, level = mix_heads.function(_convolve(s, theta, band, causal), *band.given, causal)
        weights = _drop(weights, band, rate)
        contexts.append(products.apply(weights, band))
        levels.append(level)
        kept = (s, weights)
    if len(contexts) == 1:
        return contexts[0], levels[0], *kept
    return _join(contexts), torch.cat(levels, dim=2), q.new_empty(0), q.new_empty(0)


@operator("attnlab::mix_bands_backward")
def mix_bands_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, before: Tensor | None, after: Tensor,
    keyed: Tensor | None, mask: Tensor | None, seed: Tensor | None, lse: Tensor, s: Tensor, weights: Tensor,
    causal: bool, scale: float, rate: float, size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, theta, before, if there is one, and after together, and keyed; or empty ones."""
    from attnlab.mechanisms.kernels.convolution import convolve_backward
    from attnlab.mechanisms.kernels.mixed_heads import compute_slopes, mix_heads_again

    products, parts = choose_products(q, k, v, causal, scale), []
    bands = list(_split(q, k, theta, before, after, keyed, mask, seed, causal, size))
    sums = None if len(bands) == 1 else _Sums(is_tiled(q, k, v), q, k, v, before, after, keyed)
    for band in bands:
        level, g = lse, grad[:, :, band.rows]
        if sums is not None:
            s, level = products.score(band), lse[:, :, band.rows].contiguous()
        z = _convolve(s, theta, band, causal)
        if sums is not None:
            weights = _drop(mix_heads_again(z, level, causal, *band.given), band, rate)
        dweights = _drop(products.multiply_values(g, band), band, rate)
        ds, drows, dkeys = compute_slopes(dweights, z, level, causal, *band.given)
        if theta is not None:
            ds, part = convolve_backward(ds, s, theta, band.mask, causal, band.former)
            parts.append(part)
        kind = after.dtype if sums is None else torch.float32
        made = products.multiply(ds, weights, g, band, drows if after.dim() == 2 else None, kind)
        drows = drows if made.sums is None else made.sums
        if sums is not None:
            sums.add(band, made, drows, dkeys)
    dtheta = q.new_empty(0)
    if theta is not None:
        dtheta = (torch.cat(parts) if len(parts) > 1 else parts[0]).sum(0).to(theta.dtype)
    if sums is not None:
        dq, dk, dv, drows, dkeys = sums.finish()
        return dq, dk, dv, dtheta, drows, dkeys
    return made.dq, made.dk, made.dv, dtheta, drows, dkeys


def _convolve(s: Tensor, theta: Tensor | None, band: Band, causal: bool) -> Tensor:
    if theta is None:
        return s
    from attnlab.mechanisms.kernels.convolution import convolve

    return convolve(s, theta, band.mask, causal, band.former)


class BandGradients(NamedTuple):
    """Gradients of a band: dQ, dK and dV, and the sum of the parts of dM where it is the same for all rows, or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    sums: Tensor | None


class TileProducts:
    """The products of bands by kernels."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> None:
        self.q, self.k, self.v, self.causal, self.scale = q, k, v, causal, scale

    def score(self, band: Band) -> Tensor:
        """Return S = scale·Q Kᵀ."""
        return self.write(self.q[:, :, band.all_rows], self.k[:, :, : band.end], self.scale)

    def multiply_values(self, g: Tensor, band: Band) -> Tensor:
        """Return G Vᵀ."""
        return self.write(g, self.v[:, :, : band.end], 1.0)

    def write(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        from attnlab.mechanisms.kernels.pair_products import write_scores

        s = x.new_empty((*x.shape[:3], y.shape[2]))
        write_scores(x, y, s, None, causal=self.causal, scale=scale)
        return s

    def apply(self, weights: Tensor, band: Band) -> Tensor:
        """Return the context W V."""
        from attnlab.mechanisms.kernels.pair_products import apply_weights

        return apply_weights(weights, self.v[:, :, : band.end], causal=self.causal)

    def multiply(
        self, ds: Tensor, weights: Tensor, g: Tensor, band: Band, parts: Tensor | None, kind: torch.dtype
    ) -> BandGradients:
        """Return scale·dS K, scale·dSᵀ Q, Wᵀ G, and the sum of the parts (n,…) of dM in the type `kind`."""
        from attnlab.mechanisms.kernels.pair_products import PartSums, write_products

        q, k, out, sums = self.q[:, :, band.all_rows], self.k[:, :, : band.end], None, None
        if parts is not None and len(parts) > MOST_PARTS:
            out = parts.sum(0).to(kind)
        elif parts is not None:
            out = parts.new_empty(parts.shape[1:], dtype=kind)
            sums = PartSums(parts.flatten(1), out)
        made = write_products(ds, q, k, causal=self.causal, scale=self.scale, weighted=(weights, g), sums=sums)
        return BandGradients(*made, out)


class BatchedProducts:
    """The products of bands by PyTorch, for heads that are too wide for the kernels."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.q, self.groups = q * scale, k.shape[1]
        self.k, self.v = (repeat_heads(x, q.shape[1]).contiguous() for x in (k, v))
        self.scale = scale

    def score(self, band: Band) -> Tensor:
        return self.q[:, :, band.all_rows] @ self.k[:, :, : band.end].mT

    def multiply_values(self, g: Tensor, band: Band) -> Tensor:
        return g @ self.v[:, :, : band.end].mT

    def apply(self, weights: Tensor, band: Band) -> Tensor:
        return (weights @ self.v[:, :, : band.end]).contiguous()

    def multiply(
        self, ds: Tensor, weights: Tensor, g: Tensor, band: Band, parts: Tensor | None, kind: torch.dtype
    ) -> BandGradients:
        made = ds.mT @ self.q[:, :, band.all_rows], weights.mT @ g
        dk, dv = (_sum_groups(x, self.groups).contiguous() for x in made)
        dq = (ds @ self.k[:, :, : band.end] * self.scale).contiguous()
        return BandGradients(dq, dk, dv, None if parts is None else parts.sum(0).to(kind))


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum a gradient (b,h,n,d) over the heads that share one of `groups` heads."""
    b, h, n, d = x.shape
    return x if h == groups else x.reshape(b, groups, h // groups, n, d).sum(2)


def choose_products(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    """Return the products of bands: by kernels where they cover q, k and v."""
    return TileProducts(q, k, v, causal, scale) if is_tiled(q, k, v) else BatchedProducts(q, k, v, scale)


def is_tiled(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels cover the products of bands. Contexts and gradients then lie by tokens, (b,n,h,d)."""
    from attnlab.mechanisms.kernels.tiles import find_tile_gap

    return find_tile_gap(q, k, v) is None


def _join(parts: list[Tensor]) -> Tensor:
    """Join the rows of bands (b,h,r,d) in the memory layout that they have."""
    if parts[0].is_contiguous():
        return torch.cat(parts, dim=2)
    return torch.cat([x.transpose(1, 2) for x in parts], dim=1).transpose(1, 2)


class _Sums:
    """The sums of the gradients of several bands, in float32."""

    def __init__(
        self, tiled: bool, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, after: Tensor, keyed: Tensor | None
    ) -> None:
        self.types = tuple(q.dtype if x is None else x.dtype for x in (q, k, v, after, keyed))
        if tiled:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        made = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
        self.dq, self.dk, self.dv = (x.transpose(1, 2) if tiled else x for x in made)
        self.rows = q.new_zeros((1 if before is None else 2, *after.shape), dtype=torch.float32)
        self.keys = q.new_zeros((2, 0) if keyed is None else keyed.shape, dtype=torch.float32)

    def add(self, band: Band, made: BandGradients, drows: Tensor, dkeys: Tensor) -> None:
        self.dq[:, :, band.all_rows] += made.dq
        self.dk[:, :, : band.end] += made.dk
        self.dv[:, :, : band.end] += made.dv
        whole = self.rows if self.rows.dim() == 3 else self.rows[:, :, band.rows]
        whole += drows
        if self.keys.numel():
            self.keys[:, :, : band.end] += dkeys

    def finish(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        made = (self.dq, self.dk, self.dv, self.rows, self.keys)
        return tuple(x.to(dtype) for x, dtype in zip(made, self.types, strict=True))  # type: ignore[return-value]


def _split(
    q: Tensor, k: Tensor, theta: Tensor | None, before: Tensor | None, after: Tensor, keyed: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, causal: bool, size: int,
) -> Iterator[Band]:  # fmt: skip
    """Yield the bands of `size` queries. A causal band has no keys after its last row."""
    length, keys = q.shape[2], k.shape[2]
    for first in range(0, length, size):
        last, former = min(first + size, length), 0 if theta is None else min(first, theta.shape[1] - 1)
        end = min(keys, max(0, keys - length + last)) if causal else keys
        matrices = (x if x is None or x.dim() == 2 else x[:, first:last] for x in (before, after))
        masks = (cut_pairs(mask, start, last, end) for start in (first, first - former))
        given = (*matrices, None if keyed is None else keyed[:, :, :end], next(masks))
        yield Band(slice(first, last), former, end, seed, next(masks), given)


def _drop(weights: Tensor, band: Band, rate: float) -> Tensor:
    """Apply dropout in place."""
    if band.seed is None:
        return weights
    return weights.mul_(draw_kept.function(weights, band.seed, rate, band.rows.start))


@mix_bands.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (b, h, i, _), d = q.shape, v.shape[3]
    context = q.new_empty(b, i, h, d).transpose(1, 2) if is_tiled(q, k, v) else q.new_empty(b, h, i, d)
    kept = (b, h, i, k.shape[2]) if rest[-1] >= i else (0,)
    return context, q.new_empty((b, h, i), dtype=torch.float32), q.new_empty(kept), q.new_empty(kept)


@mix_bands_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, before: Tensor | None, after: Tensor,
      keyed: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:  # fmt: skip
    made = (empty_by_token(x) if is_tiled(q, k, v) else x.new_empty(x.shape) for x in (q, k, v))
    dtheta = q.new_empty(0) if theta is None else theta.new_empty(theta.shape)
    drows = after.new_empty(1 if before is None else 2, *after.shape)
    return *made, dtheta, drows, after.new_empty((2, 0) if keyed is None else keyed.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, ctx.causal, ctx.scale, ctx.rate, ctx.size = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.save_for_backward(*given, *output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    saved = ctx.saved_tensors
    *first, drows, dkeys = mix_bands_backward(grad, *saved, ctx.causal, ctx.scale, ctx.rate, ctx.size)
    made = (*first, drows[0], drows[-1], dkeys)
    return *(None if x is None else dx for x, dx in zip(saved[:7], made, strict=True)), *(None,) * 6


mix_bands.register_autograd(_gradients, setup_context=_save_inputs)
