"""Sentences in 4 bytes a word: each word is a number, and each distinct word is stored once."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np


class NumberedText(Sequence[list[str]]):
    """The words of each sentence of a text."""

    def __init__(self, sentences: Iterable[Iterable[str]] = ()) -> None:
        self._known = _Numbering()
        self._numbers, self._ends = array("i"), array("q")  # the end of each sentence among all words
        for words in sentences:
            self.append(words)

    def append(self, words: Iterable[str]) -> None:
        """Add a sentence. Raises BufferError while an array of `numbers` is in use."""
        self._numbers.extend(map(self._known.__getitem__, words))
        self._ends.append(len(self._numbers))

    @property
    def types(self) -> list[str]:
        """The distinct words, by number."""
        return self._known.words

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of all words, int32."""
        return np.frombuffer(self._numbers, dtype=np.int32)

    @property
    def lengths(self) -> np.ndarray:
        """The number of words of each sentence, int64."""
        return np.diff(np.frombuffer(self._ends, dtype=np.int64), prepend=0)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> list[str]: ...
    @overload
    def __getitem__(self, place: slice) -> list[list[str]]: ...
    def __getitem__(self, place: int | slice) -> list[str] | list[list[str]]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        return self._get_words(self._ends[place - 1] if place else 0, self._ends[place])

    def __iter__(self) -> Iterator[list[str]]:
        start = 0
        for end in self._ends:
            yield self._get_words(start, end)
            start = end

    def _get_words(self, start: int, end: int) -> list[str]:
        return [self.types[number] for number in self._numbers[start:end]]


class _Numbering(dict[str, int]):
    """The number of each word, and the word of each number; a new word gets the next number."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def __missing__(self, word: str) -> int:
        self.words.append(word)
        self[word] = len(self.words) - 1
        return self[word]


def number_words(sentences: Sequence[Sequence[str]]) -> NumberedText:
    """Return sentences with numbered words, or as they are if they have them."""
    return sentences if isinstance(sentences, NumberedText) else NumberedText(sentences)
