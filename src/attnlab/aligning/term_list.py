"""A bilingual list of terms from linked text: pairs of words or short phrases, with counts and scores.

A phrase pair is a range of source words and a range of target words that are linked to each other and to nothing else
(Och & Ney 2004). Over the text,

    score = Dice = 2 n(s,t) / (n(s) + n(t))        n(s) counts the occurrences of the phrase in the source text
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from attnlab.analysis.symmetrise import Link

Phrase = tuple[str, ...]


@dataclass(eq=False)
class TermCounter:
    """Counts phrase pairs while text is aligned. Memory grows with the number of distinct pairs."""

    longest: int = 3  # words of a phrase
    pairs: Counter[tuple[Phrase, Phrase]] = field(default_factory=Counter)
    sources: Counter[Phrase] = field(default_factory=Counter)
    targets: Counter[Phrase] = field(default_factory=Counter)

    def add(self, source: Sequence[str], target: Sequence[str], links: Iterable[Link]) -> None:
        """Count the phrase pairs of one sentence pair."""
        x, y = ([word.lower() for word in side] for side in (source, target))
        for words, counts in ((x, self.sources), (y, self.targets)):
            for start in range(len(words)):
                for stop in range(start + 1, min(start + self.longest, len(words)) + 1):
                    counts[tuple(words[start:stop])] += 1
        for (a, b), (c, d) in find_phrases(links, self.longest):
            self.pairs[tuple(x[a:b]), tuple(y[c:d])] += 1

    def list_terms(self, least: int = 2) -> list[tuple[str, str, int, float]]:
        """Return (source, target, count, score) of pairs with at least `least` occurrences, the surest first."""
        rows = []
        for (s, t), count in self.pairs.items():
            if count >= least and any(any(map(str.isalnum, word)) for word in (*s, *t)):
                rows.append((" ".join(s), " ".join(t), count, 2 * count / (self.sources[s] + self.targets[t])))
        return sorted(rows, key=lambda row: (-row[3] * min(row[2], 10), -row[2], row[0], row[1]))


def find_phrases(links: Iterable[Link], longest: int) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield consistent pairs of ranges (start, stop) whose outer words are linked."""
    pairs = sorted(set(links))
    sources = sorted({s for s, _ in pairs})
    for start in sources:
        for stop in range(start + 1, start + longest + 1):
            if stop - 1 not in sources:
                continue
            inside = [t for s, t in pairs if start <= s < stop]
            low, high = min(inside), max(inside) + 1
            if high - low <= longest and all(start <= s < stop for s, t in pairs if low <= t < high):
                yield (start, stop), (low, high)
