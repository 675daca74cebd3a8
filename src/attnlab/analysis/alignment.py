"""Word alignments: read from maps of attention, and scored against alignments made by hand.

A link is (source word, target word), from 0. Annotators mark links as sure, S, or only possible; P holds both. Of the
links A that are proposed, over all sentence pairs together (Och & Ney 2003),

    AER = 1 − (|A∩S| + |A∩P|) / (|A| + |S|)        precision = |A∩P| / |A|        recall = |A∩S| / |S|

From a map to links (Kobayashi et al. 2020, §5). Row i of a decoder reads one target piece and predicts the next; it can
be taken for either:

    awo   alignment with output: row i stands for the piece that it predicts
    awi   alignment with input: row i stands for the piece that it reads

    word map(I, J) = mean over the rows i of word I of Σ over the pieces j of word J of map(i, j)
    link of I      = argmax_J of it over the source words and the special tokens; none where that is a special token
"""

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.analysis.contribution import widen
from attnlab.analysis.symmetrise import Link, Links

NOWHERE = -1  # in a list of word numbers: a token that is of no word; in a list of choices: no link

Pair = Iterable[Link]  # the links of one sentence pair
Corpus = Sequence[Pair]  # those of several


def aer(links: Pair | Corpus, sure: Pair | Corpus, possible: Pair | Corpus) -> float:
    """The alignment error rate, 0 … 1: of one sentence pair (sets of links), or of several (sequences of such sets).

    possible may leave out what is sure.
    """
    return compute_rate("aer", count_links(links, sure, possible))


def precision(links: Pair | Corpus, sure: Pair | Corpus, possible: Pair | Corpus) -> float:
    """Which share of the links is possible; the arguments are those of `aer`."""
    return compute_rate("precision", count_links(links, sure, possible))


def recall(links: Pair | Corpus, sure: Pair | Corpus, possible: Pair | Corpus) -> float:
    """Which share of the sure links was found; the arguments are those of `aer`."""
    return compute_rate("recall", count_links(links, sure, possible))


@dataclass(frozen=True)
class Score:
    """The rates, NaN where one is 0/0, with the 2.5 % and 97.5 % points of their bootstrap over sentence pairs."""

    aer: float
    precision: float
    recall: float
    intervals: dict[str, tuple[float, float]]
    pairs: int
    bootstrap: int

    def __str__(self) -> str:
        told = []
        for name, label in (("aer", "AER"), ("precision", "precision"), ("recall", "recall")):
            told.append(f"{label} {100 * getattr(self, name):.2f}")
            if name in self.intervals:
                told[-1] += " [{:.2f}, {:.2f}]".format(*(100 * x for x in self.intervals[name]))
        how = f", 95 % intervals of {self.bootstrap} resamplings" if self.bootstrap else ""
        return f"{', '.join(told)} (%, {self.pairs} pair{'s' if self.pairs != 1 else ''}{how})"


def score(links: Corpus, sure: Corpus, possible: Corpus, *, bootstrap: int = 1000, seed: int = 0) -> Score:
    """The rates of a corpus, with intervals from so many resamplings of its sentence pairs; 0: without."""
    if bootstrap < 0:
        raise ValueError(f"bootstrap={bootstrap} must be 0, for no interval, or a number of resamplings such as 1000")
    counts = count_links(links, sure, possible)
    compute_rate("aer", counts)
    intervals = {}
    if bootstrap:
        draw = np.random.default_rng(seed)
        times = draw.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=bootstrap)
        for name, (over, under) in _fractions((times @ counts).T).items():
            if len(drawn := over[under > 0] / under[under > 0]):
                intervals[name] = (float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975)))
    return Score(**_rates(counts.sum(0)), intervals=intervals, pairs=len(counts), bootstrap=bootstrap)


def count_links(links: Pair | Corpus, sure: Pair | Corpus, possible: Pair | Corpus) -> np.ndarray:
    """|A|, |S|, |A∩S| and |A∩P| of each sentence pair, (pairs, 4): all that the rates need."""
    proposed, right, allowed = (_corpus(given) for given in (links, sure, possible))
    if not len(proposed) == len(right) == len(allowed):
        raise ValueError(
            f"links of {len(proposed)} sentence pairs, sure ones of {len(right)}, possible ones of {len(allowed)}: "
            "give one set for each pair"
        )
    rows = [(len(a), len(s), len(a & s), len(a & (s | p))) for a, s, p in zip(proposed, right, allowed, strict=True)]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def compute_rate(name: str, counts: np.ndarray) -> float:
    """One of aer, precision and recall, from what `counted` counted."""
    found = _rates(counts.sum(0))[name]
    if math.isnan(found):
        raise ValueError(f"there is {UNDEFINED[name]}, so that {name} is 0/0")
    return found


