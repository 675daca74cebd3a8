"""Export what an aligner knows to other tools.

ctranslate2   {"alignment_layer": l, "alignment_heads": [[l, h], …]} for the config.json of a converted model: the heads
              whose weights, with rows that predict, link words that tell most about each other
guided        links of the pieces of subword files, for guided alignment in Marian and fairseq: every piece of a word
              with every piece of the word that it is linked to
"""

from collections.abc import Iterable, Sequence

import numpy as np

from attnlab.aligning.choice import Candidate
from attnlab.aligning.extraction import PairReader, Sentences, find_links
from attnlab.aligning.row_evidence import WordIds, measure_evidence
from attnlab.analysis.symmetrise import Link
from attnlab.analysis.words import number_words

MOST_HEADS, SHARE = 4, 0.8  # heads to list, and their least evidence as a share of the best one's


def choose_alignment_heads(reader: PairReader, source: Sentences, target: Sentences) -> dict[str, object]:
    """Return the alignment heads of a translator, from sentence pairs without gold links."""

    def list_heads(layers: int, heads: int) -> list[Candidate]:
        return [Candidate("weight", "awo", layer, head) for layer in range(layers) for head in range(heads)]

    found = find_links(reader, list_heads)
    x, y = WordIds.number_words(source, target)
    nats = {each: float(np.mean(measure_evidence(x, y, links))) for each, links in found.aligned.items()}
    best, *others = sorted(nats, key=lambda each: -nats[each])
    chosen = [best, *(each for each in others[: MOST_HEADS - 1] if nats[each] >= SHARE * nats[best] > 0)]
    return {"alignment_layer": best.layer, "alignment_heads": [[each.layer, each.head] for each in chosen]}


def expand_links(links: Iterable[Link], source: str, target: str, words: tuple[int, int], where: str) -> list[Link]:
    """Return the links between the pieces of two subword lines, whose marks must give as many words as were linked."""
    numbers = [number_words(line.split()) if line.split() else [] for line in (source, target)]
    for side, found, count in zip(("source", "target"), numbers, words, strict=True):
        if (found[-1] + 1 if found else 0) != count:
            have = found[-1] + 1 if found else 0
            raise ValueError(f"{where}: the {side} pieces make {have} words, but the aligned line has {count}")
    pieces = [_group(each, count) for each, count in zip(numbers, words, strict=True)]
    return sorted((i, j) for s, t in links for i in pieces[0][s] for j in pieces[1][t])


def _group(numbers: Sequence[int], count: int) -> list[list[int]]:
    grouped: list[list[int]] = [[] for _ in range(count)]
    for place, number in enumerate(numbers):
        grouped[number].append(place)
    return grouped
