"""Extract links from a model's cross attention: run batches of sentence pairs with teacher forcing, then read maps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlab.aligning.choice import Candidate, Place, Reading
from attnlab.analysis.alignment import NOWHERE, CorpusAlignment, assign_rows, choose_words, compute_rate, count_links
from attnlab.analysis.contribution import norms
from attnlab.records.record import Record
from attnlab.tasks.batching import plan_batches
from attnlab.tasks.links import Gold

Sentences = Sequence[Sequence[str]]  # the words of each sentence
Tick = Callable[[int, int], None]  # called with the number of finished pairs and of all pairs
MapKey = tuple[str, Place, Place]  # by, layer, head

BATCH_TOKENS = 4096  # maximum number of tokens in a batch, padding included


@dataclass(frozen=True, eq=False)
class PairBatch:
    """A batch of sentence pairs: the Record, and the word that each token belongs to.

    labels   (b,i) the target word that each decoder row predicts, or NOWHERE
    keys     (b,j) the source word of each source token; special tokens count from `words`, padding is NOWHERE
    probe    (b,i,j) exp β, if requested
    """

    record: Record
    labels: Tensor
    keys: Tensor
    words: int
    probe: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PairReader:
    """Sentence pairs that a model can read in batches."""

    source_lengths: np.ndarray  # in tokens, (pairs,)
    target_lengths: np.ndarray
    target_words: list[int]
    readable: np.ndarray  # (pairs,) bool: neither empty nor too long
    read_batch: Callable[[Sequence[int], bool], PairBatch]  # takes indices of pairs, and whether to compute the probe
    notes: list[str] = field(default_factory=list)

    def plan_batches(self) -> list[list[int]]:
        """Return batches of readable pairs of similar lengths."""
        places = np.flatnonzero(self.readable)
        lengths = self.target_lengths[places], self.source_lengths[places]
        limit = max(BATCH_TOKENS, *(int(side.max(initial=0)) for side in lengths))
        batches = plan_batches(lengths, tokens=limit, examples=None, seed=0, epoch=0, shuffle=False)
        return [places[batch].tolist() for batch in batches]


@dataclass(eq=False)
class FoundLinks:
    """The links of every candidate, and the sums of norms by layer and head."""

    aligned: dict[Candidate, CorpusAlignment]
    norm_sums: dict[tuple[Place, Place], list[float]] = field(default_factory=dict)  # sum and count

    def mean_norm(self, candidate: Candidate) -> float:
        """Return the mean of ‖αf(x)‖ over all target and source tokens of the text."""
        total, count = self.norm_sums[candidate.layer, candidate.head]
        return total / count

    def choose_best(self, reading: Reading, gold: Gold | None = None) -> Candidate:
        """Return the candidate that the reading's rule chooses, the first of equals, such as both settings of a map."""
        candidates = list(self.aligned)
        if reading.rule is None or len(candidates) == 1:
            return candidates[0]
        if reading.rule == "highest-norm":
            return max(candidates, key=self.mean_norm)
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
    with_probe: bool = False,
    tick: Tick = lambda done, of: None,
) -> FoundLinks:
    """Find the links of all pairs by every candidate. list_candidates takes the model's numbers of layers and heads."""
    found = FoundLinks({})
    done = 0
    for numbers in reader.plan_batches():
        batch = reader.read_batch(numbers, with_probe)
        if not found.aligned:
            if not (layers := batch.record.kind("cross")):
                raise ValueError("this model has no cross attention, so it cannot align words")
            candidates = list_candidates(len(layers), layers[0].context.shape[1])
            found = FoundLinks({candidate: CorpusAlignment.empty(reader.target_words) for candidate in candidates})
        _add_batch(found, numbers, batch, with_norms)
        done += len(numbers)
        tick(done, int(reader.readable.sum()))
    return found


def _add_batch(found: FoundLinks, numbers: Sequence[int], batch: PairBatch, with_norms: bool) -> None:
    wanted: set[MapKey] = {(c.by, c.layer, c.head) for c in found.aligned}
    if with_norms:
        wanted |= {("norm", layer, head) for _, layer, head in wanted}
    masks = batch.record.masks
    real = (masks["target"].unsqueeze(2) & masks["source"].unsqueeze(1)).to(batch.keys.device)
    for which, values in _iterate_maps(batch, wanted):
        by, *place = which
        if by == "norm":
            total = found.norm_sums.setdefault((place[0], place[1]), [0.0, 0.0])
            total[0] += float(values[real].sum(dtype=torch.float64))
            total[1] += float(real.sum())
        for candidate, aligned in found.aligned.items():
            if (candidate.by, candidate.layer, candidate.head) == which:
                rows = assign_rows(batch.labels, candidate.setting)
                best, value = (x.cpu().numpy() for x in choose_words(values, rows, batch.keys, batch.words))
                for k, number in enumerate(numbers):
                    aligned.set_links(number, best[k], value[k])


def _iterate_maps(batch: PairBatch, wanted: set[MapKey]) -> Iterator[tuple[MapKey, Tensor]]:
    """Yield the wanted maps (b,i,j) layer by layer, and then the means over layers."""
    layers = batch.record.kind("cross")
    means: dict[MapKey, Tensor] = {}
    for place, layer in enumerate(layers):
        computed = norms(layer) if any(by == "norm" for by, *_ in wanted) else None
        for by, where, head in sorted(wanted, key=str):
            if where not in (place, "mean"):
                continue
            if by == "probe":
                assert batch.probe is not None
                values = batch.probe
            elif by == "norm":
                assert computed is not None
                values = computed.layer if head == "mean" else computed.head[:, head]
            else:
                values = layer.weights.mean(1) if head == "mean" else layer.weights[:, head]
            if where == "mean":
                means[by, where, head] = means.get((by, where, head), 0.0) + values / len(layers)
            else:
                yield (by, where, head), values
    yield from means.items()


def number_pieces(words: Sequence[Sequence[Any]]) -> list[int]:
    """Return the number of the word that each piece belongs to, given the pieces of each word."""
    return [number for number, pieces in enumerate(words) for _ in pieces]


def pad_rows(rows: Sequence[Sequence[int]], fill: int = NOWHERE) -> Tensor:
    """Pad rows of different lengths on the right to one tensor."""
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], True, fill)
