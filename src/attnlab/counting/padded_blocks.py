"""Sentence pairs of similar lengths side by side, padded, with the number of the type pair of every cell.

A cell is a word of a source with a word of its target. Blocks are stored in a temporary file, 4 bytes for each cell, so
memory holds one block however many pairs there are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from attnlab.counting.cooccurrence import WordPairs
from attnlab.files.array_file import ArrayFile

BLOCK = 100_000  # cells of a block, so that its arrays fit into a processor's cache
SLACK = 1.25  # the most that padding may multiply the cells of a block that is not small
SMALL = 8_000  # cells; smaller blocks may be padded more
STEP = 3  # source lengths are rounded up to its multiples before pairs are sorted
LARGEST = 10**6  # cells of one pair; longer pairs are left out
LONGEST = 2_000  # words of one side: the jumps of a hidden Markov model are a table of source words by source words
LISTED = 2**16  # indices that are Python numbers at a time
PADDING = -1  # the type of a position beyond the end of its sentence

Number = Callable[[np.ndarray], np.ndarray]  # the number of the type pair of each key


@dataclass(frozen=True, eq=False)
class PaddedBlock:
    """n sentence pairs. Position 0 of the source in `cells` is the start of the sentence and has no type pair."""

    pairs: np.ndarray  # (n,) their indices in the corpus
    source: np.ndarray  # (n,L) types, PADDING beyond the end
    target: np.ndarray  # (n,T)
    cells: np.ndarray  # (T,n,L+1) int32: numbers of type pairs; 0 for padding and for the start


class BlockFile:
    """The blocks of a corpus, in a temporary file. Empty and too long pairs are left out."""

    def __init__(self, corpus: WordPairs, number: Number, columns: int) -> None:
        """Number the cells by a function of keys (source type · columns + target type)."""
        self._file = ArrayFile()
        self._shapes: list[tuple[int, int, int]] = []  # n, L and T of each block
        self.used, self.too_long = find_used(corpus)
        for block in iterate_blocks(corpus, number, columns):
            self._shapes.append((*block.source.shape, block.target.shape[1]))
            for part in (block.pairs, block.source, block.target, block.cells):
                self._file.write(part)

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[PaddedBlock]:
        self._file.seek(0)
        for n, length, words in self._shapes:
            shapes = (n, length), (n, words), (words, n, length + 1)
            pairs = self._file.read(np.int64, n)
            yield PaddedBlock(pairs, *(self._file.read(np.int32, *shape) for shape in shapes))


def iterate_blocks(corpus: WordPairs, number: Number, columns: int) -> Iterator[PaddedBlock]:
    """Yield the blocks of a corpus, with cells numbered by a function of keys."""
    starts = [np.cumsum(lengths) - lengths for lengths in (corpus.source_lengths, corpus.target_lengths)]
    for pairs in cut_blocks(find_used(corpus)[0], corpus.source_lengths, corpus.target_lengths):
        x = pad_words(corpus.source, starts[0][pairs], corpus.source_lengths[pairs])
        y = pad_words(corpus.target, starts[1][pairs], corpus.target_lengths[pairs])
        yield PaddedBlock(pairs, x, y, number_cells(x, y, number, columns))


def find_used(corpus: WordPairs) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the pairs that are in blocks, and of those that are too long."""
    cells = corpus.source_lengths * corpus.target_lengths
    long = (cells > LARGEST) | ((cells > 0) & (np.maximum(corpus.source_lengths, corpus.target_lengths) > LONGEST))
    return np.flatnonzero((cells > 0) & ~long), np.flatnonzero(long)


def cut_blocks(used: np.ndarray, source_lengths: np.ndarray, target_lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of pairs of similar lengths; every pair of `used` is in one block."""
    order = used[np.lexsort([target_lengths[used], -(-source_lengths[used] // STEP)])]
    block: list[int] = []
    longest = [0, 0]
    own = 0
    for pair, length, words in _iterate_columns(order, source_lengths, target_lengths):
        wider = [max(longest[0], length), max(longest[1], words)]
        padded = wider[0] * wider[1] * (len(block) + 1)
        if block and (padded > BLOCK or (padded > SMALL and padded > SLACK * (own + length * words))):
            yield np.array(block)
            block, wider, own = [], [length, words], 0
        block.append(pair)
        longest, own = wider, own + length * words
    if block:
        yield np.array(block)


def _iterate_columns(order: np.ndarray, *columns: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Yield indices with their values as Python numbers, which exist for some of them at a time."""
    for start in range(0, len(order), LISTED):
        part = order[start : start + LISTED]
        yield from zip(part.tolist(), *(column[part].tolist() for column in columns), strict=True)


def pad_words(words: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the sentences that start at some places as rows, PADDING beyond their ends."""
    across = np.arange(int(lengths.max()))
    inside = across < lengths[:, None]
    return np.where(inside, words[np.where(inside, starts[:, None] + across, 0)], PADDING).astype(np.int32)


def number_cells(x: np.ndarray, y: np.ndarray, number: Number, columns: int) -> np.ndarray:
    """Return the numbers of the type pairs of n sentence pairs, (T,n,L+1)."""
    cells = np.zeros((y.shape[1], len(x), x.shape[1] + 1), dtype=np.int32)
    inside = (x != PADDING)[None] & (y != PADDING).T[:, :, None]
    keys = x[None].astype(np.int64) * columns + y.T[:, :, None]
    cells[:, :, 1:][inside] = number(keys[inside])
    return cells
