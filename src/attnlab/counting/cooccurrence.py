"""Co-occurrence counts of the words of sentence pairs: the table C, Trans, β and α (Snell et al. 2021, §4, eq. 16–19).

    C(i,o) = Σ_m Σ_l Σ_t 1[x_l = i] 1[y_t = o] / L                        eq. 16     L = length of the source of pair m
    Trans(o|i) = C(i,o) / Σ_o' C(i,o')                                    eq. 17
    β(t,l) = Trans(y_t|x_l)        α(t,l) = β(t,l) / Σ_l' β(t,l')         eq. 18, 19

With X, Y the sentences as rows of word counts and D = diag(1/L), eq. 16 is the sparse product C = Xᵀ D Y. It is summed
over chunks of pairs, so memory holds the table and one chunk, however long the corpus.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import Any

import numpy as np
import scipy.sparse as sparse

CHUNK = 20_000  # largest number of sentence pairs in one product
CHUNK_WORDS = 2**20  # number of words, of both sides, that end a chunk

Ids = Sequence[int] | np.ndarray
Pairs = Iterable[tuple[Ids, Ids]]


@dataclass(frozen=True, eq=False)
class WordPairs:
    """Sentence pairs as one flat array of ids for each side, int32 or int64, and the length of each sentence."""

    source: np.ndarray  # (Σ L,)
    target: np.ndarray  # (Σ T,)
    source_lengths: np.ndarray  # int64, (m,)
    target_lengths: np.ndarray  # int64, (m,)

    @classmethod
    def gather(cls, pairs: Pairs) -> "WordPairs":
        """Gather pairs of (source ids, target ids)."""
        empty = cls(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        columns = zip(*(vars(part).values() for part in [empty, *iterate_chunks(pairs)]), strict=True)
        return cls(*(np.concatenate(arrays) for arrays in columns))

    @classmethod
    def gather_full(cls, pairs: "Pairs | WordPairs", minimum: int) -> "WordPairs":
        """Gather the pairs with words on both sides. Raises ValueError if there are fewer than the minimum."""
        corpus = pairs if isinstance(pairs, WordPairs) else cls.gather(pairs)
        full = corpus.select((corpus.source_lengths > 0) & (corpus.target_lengths > 0))
        if len(full) < minimum:
            counts = f"{len(full)} of {len(corpus)}"
            raise ValueError(f"{minimum} or more pairs must have words on both sides, got {counts} pairs")
        return full

    def __len__(self) -> int:
        return len(self.source_lengths)

    @property
    def sizes(self) -> tuple[int, int]:
        """Smallest numbers of source and target types that include every id."""
        return int(self.source.max(initial=-1)) + 1, int(self.target.max(initial=-1)) + 1

    def select(self, mask: np.ndarray) -> "WordPairs":
        """Return the pairs where a boolean array (m,) is True, in order."""
        source, target = (np.repeat(mask, lengths) for lengths in (self.source_lengths, self.target_lengths))
        return WordPairs(self.source[source], self.target[target], self.source_lengths[mask], self.target_lengths[mask])

    def fit_sizes(self, sizes: tuple[int, int] | None) -> tuple[int, int]:
        """Return the sizes, by default the smallest ones. Raises ValueError if they do not include every id."""
        if sizes is not None and any(own > limit for own, limit in zip(self.sizes, sizes, strict=True)):
            raise ValueError(f"sizes must be at least {self.sizes}, got {sizes}")
        return self.sizes if sizes is None else sizes

    def count_cells(self, sizes: tuple[int, int]) -> sparse.csr_array:
        """Return C of these pairs (eq. 16), (source types, target types)."""
        share = 1.0 / np.maximum(self.source_lengths, 1)
        left = _build_sentence_rows(self.source, self.source_lengths, sizes[0], np.repeat(share, self.source_lengths))
        right = _build_sentence_rows(self.target, self.target_lengths, sizes[1], np.ones(len(self.target)))
        table = left.T.tocsr() @ right
        table.sort_indices()
        return table

    def restrict_target(self, start: int, stop: int) -> "WordPairs":
        """Return the pairs with only the target ids start … stop−1, counted from start. Targets may become empty."""
        inside = (self.target >= start) & (self.target < stop)
        owner = np.repeat(np.arange(len(self)), self.target_lengths)[inside]
        lengths = np.bincount(owner, minlength=len(self))
        return WordPairs(self.source, self.target[inside] - start, self.source_lengths, lengths)

    def iterate_words(self, max_cells: int = 2_000_000) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield target words y (n,) whose sources have one length, with the sources x (n,L), n·L ≤ max_cells or n = 1.

        The arrays are dense, without padding. Words with an empty source are left out.
        """
        start = np.cumsum(self.source_lengths) - self.source_lengths
        pair = np.repeat(np.arange(len(self)), self.target_lengths)  # of each target word
        lengths = self.source_lengths[pair]
        order = np.argsort(lengths, kind="stable")
        for same in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
            if not len(same) or not (length := int(lengths[same[0]])):
                continue
            for part in np.array_split(same, -(-len(same) * length // max(max_cells, length))):
                yield self.source[start[pair[part]][:, None] + np.arange(length)], self.target[part]

    def iterate_shapes(self, max_cells: int = 2_000_000) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield pairs of one shape: their indices (n,), sources (n,L) and targets (n,T), n·L·T ≤ max_cells or n = 1.

        The arrays are dense, without padding. Pairs with an empty side have no cell and are left out.
        """
        starts = [np.cumsum(lengths) - lengths for lengths in (self.source_lengths, self.target_lengths)]
        order = np.lexsort([self.target_lengths, self.source_lengths])
        lengths = np.stack([self.source_lengths[order], self.target_lengths[order]])  # (2,m)
        edges = np.flatnonzero(np.diff(lengths, axis=1).any(axis=0)) + 1
        for same in np.split(order, edges):
            if not len(same) or not (cells := int(self.source_lengths[same[0]] * self.target_lengths[same[0]])):
                continue
            across, down = (np.arange(side[same[0]]) for side in (self.source_lengths, self.target_lengths))
            for chunk in np.array_split(same, -(-len(same) * cells // max(max_cells, cells))):
                x = self.source[starts[0][chunk][:, None] + across]
                yield chunk, x, self.target[starts[1][chunk][:, None] + down]


def count_cooccurrences(pairs: Pairs, *, sizes: tuple[int, int] | None = None) -> sparse.csr_array:
    """Return the count table C of eq. 16, (source types, target types), float64.

    pairs   (source ids, target ids); any iterable, read once. A pair with an empty side adds nothing
    sizes   numbers of source and target types; default: up to the largest id

    Raises ValueError for an id that does not fit sizes.
    """
    total = sparse.csr_array((0, 0))
    for corpus in iterate_chunks(pairs):
        needed = corpus.fit_sizes(sizes)
        shape = (max(total.shape[0], needed[0]), max(total.shape[1], needed[1]))
        total.resize(shape)
        total = total + corpus.count_cells(shape)
    if sizes is not None:
        total.resize(sizes)
    total.sort_indices()
    return total


def iterate_chunks(pairs: Pairs, size: int = CHUNK) -> Iterator[WordPairs]:
    """Yield the pairs in order, in chunks of at most `size`. Raises ValueError for a pair that is not two sequences."""
    first, words, chunk = 1, 0, list[tuple[Ids, Ids]]()
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"pair {first + len(chunk)} must be (source ids, target ids), got {pair!r:.60}")
        chunk.append(pair)
        words += len(pair[0]) + len(pair[1])
        if len(chunk) >= size or words >= CHUNK_WORDS:
            yield _flatten_pairs(chunk, first)
            first, words, chunk = first + len(chunk), 0, []
    if chunk:
        yield _flatten_pairs(chunk, first)


def count_between(chunks: Iterable[WordPairs], source: Ids, target: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Return C of some source and target types (S,T), and C(i,·) of these source types (S,); target must be sorted."""
    rows, columns = (np.asarray(ids, dtype=np.int64) for ids in (source, target))
    cells, totals = np.zeros((len(rows), len(columns))), np.zeros(len(rows))
    for chunk in chunks:
        types = max(chunk.sizes[0], int(rows.max(initial=-1)) + 1)
        share = np.repeat(chunk.target_lengths / np.maximum(chunk.source_lengths, 1), chunk.source_lengths)
        totals += np.bincount(chunk.source, share, minlength=types)[rows]
        wanted = np.isin(chunk.target, columns)
        owner = np.repeat(np.arange(len(chunk)), chunk.target_lengths)[wanted]
        lengths = np.bincount(owner, minlength=len(chunk))
        part = WordPairs(chunk.source, np.searchsorted(columns, chunk.target[wanted]), chunk.source_lengths, lengths)
        cells += part.count_cells((types, len(columns)))[rows].toarray()
    return cells, totals


def trans(table: sparse.csr_array) -> sparse.csr_array:
    """Return Trans(o|i) of eq. 17: the rows of C, normalized to a sum of 1. The row of an unseen word stays empty."""
    rows = np.repeat(table.sum(axis=1), np.diff(table.indptr))
    return sparse.csr_array((table.data / rows, table.indices, table.indptr), shape=table.shape)


def beta(translation: sparse.csr_array, source: Ids, target: Ids) -> np.ndarray:
    """Return β(t,l) = Trans(y_t|x_l) of one sentence pair (eq. 18), (T,L)."""
    (x, y) = (np.asarray(ids, dtype=np.int64) for ids in (source, target))
    for side, ids, size in (("source", x, translation.shape[0]), ("target", y, translation.shape[1])):
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            raise ValueError(f"{side} ids must be from 0 to {size - 1}, as in the table, got {ids.min()} … {ids.max()}")
    return translation[x].toarray()[:, y].T


def alpha(beta: np.ndarray) -> np.ndarray:
    """Return α(t,l) of eq. 19: the rows of β normalized to a sum of 1; a row of zeros becomes uniform."""
    total = beta.sum(-1, keepdims=True)
    uniform = np.full_like(beta, 1.0 / max(beta.shape[-1], 1))
    return np.divide(beta, total, out=uniform, where=total > 0)


class Cells:
    """An index of the cells (x_l, y_t) of sentence pairs in the data of a sparse table that stores them all."""

    def __init__(self, table: sparse.csr_array) -> None:
        self.columns = table.shape[1]
        rows = np.repeat(np.arange(table.shape[0], dtype=np.int64), np.diff(table.indptr))
        self.keys = rows * self.columns + table.indices  # increasing, because the table's indices are sorted

    def locate(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the data indices of the cells of n pairs of one shape: x (n,L) and y (n,T) -> (n,L,T)."""
        return np.searchsorted(self.keys, x.astype(np.int64)[:, :, None] * self.columns + y[:, None, :])


def _build_sentence_rows(ids: np.ndarray, lengths: np.ndarray, types: int, values: np.ndarray) -> sparse.csr_array:
    """Return a matrix with a row for each sentence and a column for each type; a repeated word is stored twice."""
    return sparse.csr_array((values, ids, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(lengths), types))


def _flatten_pairs(pairs: list[tuple[Ids, Ids]], first: int) -> WordPairs:
    source, source_lengths = _flatten_sentences([pair[0] for pair in pairs], "source", first)
    target, target_lengths = _flatten_sentences([pair[1] for pair in pairs], "target", first)
    return WordPairs(source, target, source_lengths, target_lengths)


def _flatten_sentences(sentences: list[Any], side: str, first: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
    try:
        integers = map(index, chain.from_iterable(sentences))  # index() rejects fractions, which numpy would truncate
        ids = np.fromiter(integers, dtype=np.int64, count=int(lengths.sum()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"from pair {first} on, a {side} is not a sequence of ids: {error}") from None
    if (low := ids.min(initial=0)) < 0:
        number = first + int(np.searchsorted(np.cumsum(lengths), ids.argmin(), side="right"))
        raise ValueError(f"pair {number}: ids of the {side} must be at least 0, got {low}")
    return ids, lengths
