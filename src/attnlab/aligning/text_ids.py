"""Vocabularies of texts for the statistical aligners, and texts as ids."""

from collections.abc import Sequence

import numpy as np

from attnlab.aligning.extraction import Sentences
from attnlab.counting.cooccurrence import WordPairs
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
