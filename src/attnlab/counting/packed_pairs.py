"""Sentence pairs in a temporary file: memory holds one chunk of them, however many there are."""

from collections.abc import Iterator

import numpy as np

from attnlab.counting.cooccurrence import Pairs, WordPairs, iterate_chunks
from attnlab.files.array_file import ArrayFile

IN_MEMORY = 2**26  # bytes; a file of at most this size stays in memory


class PackedPairs:
    """Pairs of (source ids, target ids) that can be read again and again, in order, chunk by chunk."""

    def __init__(self, pairs: Pairs) -> None:
        self._file = ArrayFile(IN_MEMORY)
        self._places: list[tuple[int, int, int, int]] = []  # of each chunk: offset, pairs, source and target ids
        self._names: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        for chunk in iterate_chunks(pairs):
            parts = (chunk.source_lengths, chunk.target_lengths, chunk.source, chunk.target)
            self._places.append((self._file.tell(), len(chunk), len(chunk.source), len(chunk.target)))
            for part in parts:
                self._file.write(part.astype(np.int32))

    def rename(self, source: np.ndarray, target: np.ndarray) -> None:
        """Replace id k of a side by source[k] or target[k], in everything that is read from now on."""
        self._names = (source, target)

    def __len__(self) -> int:
        """Return the number of pairs, with those that have an empty side."""
        return sum(pairs for _, pairs, _, _ in self._places)

    def chunks(self) -> Iterator[WordPairs]:
        for place in range(len(self._places)):
            yield self._read_chunk(place)

    def full_chunks(self) -> Iterator[WordPairs]:
        """Yield the chunks without the pairs that have an empty side."""
        for chunk in self.chunks():
            full = (chunk.source_lengths > 0) & (chunk.target_lengths > 0)
            yield chunk if full.all() else chunk.select(full)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for chunk in self.chunks():
            ends = [np.cumsum(lengths)[:-1] for lengths in (chunk.source_lengths, chunk.target_lengths)]
            yield from zip(np.split(chunk.source, ends[0]), np.split(chunk.target, ends[1]), strict=True)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pair `number`, from 0."""
        for place, (_, pairs, _, _) in enumerate(self._places):
            if number < pairs:
                chunk = self._read_chunk(place).select(np.arange(pairs) == number)
                return chunk.source, chunk.target
            number -= pairs
        raise IndexError(f"pair {number} is out of range: there are {len(self):,} pairs")

    def _read_chunk(self, place: int) -> WordPairs:
        offset, pairs, sources, targets = self._places[place]
        self._file.seek(offset)
        numbers = self._file.read(np.int32, 2 * pairs + sources + targets)
        lengths, ids = np.split(numbers[: 2 * pairs].astype(np.int64), 2), numbers[2 * pairs :].astype(np.int64)
        sides = [ids[:sources], ids[sources:]]
        named = [side if names is None else names[side] for side, names in zip(sides, self._names, strict=True)]
        return WordPairs(named[0], named[1], lengths[0], lengths[1])
