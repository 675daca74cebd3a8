"""Vocabularies of texts for the statistical aligners, texts as ids, and pairs that are too long for them."""

from collections.abc import Sequence

import numpy as np

from attnlab.aligning.extraction import Sentences
from attnlab.counting.cooccurrence import WordPairs
from attnlab.counting.padded_blocks import LARGEST, LONGEST, find_used
from attnlab.tasks.numbered_text import NumberedText, number_words
from attnlab.tasks.task import SPECIALS, UNK
from attnlab.tasks.vocabulary import Words


def build_vocabulary(sentences: Sentences) -> Words:
    """Return the words of a text by decreasing frequency, then by name."""
    text = number_words(sentences)
    counts = dict(zip(text.types, np.bincount(text.numbers, minlength=len(text.types)).tolist(), strict=True))
    return Words(sorted(counts.keys() - set(SPECIALS), key=lambda word: (-counts[word], word)))


def encode_pairs(vocabularies: Sequence[Words], pairs: Sequence[Sentences]) -> WordPairs:
    """Return the ids of the words of both sides, int32."""
    texts = [number_words(side) for side in pairs]
    source, target = (_look_up_ids(v.ids, text) for v, text in zip(vocabularies, texts, strict=True))
    return WordPairs(source, target, texts[0].lengths, texts[1].lengths)


def _look_up_ids(ids: dict[str, int], text: NumberedText) -> np.ndarray:
    return np.array([ids.get(word, UNK) for word in text.types], dtype=np.int32)[text.numbers]


def empty_long_pairs(corpus: WordPairs) -> WordPairs:
    """Return the pairs, with empty sides in place of those that are too long."""
    long = find_used(corpus)[1]
    if not len(long):
        return corpus
    kept = np.ones(len(corpus), dtype=bool)
    kept[long] = False
    some = corpus.select(kept)
    lengths = [np.where(kept, own, 0) for own in (corpus.source_lengths, corpus.target_lengths)]
    return WordPairs(some.source, some.target, lengths[0], lengths[1])


def describe_long_pairs(corpus: WordPairs) -> list[str]:
    """Return a note that names the pairs that are too long."""
    long = find_used(corpus)[1]
    if not len(long):
        return []
    lines = ", ".join(f"{k + 1:,}" for k in long[:5]) + (", …" if len(long) > 5 else "")
    limit = f"more than {LARGEST:,} combinations of a source and a target word, or {LONGEST:,} words on a side"
    return [f"left without links, because they have {limit}: line {lines}; split them into sentences"]
