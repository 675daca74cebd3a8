"""Totals of one attention layer at any length: no map of pairs is ever stored.

With α_hij the weights, f_h(x_j) = v_hj W_h as in `contribution`, and p = |α| / Σ_j |α|:

    received_weight_hj   Σ_i |α_hij|              received_norm_hj   Σ_i ‖α_hij f_h(x_j)‖
    taken_norm_hi        Σ_j ‖α_hij f_h(x_j)‖     entropy_hi         −Σ_j p_hij ln p_hij, in nats
    peak_hi              max_j ‖α_hij f_h(x_j)‖, in self-attention over j ≠ i

Because ‖α f‖ = |α| ‖f‖, the totals need only one number for each key, ‖f_h(x_j)‖. A factor of each query, as of a gate
for each head, joins α in the norms. A turning of vectors has no such form: its norms take O(d²) for each pair.

    read_rows       the definition: reads the weights of any layer, a few queries at a time
    stream_scores   a softmax, from q and k: blocks of queries and keys that stay in a cache, and skips hidden blocks.
                    With z_ij = scale · q_i k_j − lse_i, where lse_i = ln Σ_j exp(scale · q_i k_j),
                    α = exp z and entropy = −Σ_j α z. On a GPU it is a Triton kernel (totals_kernel)

The strongest links of a head are exact. The k pairs with the largest norms are all in the k rows with the largest
peaks, because each of these rows has a pair at least as large as any pair of another row. Only k rows are computed.
A link of self-attention joins two tokens: most heads take most from the token itself, which would hide the others.

A level shows a long text in blocks of B tokens: the mean over the queries of a block of what they give the keys of a
block, by weight and by norm. Its cells are sums of the same pairs, not a sample of them.
"""

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.analysis.contribution import Keys, Norms, check_linear, needs_vectors
from attnlab.mechanisms.mechanism import Impl, widen
from attnlab.records.record import Layer
from attnlab.records.visibility import SoftmaxScores

ROWS, KEYS = 256, 1024  # queries and keys of a block that stays in the cache of a CPU
GPU_ROWS, GPU_KEYS = 2048, 16384  # of a block on a GPU
LEAST_BLOCK = 16  # tokens of a block of a level: the least rows of a tile of the kernel
LEVEL_ROWS = 128  # queries of a block where there is a level: whole blocks of the level, or a part of one
VECTORS = 2**24  # values of v in memory at a time


@dataclass(frozen=True, eq=False)
class Links:
    """The pairs of each head with the largest ‖αf(x)‖, largest first. Fewer than asked for where a head has fewer.

    A pair of self-attention is two different tokens.
    """

    query: Tensor  # (b,h,k) int64; −1 = no pair
    key: Tensor  # (b,h,k)
    weight: Tensor  # (b,h,k)
    norm: Tensor  # (b,h,k)


