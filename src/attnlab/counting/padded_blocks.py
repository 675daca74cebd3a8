"""Sentence pairs of similar lengths side by side, padded, with the number of the type pair of every cell.

A cell is a word of a source with a word of its target. Cells are stored in a temporary file, 4 bytes each, so memory
holds one block however many pairs there are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from tempfile import TemporaryFile
from weakref import finalize

import numpy as np

from attnlab.counting.cooccurrence import WordPairs

BLOCK = 100_000  # cells of a block, so that its arrays fit into a processor's cache
SLACK = 1.25  # the most that padding may multiply the cells of a block that is not small
SMALL = 8_000  # cells; smaller blocks may be padded more
STEP = 3  # source lengths are rounded up to its multiples before pairs are sorted
LARGEST = 10**6  # cells of one pair; longer pairs are left out
PADDING = -1  # the type of a position beyond the end of its sentence


@dataclass(frozen=True, eq=False)
class PaddedBlock:
    """n sentence pairs. Position 0 of the source in `cells` is the start of the sentence and has no type pair."""

    pairs: np.ndarray  # (n,) their indices in the corpus
    source: np.ndarray  # (n,L) types, PADDING beyond the end
    target: np.ndarray  # (n,T)
    cells: np.ndarray  # (T,n,L+1) int32: numbers of type pairs; 0 for padding and for the start


class BlockFile:
    """The blocks of a corpus. Pairs with an empty side or more than LARGEST cells are left out."""

    def __init__(self, corpus: WordPairs, number: Callable[[np.ndarray], np.ndarray], columns: int) -> None:
        """Number the cells by a function of keys (source type · columns + target type)."""
        self._file = TemporaryFile()  # noqa: SIM115 (closed by finalize)
        finalize(self, self._file.close)
        self._blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        cells = corpus.source_lengths * corpus.target_lengths
        self.too_long = np.flatnonzero(cells > LARGEST)
        self.used = np.flatnonzero((cells > 0) & (cells <= LARGEST))
        for pairs in cut_blocks(self.used, corpus.source_lengths, corpus.target_lengths):
            x = pad_words(corpus.source, corpus.source_lengths, pairs)
            y = pad_words(corpus.target, corpus.target_lengths, pairs)
            self._blocks.append((pairs, x, y))
            self._file.write(number_cells(x, y, number, columns).tobytes())

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[PaddedBlock]:
        self._file.seek(0)
        for pairs, x, y in self._blocks:
            shape = y.shape[1], len(pairs), x.shape[1] + 1
            cells = np.frombuffer(self._file.read(4 * shape[0] * shape[1] * shape[2]), dtype=np.int32)
            yield PaddedBlock(pairs, x, y, cells.reshape(shape))


def cut_blocks(used: np.ndarray, source_lengths: np.ndarray, target_lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of pairs of similar lengths; every pair of `used` is in one block."""
    order = used[np.lexsort([target_lengths[used], -(-source_lengths[used] // STEP)])]
    lengths = zip(order.tolist(), source_lengths[order].tolist(), target_lengths[order].tolist(), strict=True)
    block: list[int] = []
    longest = [0, 0]
    own = 0
    for pair, length, words in lengths:
        wider = [max(longest[0], length), max(longest[1], words)]
        padded = wider[0] * wider[1] * (len(block) + 1)
        if block and (padded > BLOCK or (padded > SMALL and padded > SLACK * (own + length * words))):
            yield np.array(block)
            block, wider, own = [], [length, words], 0
        block.append(pair)
        longest, own = wider, own + length * words
    if block:
        yield np.array(block)


def pad_words(words: np.ndarray, lengths: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the sentences of some pairs as rows, PADDING beyond their ends."""
    starts = (np.cumsum(lengths) - lengths)[pairs]
    across = np.arange(int(lengths[pairs].max()))
    inside = across < lengths[pairs][:, None]
    return np.where(inside, words[np.where(inside, starts[:, None] + across, 0)], PADDING).astype(np.int32)


def number_cells(x: np.ndarray, y: np.ndarray, number: Callable[[np.ndarray], np.ndarray], columns: int) -> np.ndarray:
    """Return the numbers of the type pairs of n sentence pairs, (T,n,L+1)."""
    cells = np.zeros((y.shape[1], len(x), x.shape[1] + 1), dtype=np.int32)
    inside = (x != PADDING)[None] & (y != PADDING).T[:, :, None]
    keys = x[None].astype(np.int64) * columns + y.T[:, :, None]
    cells[:, :, 1:][inside] = number(keys[inside])
    return cells
