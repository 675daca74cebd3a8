"""Choose maps without gold links: by the agreement of both directions, or by the evidence of the links of one.

For the links A and B that two directions propose, each a best word for every word,

    agreement = 2 |A ∩ B| / (number of source and target words)

Special tokens get no links here, so that a map that looks at them is judged by its words. Where kinds of maps differ
by less than two standard errors, √(a(1−a)/words) each, the first of norm, weight, signed is taken. With one direction
only, the evidence of `row_evidence` decides: how much the linked source words tell about the target words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnlab.aligning.choice import AUTOMATIC, SINGLE, By, Candidate
from attnlab.aligning.extraction import Sentences
from attnlab.aligning.row_evidence import WordIds, measure_evidence
from attnlab.analysis.alignment import NOWHERE, CorpusAlignment

ORDER: tuple[By, ...] = (*AUTOMATIC, *SINGLE)
Found = Mapping[Candidate, CorpusAlignment]


@dataclass(frozen=True)
class AgreedChoice:
    """One candidate of each direction, and how far they agree; `second` is the best choice of other layers."""

    forward: Candidate
    backward: Candidate
    agreement: float
    second: "AgreedChoice | None" = None

    def explain(self, pairs: int) -> str:
        """Say what was chosen and why."""
        ahead = f"{self.forward} / {self.backward}"
        why = f"both directions agree on {100 * self.agreement:.0f} % of the words of {pairs:,} pairs"
        if self.second:
            why += f"; next: {self.second.forward} / {self.second.backward}, {100 * self.second.agreement:.0f} %"
            if self.second.agreement > self.agreement:
                why += f", less than two standard errors more, so {self.forward.by} comes first"
        return f"chosen without gold links: {ahead} ({why})"


def choose_by_agreement(forward: Found, backward: Found, words: int) -> AgreedChoice:
    """Return the candidates of the two directions that agree best. Both are of the same kind and setting."""
    ahead = {candidate: _number_links(links, turned=False) for candidate, links in forward.items()}
    back = {candidate: _number_links(links, turned=True) for candidate, links in backward.items()}
    choices = []
    for one, left in ahead.items():
        for other, right in back.items():
            if (one.by, one.setting) == (other.by, other.setting):
                shared = len(np.intersect1d(left, right, assume_unique=True))
                choices.append(AgreedChoice(one, other, 2 * shared / max(words, 1)))
    choices.sort(key=lambda choice: -choice.agreement)
    top = choices[0].agreement
    margin = 2 * math.sqrt(top * (1 - min(top, 1)) / max(words, 1))
    close = [choice for choice in choices if choice.agreement >= top - margin]
    best = min(close, key=lambda choice: (ORDER.index(choice.forward.by), -choice.agreement))
    others = [c for c in choices if (c.forward.layer, c.backward.layer) != (best.forward.layer, best.backward.layer)]
    return AgreedChoice(best.forward, best.backward, best.agreement, others[0] if others else None)


def choose_by_evidence(source: Sentences, target: Sentences, found: Found) -> tuple[Candidate, str]:
    """Return the candidate whose links tell most about the target words, and why."""
    x, y = WordIds.number_words(source, target)
    nats = {candidate: float(measure_evidence(x, y, links).mean()) for candidate, links in found.items()}
    best, *others = sorted(nats, key=lambda candidate: -nats[candidate])
    why = f"its linked source words tell {nats[best]:.2f} nats about a target word"
    if others:
        why += f"; next: {others[0]}, {nats[others[0]]:.2f}"
    return best, f"chosen without gold links: {best} ({why})"


def count_words(*sides: Sentences) -> int:
    return sum(len(words) for side in sides for words in side)


def _number_links(links: CorpusAlignment, *, turned: bool) -> np.ndarray:
    """Return a number for each link (pair, source, target), the same in both directions."""
    lengths = np.diff(links.starts)
    pair = np.repeat(np.arange(len(links)), lengths)
    own = np.arange(len(links.choice)) - np.repeat(links.starts[:-1], lengths)
    linked = links.choice != NOWHERE
    first, second = (own, links.choice) if turned else (links.choice, own)
    return (pair[linked] * 2**40 + first[linked].astype(np.int64) * 2**20 + second[linked]).astype(np.int64)


def spread_sample(count: int, limit: int) -> Sequence[int]:
    """Return at most `limit` numbers below `count`, evenly spread."""
    return range(count) if count <= limit else [round(k * (count - 1) / (limit - 1)) for k in range(limit)]