@dataclass(frozen=True, eq=False)
class Level:
    """Maps of blocks: the mean over the queries of a block of the weight, or the norm, on the keys of a block."""

    block: int  # tokens of a block; the last one may be shorter
    weight: Tensor  # (b,h,⌈i/block⌉,⌈j/block⌉)
    norm: Tensor

    @classmethod
    def empty(cls, block: int, vector: Tensor, queries: int) -> "Level":
        b, h, j = vector.shape
        shape = b, h, -(-queries // block), -(-j // block)
        return cls(block, vector.new_zeros(shape), vector.new_zeros(shape))

    def add(self, place: tuple[Any, ...], start: int, column: Tensor, size: Tensor) -> None:
        """Add what keys (…,n,j) receive from queries of n blocks, the first of which has `start`.

        place   examples and heads
        size    ‖f‖ (…,j)
        """
        first = start // self.block
        rows = (*place, slice(first, first + column.shape[-2]))
        for whole, x in ((self.weight, column), (self.norm, column * size.unsqueeze(-2))):
            whole[rows] += F.pad(x, (0, -x.shape[-1] % self.block)).view(*x.shape[:-1], -1, self.block).sum(-1)

    def average(self, queries: int) -> "Level":
        """Divide the sums by the number of queries of each block."""
        starts = torch.arange(0, queries, self.block, device=self.weight.device)
        count = (queries - starts).clamp_max(self.block)[:, None]
        return Level(self.block, self.weight / count, self.norm / count)


@dataclass(frozen=True, eq=False)
class Totals:
    """The totals of one layer: what each key receives and each query takes, for each head."""

    kind: str
    index: int
    name: str
    vector: Tensor  # (b,h,j) ‖f_h(x_j)‖
    received_weight: Tensor  # (b,h,j)
    received_norm: Tensor  # (b,h,j)
    taken_norm: Tensor  # (b,h,i)
    entropy: Tensor  # (b,h,i)
    peak: Tensor  # (b,h,i); NaN without links, unless it was computed from rows
    links: Links | None
    how: str  # "rows", "blocks" or "fused": what computed them
    level: Level | None = None

    def to(self, device: torch.device | str) -> "Totals":
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        links = None if self.links is None else Links(**{name: x.to(device) for name, x in vars(self.links).items()})
        level = self.level and Level(self.level.block, self.level.weight.to(device), self.level.norm.to(device))
        return Totals(**(vars(self) | moved | {"links": links, "level": level}))


def totals(layer: Layer, *, links: int = 0, block: int | None = None, impl: Impl = "auto") -> Totals:
    """Compute the totals of a layer without padding, and its `links` strongest pairs for each head.

    block  also compute the level of blocks of this number of tokens, a power of 2 from LEAST_BLOCK on
    impl   "reference": rows of the layer's own weights; "fused": the Triton kernel; "auto": the kernel on a GPU and
           blocks on a CPU if the layer keeps q and k, else the rows
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    if links < 0:
        raise ValueError(f"links must be at least 0, got {links}")
    if block is not None and (block < LEAST_BLOCK or block & (block - 1)):
        raise ValueError(f"block must be a power of 2 of at least {LEAST_BLOCK}, got {block}")
    check_linear(layer)
    vector, scores = measure_vectors(layer), layer.attended
    where = layer.kind, layer.index, layer.name, vector
    plain = isinstance(scores, SoftmaxScores) and layer.turning is None
    queries = layer.context.shape[2]
    level = None if block is None else Level.empty(block, vector, queries)
    if impl == "reference" or (impl == "auto" and not plain):
        found = read_rows(layer, vector, level)
        strongest = _find_links(layer, vector, found[-1], links) if links else None
        return Totals(*where, *found, strongest, "rows", level and level.average(queries))
    if not isinstance(scores, SoftmaxScores) or not plain:
        raise ValueError(f"impl='fused' does not cover {layer.name}: its weights are not a plain softmax of q and k")
    use_kernel = impl == "fused" or scores.query.is_cuda
    if use_kernel:
        from attnlab.analysis import totals_kernel

        reason = totals_kernel.find_gap(scores.query, scores.key, vector)
        if reason and impl == "fused":
            raise ValueError(f"impl='fused' does not cover {reason}; use impl='auto' or 'reference'")
        use_kernel = not reason
    own = layer.kind != "cross"
    received, taken, entropy, peak = (
        totals_kernel.stream_scores(scores, vector, level, peaks=links > 0, own=own)
        if use_kernel
        else stream_scores(scores, vector, level, peaks=links > 0, own=own)
    )
    strongest = _find_score_links(scores, vector, peak, links, own=own) if links else None
    how = "fused" if use_kernel else "blocks"
    norm = received * vector
    return Totals(*where, received, norm, taken, entropy, peak, strongest, how, level and level.average(queries))


def measure_vectors(layer: Layer) -> Tensor:
    """Compute ‖f_h(x_j)‖ (b,h,j), a few keys at a time, from the values that heads share."""
    values, projection = layer.grouped_values, widen(layer.output_weight)  # (b,g,j,d), (h,d,e)
    (b, g, j, d), h = values.shape, len(projection)
    gram = (projection @ projection.mT).view(g, h // g, d, d).transpose(1, 2).reshape(g, d, h // g * d)
    sizes = projection.new_empty(b, h, j)
    step = max(1, VECTORS // max(1, b * h * d))
    for start in range(0, j, step):
        x = values[:, :, start : start + step].to(gram.dtype)  # (b,g,·,d)
        turned = (x @ gram).view(b, g, -1, h // g, d)
        square = (turned * x[:, :, :, None]).sum(-1).transpose(2, 3)  # (b,g,h/g,·)
        sizes[:, :, start : start + step] = square.reshape(b, h, -1).clamp_min(0.0).sqrt()
    return sizes


def read_rows(
    layer: Layer, vector: Tensor, level: Level | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return received_weight, received_norm, taken_norm, entropy and peak of any layer, from rows of its weights."""
    b, h, j = vector.shape
    weight, norm = vector.new_zeros(b, h, j), vector.new_zeros(b, h, j)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows, weights in layer.chunks(ROWS if level is None else min(ROWS, level.block)):
        size, taken = widen(weights).abs(), measure_taken(layer, vector, rows, weights)
        share = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
        column, by_norm = size.sum(2), taken.sum(2)
        weight += column
        norm += by_norm
        if level is not None:
            every, size = (slice(None), slice(None)), by_norm / column.clamp_min(1e-30)
            level.add(every, rows.start, column[:, :, None], size)
        sums = taken.sum(-1), torch.special.entr(share).sum(-1)
        if layer.kind != "cross":
            taken = taken.clone()
            taken.diagonal(rows.start + j - layer.context.shape[2], 2, 3).zero_()
        parts.append((*sums, taken.amax(-1)))
    taken, entropy, peak = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    return weight, norm, taken, entropy, peak


def measure_taken(layer: Layer, vector: Tensor, rows: slice, weights: Tensor) -> Tensor:
    """Compute ‖α_hij f_h(x_j)‖ (b,h,·,j) of a range of queries, with their turning."""
    if layer.turning is None:
        return widen(weights).abs() * vector[:, :, None]
    turning = layer.turning[:, :, rows]
    if not needs_vectors(turning):
        return widen(weights).abs() * vector[:, :, None] * turning.abs()
    count = weights.shape[2]
    return Norms(Keys(layer, "reference"), lambda: iter([(slice(0, count), weights)]), count, turning).head


def stream_scores(
    scores: SoftmaxScores, vector: Tensor, level: Level | None = None, *, peaks: bool = True, own: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return received_weight, taken_norm, entropy and peak of a softmax, from blocks of q and k; each head alone.

    peaks   without them, peak is NaN: they take a third of the time
    own     queries and keys are the same tokens, so peaks leave out each query's own key
    """
    query, key = scores.query, scores.key
    (b, h, i, _), (_, g, j, _) = query.shape, key.shape
    received, taken, entropy = vector.new_zeros(b, h, j), vector.new_zeros(b, h, i), vector.new_zeros(b, h, i)
    peak = vector.new_full((b, h, i), 0.0 if peaks else torch.nan)
    for example in range(b):
        for head in range(h):
            q, k = widen(query[example, head]), widen(key[example, head // (h // g)])
            known = None if scores.logsumexp is None else widen(scores.logsumexp[example, head])
            to = (received, taken, entropy, peak) if peaks else (received, taken, entropy)
            sums = (x[example, head] for x in to)
            _stream_head(q, k, vector[example, head], known, scores, level, (example, head), own, *sums)
    return received, taken, entropy, peak


def _stream_head(
    q: Tensor, k: Tensor, size: Tensor, known: Tensor | None, scores: SoftmaxScores,
    level: Level | None, place: tuple[int, int], own: bool, received: Tensor, taken: Tensor, entropy: Tensor,
    peak: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the blocks of one head, q (i,d) and k (j,d), to its totals. place: its example and head in the level."""
    (i, _), j = q.shape, len(k)
    offset = j - i
    height, width = (GPU_ROWS, GPU_KEYS) if q.is_cuda else (ROWS, KEYS)
    height = height if level is None else LEVEL_ROWS
    k_one = torch.cat([k, k.new_ones(j, 1)], dim=1)  # (j,d+1)
    pair = torch.stack([size, torch.ones_like(size)], dim=1)  # (j,2)
    for start in range(0, i, height):
        stop = min(start + height, i)
        end = min(j, stop + offset) if scores.causal else j
        rows = q[start:stop] * scores.scale
        groups, sums = _group_rows(rows, None if level is None else level.block), rows.new_zeros(stop - start, 2)
        lse = _find_logsumexp(rows, k[:end], start + offset, scores.causal) if known is None else known[start:stop]
        rows = torch.cat([rows, -lse[:, None]], dim=1)  # z in one product
        column = size.new_zeros(len(groups), j)
        spread, most = entropy[start:stop], None if peak is None else peak[start:stop]
        for left in range(0, end, width):
            right = min(left + width, end)
            z = rows @ k_one[left:right].T  # (rows,keys)
            hidden = _find_hidden(start + offset, stop - start, left, right, z) if scores.causal else None
            if hidden is not None:
                z = z.masked_fill_(hidden, -torch.inf)
            p = z.exp()
            if hidden is not None:
                z = z.masked_fill_(hidden, 0.0)
            column[:, left:right] = groups @ p
            sums += p @ pair[left:right]
            spread -= torch.linalg.vecdot(p, z)
            if most is not None:
                p.mul_(size[left:right])
                if own:
                    p.diagonal(start + offset - left).zero_()
                torch.maximum(most, p.amax(1), out=most)
        taken[start:stop] = sums[:, 0]
        received += column.sum(0)
        if level is not None:
            level.add(place, start, column, size)


def _group_rows(rows: Tensor, block: int | None) -> Tensor:
    """Return which rows are in which block of a level, (n,rows); without a level, all are in one."""
    number = torch.arange(len(rows), device=rows.device) // (block or len(rows))
    return (number == torch.arange(int(number[-1]) + 1, device=rows.device)[:, None]).to(rows.dtype)


def _find_hidden(first: int, rows: int, left: int, right: int, like: Tensor) -> Tensor | None:
    """Return which pairs of a block are in the future, or None if none is. first: the key of the first query."""
    if right - 1 <= first:
        return None
    last = torch.arange(first, first + rows, device=like.device)[:, None]
    return torch.arange(left, right, device=like.device) > last


def _find_logsumexp(rows: Tensor, k: Tensor, first: int, causal: bool) -> Tensor:
    z = rows @ k.T
    hidden = _find_hidden(first, len(rows), 0, len(k), z) if causal else None
    return (z if hidden is None else z.masked_fill_(hidden, -torch.inf)).logsumexp(1)


def _find_score_links(scores: SoftmaxScores, vector: Tensor, peak: Tensor, count: int, *, own: bool) -> Links:
    """Find the strongest links from q and k. It computes as many rows for each head as there are links."""
    (b, h, i, d), (_, g, j, _) = scores.query.shape, scores.key.shape
    chosen = peak.topk(min(count, i), dim=2).indices  # (b,h,r)
    q = scores.query.gather(2, chosen[..., None].expand(-1, -1, -1, d))
    r = chosen.shape[2]
    z = (widen(q).reshape(b, g, h // g * r, d) @ widen(scores.key).mT).view(b, h, r, j) * scores.scale
    if scores.causal:
        z = z.masked_fill(torch.arange(j, device=z.device) > (chosen + (j - i))[..., None], -torch.inf)
    weights = z.softmax(-1)
    return _choose_links(weights, weights * vector[:, :, None], chosen, count, chosen + (j - i) if own else None)


def _find_links(layer: Layer, vector: Tensor, peak: Tensor, count: int) -> Links:
    """Find the strongest links of any layer from rows of its weights."""
    chosen = peak.topk(min(count, peak.shape[2]), dim=2).indices  # (b,h,r)
    needed = sorted(set(chosen.flatten().tolist()))
    b, h, r = chosen.shape
    weights, taken = vector.new_empty(2, b, h, r, vector.shape[2])
    for row in needed:
        place = chosen == row  # (b,h,r)
        own = layer.rows(row, row + 1)  # (b,h,1,j)
        for held, x in ((weights, widen(own)), (taken, measure_taken(layer, vector, slice(row, row + 1), own))):
            held[place] = x.expand(-1, -1, r, -1)[place]
    offset = vector.shape[2] - peak.shape[2]
    return _choose_links(weights, taken, chosen, count, None if layer.kind == "cross" else chosen + offset)


def _choose_links(weights: Tensor, taken: Tensor, rows: Tensor, count: int, own: Tensor | None) -> Links:
    """Choose the pairs with the largest norms among some rows of weights and norms (b,h,r,j).

    own   (b,h,r) the key of each row that is its own token; None in cross attention
    """
    _, _, r, j = weights.shape
    if own is not None:
        taken = taken.masked_fill(torch.arange(j, device=taken.device) == own[..., None], 0.0)
    norm, place = taken.flatten(2).topk(min(count, r * j), dim=2)  # (b,h,k)
    there = norm > 0
    query = rows.gather(2, place // j).masked_fill(~there, -1)
    weight = weights.flatten(2).gather(2, place)
    return Links(query, (place % j).masked_fill(~there, -1), weight, norm)
