"""Word alignments: read from attention maps, and scored against manual alignments.

A link is (source word, target word), from 0. Annotators mark links as sure, S, or only possible; P holds both. For the
proposed links A, over all sentence pairs together (Och & Ney 2003),

    AER = 1 − (|A∩S| + |A∩P|) / (|A| + |S|)        precision = |A∩P| / |A|        recall = |A∩S| / |S|

From a map to links (Kobayashi et al. 2020, §5): row i of a decoder reads one target piece and predicts the next. It can
stand for either:

    awo   alignment with output: row i stands for the piece that it predicts
    awi   alignment with input: row i stands for the piece that it reads

    word map(I, J) = mean over the rows i of word I of Σ over the pieces j of word J of map(i, j)
    link of I      = argmax_J of it over source words and special tokens; no link if that is a special token
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.analysis.symmetrise import Link, Links
from attnlab.mechanisms.mechanism import widen

NOWHERE = -1  # as a word index: the token belongs to no word; as a choice: no link

Pair = Iterable[Link]  # the links of one sentence pair
Corpus = Sequence[Pair]  # those of several


def aer(links: Pair | Corpus, sure: Pair | Corpus, possible: Pair | Corpus) -> float:
    """Compute the alignment error rate, 0 … 1, of one sentence pair (sets of links) or several (sequences of sets).

    `possible` may leave out the sure links.
    """
    return compute_rate("aer", count_links(links, sure, possible))


def precision(links: Pair | Corpus, sure: Pair | Corpus, possible: Pair | Corpus) -> float:
    """Compute the share of links that are possible; the arguments are those of `aer`."""
    return compute_rate("precision", count_links(links, sure, possible))


def recall(links: Pair | Corpus, sure: Pair | Corpus, possible: Pair | Corpus) -> float:
    """Compute the share of sure links that are among the links; the arguments are those of `aer`."""
    return compute_rate("recall", count_links(links, sure, possible))


@dataclass(frozen=True)
class Score:
    """The rates, NaN if 0/0, with the 2.5 % and 97.5 % quantiles of a bootstrap over sentence pairs."""

    aer: float
    precision: float
    recall: float
    intervals: dict[str, tuple[float, float]]
    pairs: int
    bootstrap: int

    def __str__(self) -> str:
        parts = []
        for name, label in (("aer", "AER"), ("precision", "precision"), ("recall", "recall")):
            parts.append(f"{label} {100 * getattr(self, name):.2f}")
            if name in self.intervals:
                parts[-1] += " [{:.2f}, {:.2f}]".format(*(100 * x for x in self.intervals[name]))
        how = f", 95 % intervals of {self.bootstrap} resamplings" if self.bootstrap else ""
        return f"{', '.join(parts)} (%, {self.pairs} pair{'s' if self.pairs != 1 else ''}{how})"


def score(links: Corpus, sure: Corpus, possible: Corpus, *, bootstrap: int = 1000, seed: int = 0) -> Score:
    """Compute the rates of a corpus with bootstrap intervals; `bootstrap` is the number of resamplings, 0 = none."""
    if bootstrap < 0:
        raise ValueError(f"bootstrap must be at least 0 (0 = no intervals), got {bootstrap}")
    counts = count_links(links, sure, possible)
    compute_rate("aer", counts)
    intervals = {}
    if bootstrap:
        generator = np.random.default_rng(seed)
        times = generator.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=bootstrap)
        for name, (over, under) in _fractions((times @ counts).T).items():
            if len(rates := over[under > 0] / under[under > 0]):
                intervals[name] = (float(np.quantile(rates, 0.025)), float(np.quantile(rates, 0.975)))
    return Score(**_rates(counts.sum(0)), intervals=intervals, pairs=len(counts), bootstrap=bootstrap)


def count_links(links: Pair | Corpus, sure: Pair | Corpus, possible: Pair | Corpus) -> np.ndarray:
    """Count |A|, |S|, |A∩S| and |A∩P| of each sentence pair, (pairs, 4). The rates need no more."""
    proposed, right, allowed = (_corpus(given) for given in (links, sure, possible))
    if not len(proposed) == len(right) == len(allowed):
        sets = f"{len(proposed)}, {len(right)} and {len(allowed)} sets"
        raise ValueError(f"links, sure and possible must have one set for each sentence pair, got {sets}")
    rows = [(len(a), len(s), len(a & s), len(a & (s | p))) for a, s, p in zip(proposed, right, allowed, strict=True)]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def compute_rate(name: str, counts: np.ndarray) -> float:
    """Compute aer, precision or recall from the result of `count_links`. Raises ValueError if it is 0/0."""
    value = _rates(counts.sum(0))[name]
    if math.isnan(value):
        raise ValueError(f"{name} is undefined (0/0): there are {UNDEFINED[name]}")
    return value


@dataclass(frozen=True, eq=False)
class CorpusAlignment:
    """For every target word of a corpus, the source word it is linked to, or NOWHERE, and the value of the link."""

    starts: np.ndarray  # (pairs+1,) offset of the target words of each pair
    choice: np.ndarray  # (words,) int32
    value: np.ndarray  # (words,) float32

    @classmethod
    def empty(cls, lengths: Sequence[int]) -> "CorpusAlignment":
        """Create an alignment without links, for targets of these lengths in words."""
        starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
        return cls(starts, np.full(starts[-1], NOWHERE, dtype=np.int32), np.zeros(starts[-1], dtype=np.float32))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def set_links(self, pair: int, choice: np.ndarray, value: np.ndarray) -> None:
        """Set the links of the first target words of a pair. Entries beyond its last word are padding."""
        here = slice(self.starts[pair], min(self.starts[pair + 1], self.starts[pair] + len(choice)))
        self.choice[here], self.value[here] = (x[: here.stop - here.start] for x in (choice, value))

    def links(self) -> list[Links]:
        return [*map(frozenset, self.iterate_scores())]

    def scores(self) -> list[dict[Link, float]]:
        return list(self.iterate_scores())

    def iterate_scores(self) -> Iterator[dict[Link, float]]:
        """Yield the links of each pair with their values, in the order of target words."""
        for start, stop in pairwise(self.starts):
            own = zip(self.choice[start:stop].tolist(), self.value[start:stop].tolist(), strict=True)
            yield {(choice, n): value for n, (choice, value) in enumerate(own) if choice != NOWHERE}


def word_maps(maps: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Pool maps (b,i,j) of pieces to maps (b,I,J) of words, given the word index of each row (b,i) and key (b,j).

    NOWHERE belongs to no word. Key words without a key get −∞; row words without a row get 0 elsewhere.
    """
    of_row, of_key = _membership(rows), _membership(keys)  # (b,I,i), (b,J,j)
    share = (of_row / of_row.sum(-1, keepdim=True).clamp_min(1)).to(widen(maps))
    pooled = share @ widen(maps) @ of_key.to(widen(maps)).mT
    return pooled.masked_fill(~of_key.any(-1).unsqueeze(1), -torch.inf)


