"""Extract links from a model's cross attention: run batches of sentence pairs with teacher forcing, then read maps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.aligning.choice import SINGLE, Candidate, Place, Reading
from attnlab.analysis.alignment import NOWHERE, CorpusAlignment, assign_rows, choose_words, compute_rate, count_links
from attnlab.analysis.contribution import check_linear, norms
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import Layer
from attnlab.tasks.batching import plan_batches
from attnlab.tasks.links import Gold

Sentences = Sequence[Sequence[str]]  # the words of each sentence
Tick = Callable[[int, int], None]  # called with the number of finished pairs and of all pairs
MapKey = tuple[str, Place, Place]  # by, layer, head

BATCH_TOKENS = 4096  # maximum number of tokens in a batch, padding included


@dataclass(frozen=True, eq=False)
class PairBatch:
    """A batch of sentence pairs: cross-attention layers, and the word that each token belongs to.

    layers   by index, those that were requested
    labels   (b,i) the target word that each decoder row predicts, or NOWHERE
    keys     (b,j) the source word of each source token; special tokens count from `words`, padding is NOWHERE
    real     (b,i,j) bool: neither the row nor the key is padding
    extra    maps (b,i,j) that are not of a layer: exp β of "probe", |Δ| of "gradient"
    """

    layers: Mapping[int, Layer]
    labels: Tensor
    keys: Tensor
    words: int
    real: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PairReader:
    """Sentence pairs that a model can read in batches."""

    source_lengths: np.ndarray  # in tokens, (pairs,)
    target_lengths: np.ndarray
    target_words: list[int]
    readable: np.ndarray  # (pairs,) bool: neither empty nor too long
    size: tuple[int, int]  # number of cross-attention layers and of heads
    read_batch: Callable[[Sequence[int], AbstractSet[MapKey]], PairBatch]  # takes indices of pairs and what to read
    left_out: dict[str, list[int]] = field(default_factory=dict)  # indices of pairs that are too long, by reason
    batch_tokens: int = BATCH_TOKENS

    def plan_batches(self) -> list[list[int]]:
        """Return batches of readable pairs of similar lengths."""
        return plan_pairs(self.readable, (self.target_lengths, self.source_lengths), self.batch_tokens)


def plan_pairs(readable: np.ndarray, lengths: tuple[np.ndarray, ...], tokens: int) -> list[list[int]]:
    """Divide readable pairs into batches of similar lengths of at most `tokens` padded tokens, the longest first."""
    places = np.flatnonzero(readable)
    some = tuple(side[places] for side in lengths)
    limit = max(tokens, *(int(side.max(initial=0)) for side in some))
    batches = plan_batches(some, tokens=limit, examples=None, seed=0, epoch=0, shuffle=False)
    return [places[batch].tolist() for batch in batches]


@dataclass(eq=False)
class FoundLinks:
    """The links of every candidate, the sums of norms by layer and head, and of the entropies of rows by map."""

    aligned: dict[Candidate, CorpusAlignment]
    norm_sums: dict[tuple[Place, Place], list[float]] = field(default_factory=dict)  # sum and count
    entropy_sums: dict[MapKey, list[float]] = field(default_factory=dict)  # sum and count

    def mean_norm(self, candidate: Candidate) -> float:
        """Return the mean of ‖αf(x)‖ over all target and source tokens of the text."""
        total, count = self.norm_sums[candidate.layer, candidate.head]
        return total / count

    def mean_entropy(self, candidate: Candidate) -> float:
        """Return the mean entropy of the rows of a map, 0 … 1, as a share of that of an even row."""
        total, count = self.entropy_sums[candidate.by, candidate.layer, candidate.head]
        return total / count

    def choose_best(self, reading: Reading, gold: Gold | None = None) -> Candidate:
        """Return the candidate that the reading's rule chooses, the first of equals, such as both settings of a map."""
        candidates = list(self.aligned)
        if reading.rule is None or len(candidates) == 1:
            return candidates[0]
        if reading.rule == "highest-norm":
            return max(candidates, key=self.mean_norm)
        if reading.rule == "lowest-entropy":
            return min(candidates, key=self.mean_entropy)
        if gold is None:
            raise ValueError("best-on needs gold links: pass gold")
        return min(candidates, key=lambda candidate: compute_rate("aer", self.count_links(candidate, gold)))

    def count_links(self, candidate: Candidate, gold: Gold) -> np.ndarray:
        """Return the counts of links that the candidate's rates are computed from, for each pair."""
        return count_links(self.aligned[candidate].links(), gold.sure, gold.possible)