@dataclass(frozen=True, eq=False)
class CorpusAlignment:
    """For every target word of every sentence pair the source word it is linked to, or NOWHERE, and how strongly."""

    starts: np.ndarray  # (pairs+1,) where the target words of each pair begin
    choice: np.ndarray  # (words,) int32
    value: np.ndarray  # (words,) float32

    @classmethod
    def empty(cls, lengths: Sequence[int]) -> "CorpusAlignment":
        """No link yet, of targets of so many words."""
        starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
        return cls(starts, np.full(starts[-1], NOWHERE, dtype=np.int32), np.zeros(starts[-1], dtype=np.float32))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def set_links(self, pair: int, choice: np.ndarray, value: np.ndarray) -> None:
        """What the first target words of one pair are linked to; what goes beyond its last one is padding."""
        here = slice(self.starts[pair], min(self.starts[pair + 1], self.starts[pair] + len(choice)))
        self.choice[here], self.value[here] = (x[: here.stop - here.start] for x in (choice, value))

    def links(self) -> list[Links]:
        return [frozenset(scored) for scored in self.scores()]

    def scores(self) -> list[dict[Link, float]]:
        """The links of each pair, target word by target word, with their values."""
        return [
            {
                (int(self.choice[n]), int(n - start)): float(self.value[n])
                for n in range(start, stop)
                if self.choice[n] != NOWHERE
            }
            for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True)
        ]


def word_maps(maps: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Maps (b,i,j) of pieces as maps (b,I,J) of words, given the word that each row (b,i) and each key (b,j) is of.

    NOWHERE is of no word. A key word without a key is −∞, a row word without a row is 0 elsewhere.
    """
    of_row, of_key = _membership(rows), _membership(keys)  # (b,I,i), (b,J,j)
    share = (of_row / of_row.sum(-1, keepdim=True).clamp_min(1)).to(widen(maps))
    made = share @ widen(maps) @ of_key.to(widen(maps)).mT
    return made.masked_fill(~of_key.any(-1).unsqueeze(1), -torch.inf)


def choose_words(maps: Tensor, rows: Tensor, keys: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """The source word that each target word is linked to, or NOWHERE, and the value of its map; (b,I) each.

    words   keys numbered from there on are special tokens: what chooses them is linked to nothing
    """
    value, best = word_maps(maps, rows, keys).max(-1)
    linked = (best < words) & _membership(rows).any(-1)
    return best.masked_fill(~linked, NOWHERE), value


def assign_rows(labels: Tensor, setting: str) -> Tensor:
    """The word that each decoder row stands for, given the word of the piece that it predicts; (b,i) both."""
    if setting == "awo":
        return labels
    if setting == "awi":
        return F.pad(labels[:, :-1], (1, 0), value=NOWHERE)
    raise ValueError(f"setting must be awo (alignment with output) or awi (with input), not {setting!r}")


def _membership(words: Tensor) -> Tensor:
    """Which token is of which word, (b,n) -> (b,words,n) bool."""
    return words.unsqueeze(1) == torch.arange(int(words.max()) + 1, device=words.device).view(1, -1, 1)


def _fractions(sums: Any) -> dict[str, tuple[Any, Any]]:
    """Every rate as numerator and denominator, of |A|, |S|, |A∩S| and |A∩P|."""
    proposed, sure, right, allowed = sums
    return {
        "aer": (proposed + sure - right - allowed, proposed + sure),
        "precision": (allowed, proposed),
        "recall": (right, sure),
    }


UNDEFINED = {"aer": "neither a link nor a sure one", "precision": "no link", "recall": "no sure link"}


def _rates(sums: np.ndarray) -> dict[str, float]:
    """The rates of one count of each; NaN where one is 0/0."""
    return {name: float(over / under) if under else math.nan for name, (over, under) in _fractions(sums).items()}


def _corpus(given: Pair | Corpus) -> list[AbstractSet[Link]]:
    """The links of each sentence pair as sets; of one pair, a list of one."""
    items = list(given)
    single = isinstance(given, AbstractSet) or not items or _is_link(items[0])
    pairs: list[Any] = [items] if single else items
    for number, pair in enumerate(pairs):
        for link in pair:
            if not _is_link(link):
                raise ValueError(f"pair {number}: a link is (source word, target word), whole numbers, not {link!r}")
    return [frozenset((int(s), int(t)) for s, t in pair) for pair in pairs]


def _is_link(link: Any) -> bool:
    return (
        isinstance(link, tuple | list)
        and len(link) == 2
        and all(isinstance(place, int | np.integer) and not isinstance(place, bool) for place in link)
    )