def choose_words(maps: Tensor, rows: Tensor, keys: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Choose the source word of each target word, or NOWHERE, and return it with its value in the map; (b,I) each.

    words   number of source words; a key with a larger index is a special token, and choosing it means no link
    """
    value, best = word_maps(maps, rows, keys).max(-1)
    linked = (best < words) & _membership(rows).any(-1)
    return best.masked_fill(~linked, NOWHERE), value


def assign_rows(labels: Tensor, setting: str) -> Tensor:
    """Return the word that each decoder row stands for, given the word of the piece that it predicts; (b,i) both."""
    if setting == "awo":
        return labels
    if setting == "awi":
        return F.pad(labels[:, :-1], (1, 0), value=NOWHERE)
    raise ValueError(f"setting must be awo (alignment with output) or awi (with input), got {setting!r}")


def _membership(words: Tensor) -> Tensor:
    """Return which token belongs to which word, (b,n) -> (b,words,n) bool."""
    return words.unsqueeze(1) == torch.arange(int(words.max()) + 1, device=words.device).view(1, -1, 1)


def _fractions(sums: Any) -> dict[str, tuple[Any, Any]]:
    """Return the numerator and denominator of every rate from |A|, |S|, |A∩S| and |A∩P|."""
    proposed, sure, right, allowed = sums
    return {
        "aer": (proposed + sure - right - allowed, proposed + sure),
        "precision": (allowed, proposed),
        "recall": (right, sure),
    }


UNDEFINED = {"aer": "no links and no sure links", "precision": "no links", "recall": "no sure links"}


def _rates(sums: np.ndarray) -> dict[str, float]:
    """Compute the rates from the four sums; NaN if 0/0."""
    return {name: float(over / under) if under else math.nan for name, (over, under) in _fractions(sums).items()}


def _corpus(given: Pair | Corpus) -> list[AbstractSet[Link]]:
    """Return the links of each sentence pair as a list of sets; a single pair gives a list of one."""
    items = list(given)
    single = isinstance(given, AbstractSet) or not items or _is_link(items[0])
    pairs: list[Any] = [items] if single else items
    for number, pair in enumerate(pairs):
        for link in pair:
            if not _is_link(link):
                raise ValueError(f"pair {number}: a link must be two integers (source word, target word), got {link!r}")
    return [frozenset((int(s), int(t)) for s, t in pair) for pair in pairs]


def _is_link(link: Any) -> bool:
    return (
        isinstance(link, tuple | list)
        and len(link) == 2
        and all(isinstance(place, int | np.integer) and not isinstance(place, bool) for place in link)
    )
