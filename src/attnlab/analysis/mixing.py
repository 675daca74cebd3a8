"""How much a token takes from others and keeps of itself: attention, residual and norm together.

Around an attention there is a residual r and a norm N that reads their sum (Kobayashi et al. 2021):

    u_i = Σ_j c_ij + b        c_ij = Σ_h α_hij f_h(x_j) + [i=j] r_i        with a turning A, f_h(x_j) = v_hj A_hi W_h

    post-norm   N(u_i) is the block's state, and r_i = x_i
    pre-norm    u_i is the block's state, and N(u_i) is the input of the next part. r_i is the input of the norm before
                the attention, and x_j = N'(r_j) depends on token j alone, so c_ij is all that token j adds to u_i

With σ_i the actual deviation of u_i, a LayerNorm is a sum over the same tokens. So is an RMSNorm, which does not centre
and whose σ is the root mean square. Both include their ε. The biases β and b belong to no token:

    N(u_i) = Σ_j N_i(c_ij) + …        N_i(c) = γ·(c − mean c)/σ_i        RMSNorm: γ·c/σ_i

MAPS names how far into the block a contribution is followed. N_i is one matrix for all queries times 1/σ_i. It is
folded into W_h, so the Gram form of `contribution` holds; only the diagonal and the sums need explicit vectors.

The mixing ratio is ‖Σ_{j≠i} ·‖ / (‖Σ_{j≠i} ·‖ + ‖·_ii‖), with norms of summed vectors. In a cross attention no key is
the query itself: `own` is the norm of the query's residual, and the ratio compares all keys with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attnlab.analysis import feed_forward
from attnlab.analysis.alti import alti_shares
from attnlab.analysis.block import apply_norm, read_part
from attnlab.analysis.contribution import average_heads, check_linear, norms
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import KINDS, Layer, apply_turning


@dataclass(frozen=True, eq=False)
class Mixing:
    """How much each key contributes to each query at one place of the block."""

    map: Tensor  # (b,i,j)
    own: Tensor | None  # (b,i) of the query's residual in a cross attention; else it is on the map's diagonal
    ratio: Tensor  # (b,i) from 0, only its own, to 1, only from others; nan if a query receives nothing


def mixing(layer: Layer, by: str = "norm") -> Mixing:
    """Compute the map and the mixing ratio of one layer; `by` is a name in MAPS."""
    if by not in MAPS:
        raise ValueError(f"unknown map {by!r}; choose one of {', '.join(MAPS)}")
    i, j = layer.context.shape[2], layer.grouped_values.shape[2]
    if not is_cross(layer) and i != j:
        raise ValueError(f"{layer.name} has {i} queries and {j} keys; mixing needs the same tokens as both")
    return MAPS[by](layer)


def is_cross(layer: Layer) -> bool:
    query, key = KINDS[layer.kind]
    return query != key


def map_weights(layer: Layer, *, residual: bool) -> Mixing:
    """Map the mean weight over heads, or with a residual of equal weight, α/2 + [i=j]/2; for every mechanism."""
    weights = average_heads(layer)
    own = torch.zeros_like(weights[..., 0])
    if residual:
        weights, own = weights / 2, own + 0.5
    if is_cross(layer):
        return Mixing(weights, own, _ratio(weights.sum(-1).abs(), own))
    weights.diagonal(dim1=1, dim2=2).add_(own)
    diagonal = weights.diagonal(dim1=1, dim2=2)
    return Mixing(weights, None, _ratio((weights.sum(-1) - diagonal).abs(), diagonal.abs()))


def map_norms(layer: Layer, *, residual: bool, norm: bool) -> Mixing:
    """Map ‖N_i(Σ_h α f_h(x_j) + [i=j] r_i)‖, with r if residual and with N if norm."""
    check_linear(layer)
    projection = widen(layer.output_weight)
    r = widen(read_part(layer, "residual")) if residual else torch.zeros_like(widen(layer.outputs))
    scale = r.new_ones(())
    if norm:
        projection, r = (apply_norm(layer, "norm", x, scaled=False) for x in (projection, r))
        scale = read_part(layer, "norm.scale")  # (b,i,1)
    own, others = split_own(replace(layer, output_weight=projection), r)
    own, others = (scale * own).norm(dim=-1), (scale * others).norm(dim=-1)
    sizes = norms(replace(layer, output_weight=projection)).layer * scale
    if is_cross(layer):
        return Mixing(sizes, own, _ratio(others, own))
    sizes.diagonal(dim1=1, dim2=2).copy_(own)
    return Mixing(sizes, None, _ratio(others, own))


def map_feed_forward(layer: Layer, *, to: str) -> Mixing:
    """Map contributions that are followed through the feed-forward: see attnlab.analysis.feed_forward."""
    check_linear(layer)
    pair = torch.stack(split_own(layer, widen(read_part(layer, "residual"))), dim=2)  # (b,i,2,e)
    own, others = feed_forward.pass_through(layer, pair, slice(None), to).norm(dim=-1).unbind(2)
    sizes = feed_forward.norms_after(layer, to, diagonal=not is_cross(layer))
    return Mixing(sizes, own if is_cross(layer) else None, _ratio(others, own))


def map_alti(layer: Layer) -> Mixing:
    """Map the shares of ALTI, whose rows sum to 1: see attnlab.analysis.alti."""
    shares, own = alti_shares(layer)
    if is_cross(layer):
        return Mixing(shares, own, 1 - own)
    return Mixing(shares, None, 1 - shares.diagonal(dim1=1, dim2=2))


def map_zeroing(layer: Layer) -> Mixing:
    """Map how far each query's state moves without the value of a key; attnlab.huggingface.zeroing records it."""
    if "zeroing" not in layer.extras:
        raise ValueError(
            f"{layer.name}: value zeroing was not recorded; use attnlab.huggingface.zeroing.record_zeroing"
        )
    moved = layer.extras["zeroing"]
    if is_cross(layer):
        return Mixing(moved, None, torch.ones_like(moved[..., 0]))
    diagonal = moved.diagonal(dim1=1, dim2=2)
    return Mixing(moved, None, _ratio(moved.sum(-1) - diagonal, diagonal))


