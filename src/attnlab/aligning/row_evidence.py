"""Choose without gold links whether the rows of a map stand for what they read (awi) or for what they predict (awo).

Both readings link the same rows of the same map, shifted by one target piece. Under the right one, the linked source
word tells more about the target word. For a target word y that is linked to the source word x,

    evidence = log [ (n(x,y) + 0.7 p(y) + 0.3 [x = y]) / (n(x) + 1) / p(y) ]        in nats; 0 for a word without a link

n counts the links of the *other* sentence pairs under the same reading, so that no link is evidence for itself. p(y) is
the share of y among the target words. [x = y] counts names, numbers and punctuation that both languages write alike.
The reading with the larger mean over the text is taken if the means differ by two standard errors or more. Case is
ignored.
"""

import math
from dataclasses import dataclass

import numpy as np

from attnlab.aligning.choice import RowSetting
from attnlab.aligning.extraction import Sentences
from attnlab.analysis.alignment import NOWHERE, CorpusAlignment

MINIMUM = 4  # number of sentence pairs; with fewer, words seldom recur
CLEAR = 2.0  # standard errors; a smaller difference may be chance
ALIKE = 0.3  # share of the expectation that the target word is the source word itself


@dataclass(frozen=True)
class RowEvidence:
    """The mean evidence of each reading in nats per target word, and how clearly they differ."""

    nats: dict[RowSetting, float]
    errors: float  # the difference in standard errors over sentence pairs; inf if all pairs have the same difference
    pairs: int  # number of sentence pairs with links

    def choose_setting(self, usual: RowSetting) -> RowSetting:
        """Return the reading with more evidence, or the usual one if the text is too small or does not tell."""
        if self.pairs < MINIMUM or self.errors < CLEAR:
            return usual
        return max(self.nats, key=lambda setting: self.nats[setting])

    def explain(self, usual: RowSetting) -> str:
        """Say which reading is taken, and why."""
        chosen = self.choose_setting(usual)
        other: RowSetting = "awi" if chosen == "awo" else "awo"
        more, fewer = self.nats[chosen], self.nats[other]
        numbers = f"{more:.2f} against {fewer:.2f}; {self.pairs:,} pairs, {self.errors:.1f} standard errors"
        if self.pairs < MINIMUM:
            few = f"{self.pairs} pair{'' if self.pairs == 1 else 's'} with links"
            why = f"the usual one for this model; the text is too small to check it ({few}, {MINIMUM} needed)"
        elif self.errors < CLEAR:
            why = f"the usual one for this model; the text does not tell whether {other} fits better ({numbers})"
        else:
            better = f"better than with {other}, by {more - fewer:.2f} nats each"
            why = f"linked source words predict target words {better} ({numbers})"
        return f"setting {chosen}: {why}; --setting {other} reads the rows the other way"


def compare_settings(source: Sentences, target: Sentences, readings: dict[RowSetting, CorpusAlignment]) -> RowEvidence:
    """Compare the links of both readings of one map by the words that they link."""
    x, y = WordIds.number_words(source, target)
    by_pair = {setting: measure_evidence(x, y, links) for setting, links in readings.items()}
    has_links = np.logical_or(*(_count_by_pair(links, links.choice != NOWHERE) > 0 for links in readings.values()))
    difference = (by_pair["awi"] - by_pair["awo"])[has_links]
    pairs = len(difference)
    error = float(difference.std(ddof=1)) / math.sqrt(pairs) if pairs > 1 else 0.0
    apart = abs(float(difference.mean())) / error if error else math.inf if difference.any() else 0.0
    nats = {setting: float(values[has_links].sum()) / max(pairs, 1) for setting, values in by_pair.items()}
    return RowEvidence(nats, apart, pairs)


@dataclass(frozen=True, eq=False)
class WordIds:
    """The words of one side as ids that both sides share, and where each sentence begins."""

    ids: np.ndarray  # (words,)
    starts: np.ndarray  # (pairs+1,)

    @classmethod
    def number_words(cls, *sides: Sentences) -> "list[WordIds]":
        """Number the words of several sides, without regard to case."""
        known: dict[str, int] = {}
        numbered = []
        for side in sides:
            ids = [known.setdefault(word.lower(), len(known)) for words in side for word in words]
            starts = np.cumsum([0, *map(len, side)])
            numbered.append(cls(np.array(ids, dtype=np.int64), starts))
        return numbered


def measure_evidence(source: WordIds, target: WordIds, links: CorpusAlignment) -> np.ndarray:
    """Return the mean evidence of the target words of each pair, (pairs,)."""
    linked = np.flatnonzero(links.choice != NOWHERE)
    pair = _number_pairs(links)[linked]
    x, y = source.ids[source.starts[pair] + links.choice[linked]], target.ids[linked]
    counts = np.bincount(target.ids)
    share = counts[y] / max(len(target.ids), 1)
    together = _count_elsewhere(x * len(counts) + y, pair) + (1 - ALIKE) * share + ALIKE * (x == y)
    evidence = np.zeros(len(links.choice))
    evidence[linked] = np.log(together / (_count_elsewhere(x, pair) + 1) / share)
    return _count_by_pair(links, evidence) / np.maximum(np.diff(links.starts), 1)


def _number_pairs(links: CorpusAlignment) -> np.ndarray:
    """Return the pair of each target word."""
    return np.repeat(np.arange(len(links)), np.diff(links.starts))


def _count_by_pair(links: CorpusAlignment, values: np.ndarray) -> np.ndarray:
    """Sum the values of the target words of each pair."""
    return np.bincount(_number_pairs(links), values, minlength=len(links))


def _count_elsewhere(keys: np.ndarray, pair: np.ndarray) -> np.ndarray:
    """Count how often each key occurs in other pairs than its own."""
    _, number, count = np.unique(keys, return_inverse=True, return_counts=True)
    _, own, here = np.unique(number * (int(pair.max(initial=0)) + 1) + pair, return_inverse=True, return_counts=True)
    return count[number] - here[own]
