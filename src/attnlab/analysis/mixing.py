"""What a token takes from others and what it keeps of itself: attention, residual and norm together.

Around an attention there is a residual r and a norm N that reads their sum (Kobayashi et al. 2021):

    u_i = Σ_j c_ij + b        c_ij = Σ_h α_hij f_h(x_j) + [i=j] r_i

    post-norm   N(u_i) is the block's state; r_i = x_i
    pre-norm    u_i is, and N(u_i) is what the next part reads; r_i is what the norm before the attention had read, and
                x_j = N'(r_j) depends on token j alone, so c_ij is all that token j gave u_i

With the deviation σ_i of the u_i that was really there, a LayerNorm is a sum over the same tokens, and so is an
RMSNorm, which does not centre and has the root mean square for σ (both with their ε; β, like b, is nobody's):

    N(u_i) = Σ_j N_i(c_ij) + …        N_i(c) = γ·(c − mean c)/σ_i        RMSNorm: γ·c/σ_i

MAPS says how far into the block a contribution is followed. N_i is one matrix for all queries times 1/σ_i, so it goes
into W_h and the Gram form of `contribution` holds; only the diagonal and the sums are made as vectors.

The mixing ratio is ‖Σ_{j≠i} ·‖ / (‖Σ_{j≠i} ·‖ + ‖·_ii‖), norms of summed vectors. In a cross attention no key is the
query itself: `own` holds the norm of its residual, and the ratio is that of all keys against it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attnlab.analysis import feed_forward
from attnlab.analysis.block import apply_norm, read_part
from attnlab.analysis.contribution import check_linear, norms, widen
from attnlab.records.record import KINDS, Layer


@dataclass(frozen=True, eq=False)
class Mixing:
    """How much each key gave each query at one place of the block."""

    map: Tensor  # (b,i,j)
    own: Tensor | None  # (b,i) of the query's residual, in a cross attention; else it is on the map's diagonal
    ratio: Tensor  # (b,i) from 0, all its own, to 1, all from others; nan where a query got nothing at all


def mixing(layer: Layer, by: str = "norm") -> Mixing:
    """The map, and the mixing ratio, of one layer; by: a name in MAPS."""
    if by not in MAPS:
        raise ValueError(f"no map is called {by!r}; there are {', '.join(MAPS)}")
    i, j = layer.context.shape[2], layer.grouped_values.shape[2]
    if not is_cross(layer) and i != j:
        raise ValueError(
            f"{layer.name}: {i} queries and {j} keys of one sequence; a token's own part is known "
            "only where queries and keys are the same tokens"
        )
    return MAPS[by](layer)


def is_cross(layer: Layer) -> bool:
    query, key = KINDS[layer.kind]
    return query != key


def map_weights(layer: Layer, *, residual: bool) -> Mixing:
    """The mean weight over heads; with a residual that counts as much: α/2 + [i=j]/2."""
    weights = mean_weights(layer)
    own = torch.zeros_like(weights[..., 0])
    if residual:
        weights, own = weights / 2, own + 0.5
    if is_cross(layer):
        return Mixing(weights, own, _ratio(weights.sum(-1).abs(), own))
    weights.diagonal(dim1=1, dim2=2).add_(own)
    diagonal = weights.diagonal(dim1=1, dim2=2)
    return Mixing(weights, None, _ratio((weights.sum(-1) - diagonal).abs(), diagonal.abs()))


def mean_weights(layer: Layer) -> Tensor:
    """The mean of α over heads, (b,i,j), where there need be no contributions."""
    return torch.cat([widen(weights).mean(1) for _, weights in layer.chunks()], dim=1)


def map_norms(layer: Layer, *, residual: bool, norm: bool) -> Mixing:
    """‖N_i(Σ_h α f_h(x_j) + [i=j] r_i)‖, without r or without N where they are not asked for."""
    check_linear(layer)
    projection = widen(layer.output_weight)
    r = widen(read_part(layer, "residual")) if residual else torch.zeros_like(widen(layer.outputs))
    scale = r.new_ones(())
    if norm:
        projection, r = (apply_norm(layer, "norm", x, scaled=False) for x in (projection, r))
        scale = read_part(layer, "norm.scale")  # (b,i,1)
    own, others = split_own(replace(layer, output_weight=projection), r)
    own, others = (scale * own).norm(dim=-1), (scale * others).norm(dim=-1)
    made = norms(replace(layer, output_weight=projection)).layer * scale
    if is_cross(layer):
        return Mixing(made, own, _ratio(others, own))
    made.diagonal(dim1=1, dim2=2).copy_(own)
    return Mixing(made, None, _ratio(others, own))


def map_feed_forward(layer: Layer, *, to: str) -> Mixing:
    """The same, followed through the feed-forward: see attnlab.analysis.feed_forward."""
    check_linear(layer)
    pair = torch.stack(split_own(layer, widen(read_part(layer, "residual"))), dim=2)  # (b,i,2,e)
    own, others = feed_forward.pass_through(layer, pair, slice(None), to).norm(dim=-1).unbind(2)
    made = feed_forward.norms_after(layer, to, diagonal=not is_cross(layer))
    return Mixing(made, own if is_cross(layer) else None, _ratio(others, own))


def split_own(layer: Layer, residual: Tensor) -> tuple[Tensor, Tensor]:
    """What a query's own token gave it, residual and all, and what the others did: two vectors, (b,i,e) each."""
    projection = widen(layer.output_weight)
    total = torch.einsum("bhid,hde->bie", widen(layer.context), projection)
    if is_cross(layer):
        return residual, total
    at_itself = torch.cat([weights.diagonal(rows.start, 2, 3) for rows, weights in layer.chunks()], dim=-1)  # (b,h,i)
    own = torch.einsum("bhi,bhid,hde->bie", widen(at_itself), widen(layer.values), projection)
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
    "block": partial(map_feed_forward, to="block"),  # AtbFfResLn; in a pre-norm block the same as the one before
}