def split_own(layer: Layer, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Split u − b into the query's own part, with its residual, and the part of the others; (b,i,e) each."""
    projection = widen(layer.output_weight)
    total = torch.einsum("bhid,hde->bie", widen(layer.turned_context), projection)
    if is_cross(layer):
        return residual, total
    at_itself = torch.cat([weights.diagonal(rows.start, 2, 3) for rows, weights in layer.chunks()], dim=-1)  # (b,h,i)
    values = layer.values if layer.turning is None else apply_turning(layer.turning, layer.values)  # i = j
    own = torch.einsum("bhi,bhid,hde->bie", widen(at_itself), widen(values), projection)
    return own + residual, total - own


def _ratio(others: Tensor, own: Tensor) -> Tensor:
    return others / (others + own)


MAPS: dict[str, Callable[[Layer], Mixing]] = {
    "weight": partial(map_weights, residual=False),  # Attn-W
    "weight-residual": partial(map_weights, residual=True),  # AttnRes-W
    "attention": partial(map_norms, residual=False, norm=False),  # Attn-N
    "residual": partial(map_norms, residual=True, norm=False),  # AttnRes-N
    "norm": partial(map_norms, residual=True, norm=True),  # AttnResLn-N
    "feed-forward": partial(map_feed_forward, to="feed-forward"),  # AtbFf
    "feed-forward-residual": partial(map_feed_forward, to="feed-forward-residual"),  # AtbFfRes
    "alti": map_alti,
    "zeroing": map_zeroing,
    "block": partial(map_feed_forward, to="block"),  # AtbFfResLn; equals the previous map in a pre-norm block
}