def find_links(
    reader: PairReader,
    list_candidates: Callable[[int, int], list[Candidate]],
    *,
    with_norms: bool = False,
    with_entropies: bool = False,
    with_null: bool = True,
    tick: Tick = lambda done, of: None,
) -> FoundLinks:
    """Find the links of all pairs by every candidate. list_candidates takes the model's numbers of layers and heads.

    with_null   leave a word without a link if a special token has its largest value; else every word gets a link
    """
    candidates = list_candidates(*reader.size)
    found = FoundLinks({candidate: CorpusAlignment.empty(reader.target_words) for candidate in candidates})
    wanted: set[MapKey] = {(c.by, c.layer, c.head) for c in candidates}
    if with_norms:
        wanted |= {("norm", layer, head) for _, layer, head in wanted}
    done = 0
    for numbers in reader.plan_batches():
        batch = reader.read_batch(numbers, wanted)
        if not with_null:
            batch = replace(batch, keys=batch.keys.masked_fill(batch.keys >= batch.words, NOWHERE))
        _add_batch(found, numbers, batch, wanted, with_entropies)
        done += len(numbers)
        tick(done, int(reader.readable.sum()))
    return found


def _add_batch(
    found: FoundLinks, numbers: Sequence[int], batch: PairBatch, wanted: AbstractSet[MapKey], with_entropies: bool
) -> None:
    for which, values in iterate_maps(batch, wanted):
        by, *place = which
        if by == "norm":
            total = found.norm_sums.setdefault((place[0], place[1]), [0.0, 0.0])
            total[0] += float(values[batch.real].sum(dtype=torch.float64))
            total[1] += float(batch.real.sum())
        if with_entropies:
            total = found.entropy_sums.setdefault(which, [0.0, 0.0])
            for k, amount in enumerate(_sum_entropies(values, batch.real)):
                total[k] += amount
        for candidate, aligned in found.aligned.items():
            if (candidate.by, candidate.layer, candidate.head) == which:
                rows = assign_rows(batch.labels, candidate.setting)
                best, value = (x.cpu().numpy() for x in choose_words(values, rows, batch.keys, batch.words))
                for k, number in enumerate(numbers):
                    aligned.set_links(number, best[k], value[k])


def _sum_entropies(values: Tensor, real: Tensor) -> tuple[float, float]:
    """Return the sum over rows of H(row) / log(number of keys), and the number of rows."""
    share = values.clamp_min(0.0).masked_fill(~real, 0.0)
    share = share / share.sum(-1, keepdim=True).clamp_min(1e-30)
    even = real.sum(-1).clamp_min(2).log()
    entropy = torch.special.entr(share).sum(-1) / even
    rows = real.any(-1)
    return float(entropy[rows].sum(dtype=torch.float64)), float(rows.sum())


def iterate_maps(batch: PairBatch, wanted: AbstractSet[MapKey]) -> Iterator[tuple[MapKey, Tensor]]:
    """Yield the wanted maps (b,i,j) layer by layer, and then the means over layers."""
    means: dict[MapKey, Tensor] = {}
    for place, layer in sorted(batch.layers.items()):
        here = [key for key in sorted(wanted, key=str) if key[0] not in SINGLE and key[1] in (place, "mean")]
        computed = norms(layer) if any(by == "norm" for by, *_ in here) else None
        for by, where, head in here:
            if by == "norm":
                assert computed is not None
                values = computed.layer if head == "mean" else computed.head[:, head]
            elif by == "signed":
                values = project_contributions(layer)
            else:
                values = layer.weights.mean(1) if head == "mean" else layer.weights[:, head]
            if where == "mean":
                means[by, where, head] = means.get((by, where, head), 0.0) + values / len(batch.layers)
            else:
                yield (by, where, head), values
    yield from means.items()
    yield from ((key, batch.extra[key[0]]) for key in wanted if key[0] in SINGLE)


def project_contributions(layer: Layer) -> Tensor:
    """Return Σ_h α_hij f_h(x_j) · y_i/‖y_i‖ (b,i,j), y_i = Σ_j Σ_h α f: how far each key moves the output its way."""
    check_linear(layer)
    weight = widen(layer.output_weight)
    output = torch.einsum("bhid,hde->bie", widen(layer.turned_context), weight)  # (b,i,e)
    output = output / output.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    back = torch.einsum("bie,hde->bhid", output, weight)  # the direction of y in each head
    if layer.turning is not None and layer.turning.dim() == 5:
        back = torch.einsum("bhide,bhie->bhid", widen(layer.turning), back)
    elif layer.turning is not None:
        back = back * widen(layer.turning)
    projected = back @ widen(layer.values).mT  # (b,h,i,j)
    return (projected * widen(layer.weights)).sum(1)


def number_pieces(words: Sequence[Sequence[Any]]) -> list[int]:
    """Return the number of the word that each piece belongs to, given the pieces of each word."""
    return [number for number, pieces in enumerate(words) for _ in pieces]


def pad_rows(rows: Sequence[Sequence[int]], fill: int = NOWHERE) -> Tensor:
    """Pad rows of different lengths on the right to one tensor."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), fill, dtype=np.int64)
    for k, row in enumerate(rows):
        padded[k, : len(row)] = row
    return torch.from_numpy(padded)
