"""Alignments from a model's cross attention: sentence pairs in batches, teacher-forced, to maps, to links."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.aligning.choice import Candidate, Place, Reading
from attnlab.analysis.alignment import NOWHERE, CorpusAlignment, assign_rows, choose_words, compute_rate, count_links
from attnlab.analysis.contribution import norms
from attnlab.records.record import Record
from attnlab.tasks.batching import plan_batches
from attnlab.tasks.links import Gold

Sentences = Sequence[Sequence[str]]  # the words of each
Tick = Callable[[int, int], None]  # is told how many pairs are done, of how many
Spot = tuple[str, Place, Place]  # by, layer, head: a map, however its rows are taken

TOKENS = 4096  # padded, in a batch


@dataclass(frozen=True, eq=False)
class Seen:
    """A batch as a model saw it: the record, and the word that each of its tokens is of.

    labels   (b,i) the target word that each decoder row predicts, or NOWHERE
    keys     (b,j) the source word of each source token; special tokens from `words` on, padding NOWHERE
    probe    (b,i,j) exp β, where it was asked for
    """

    record: Record
    labels: Tensor
    keys: Tensor
    words: int
    probe: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PairReader:
    """Sentence pairs as a model reads them."""

    source_lengths: np.ndarray  # in tokens, (pairs,)
    target_lengths: np.ndarray
    target_words: list[int]
    readable: np.ndarray  # (pairs,) bool: neither empty nor too long
    see: Callable[[Sequence[int], bool], Seen]  # of some pairs; True: with the probe
    notes: list[str] = field(default_factory=list)

    def plan(self) -> list[list[int]]:
        """The readable pairs in batches of similar lengths."""
        places = np.flatnonzero(self.readable)
        lengths = self.target_lengths[places], self.source_lengths[places]
        most = max(TOKENS, *(int(side.max(initial=0)) for side in lengths))
        batches = plan_batches(lengths, tokens=most, examples=None, seed=0, epoch=0, shuffle=False)
        return [places[batch].tolist() for batch in batches]


@dataclass(eq=False)
class FoundLinks:
    """What every candidate links, and the mean of the norms in the layers and heads that were looked at."""

    aligned: dict[Candidate, CorpusAlignment]
    norm_sums: dict[tuple[Place, Place], list[float]] = field(default_factory=dict)  # their sum, and how many

    def norm(self, candidate: Candidate) -> float:
        """The mean of ‖αf(x)‖ over all target and source tokens of the text."""
        total, count = self.norm_sums[candidate.layer, candidate.head]
        return total / count

    def best(self, reading: Reading, gold: Gold | None = None) -> Candidate:
        """The candidate that the reading's rule chooses; the first where several are as good."""
        candidates = list(self.aligned)
        if len(candidates) == 1:
            return candidates[0]
        if reading.rule == "highest-norm":
            return max(candidates, key=self.norm)
        if gold is None:
            raise ValueError("best-on chooses by gold links, and there are none")
        return min(candidates, key=lambda candidate: compute_rate("aer", self.counts(candidate, gold)))

    def counts(self, candidate: Candidate, gold: Gold) -> np.ndarray:
        """What the candidate's rates are made of, for each pair."""
        return count_links(self.aligned[candidate].links(), gold.sure, gold.possible)


def find(
    reader: PairReader,
    offered: Callable[[int, int], list[Candidate]],
    *,
    with_norms: bool = False,
    with_probe: bool = False,
    tick: Tick = lambda done, of: None,
) -> FoundLinks:
    """The links of all pairs by every candidate that a model of so many layers and heads offers, in one pass."""
    found = FoundLinks({})
    done = 0
    for numbers in reader.plan():
        seen = reader.see(numbers, with_probe)
        if not found.aligned:
            if not (layers := seen.record.kind("cross")):
                raise ValueError("this model has no attention from a target to a source: nothing aligns them")
            candidates = offered(len(layers), layers[0].context.shape[1])
            found = FoundLinks({candidate: CorpusAlignment.empty(reader.target_words) for candidate in candidates})
        _add(found, numbers, seen, with_norms)
        done += len(numbers)
        tick(done, int(reader.readable.sum()))
    return found


def _add(found: FoundLinks, numbers: Sequence[int], seen: Seen, with_norms: bool) -> None:
    spots: set[Spot] = {(c.by, c.layer, c.head) for c in found.aligned}
    if with_norms:
        spots |= {("norm", layer, head) for _, layer, head in spots}
    real = (seen.record.masks["target"].unsqueeze(2) & seen.record.masks["source"].unsqueeze(1)).to(seen.keys.device)
    for spot, made in _maps(seen, spots):
        by, *place = spot
        if by == "norm":
            total = found.norm_sums.setdefault((place[0], place[1]), [0.0, 0.0])
            total[0] += float(made[real].sum(dtype=torch.float64))
            total[1] += float(real.sum())
        for candidate, aligned in found.aligned.items():
            if (candidate.by, candidate.layer, candidate.head) == spot:
                rows = assign_rows(seen.labels, candidate.setting)
                best, value = (x.cpu().numpy() for x in choose_words(made, rows, seen.keys, seen.words))
                for k, number in enumerate(numbers):
                    aligned.set_links(number, best[k], value[k])


def _maps(seen: Seen, spots: set[Spot]) -> Iterator[tuple[Spot, Tensor]]:
    """The maps (b,i,j) asked for, layer by layer; those of layers together last."""
    layers = seen.record.kind("cross")
    together: dict[Spot, Tensor] = {}
    for place, layer in enumerate(layers):
        read = norms(layer) if any(by == "norm" for by, *_ in spots) else None
        for by, where, head in sorted(spots, key=str):
            if where not in (place, "mean"):
                continue
            if by == "probe":
                assert seen.probe is not None
                made = seen.probe
            elif by == "norm":
                assert read is not None
                made = read.layer if head == "mean" else read.head[:, head]
            else:
                made = layer.weights.mean(1) if head == "mean" else layer.weights[:, head]
            if where == "mean":
                together[by, where, head] = together.get((by, where, head), 0.0) + made / len(layers)
            else:
                yield (by, where, head), made
    yield from together.items()


def numbered(words: Sequence[Sequence[Any]]) -> list[int]:
    """The number of the word that each piece is of, given the pieces of each word."""
    return [number for number, pieces in enumerate(words) for _ in pieces]


def padded(rows: Sequence[Sequence[int]], fill: int = NOWHERE) -> Tensor:
    """Rows of different lengths as one tensor, filled on the right."""
    made = torch.full((len(rows), max(map(len, rows), default=0)), fill)
    for k, row in enumerate(rows):
        made[k, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return made
