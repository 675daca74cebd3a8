"""Which words stand in which sentence pairs: the count table C and its readings (Snell et al. 2021, §4, eq. 16–19).

    C(i,o) = Σ_m Σ_l Σ_t 1[x_l = i] 1[y_t = o] / L                        eq. 16     L = length of the source of pair m
    Trans(o|i) = C(i,o) / Σ_o' C(i,o')                                    eq. 17
    β(t,l) = Trans(y_t|x_l)        α(t,l) = β(t,l) / Σ_l' β(t,l')         eq. 18, 19

With X, Y the sentences as rows of word counts and D = diag(1/L), eq. 16 is the sparse product C = Xᵀ D Y. It is summed
over chunks of pairs: what is held is the table and one chunk, however long the corpus.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import index
from typing import Any

import numpy as np
import scipy.sparse as sparse

CHUNK = 20_000  # sentence pairs multiplied at once

Ids = Sequence[int] | np.ndarray
Pairs = Iterable[tuple[Ids, Ids]]


@dataclass(frozen=True, eq=False)
class WordPairs:
    """Sentence pairs as two flat arrays of ids, one after the other, and the length of each sentence."""

    source: np.ndarray  # int64, (Σ L,)
    target: np.ndarray  # int64, (Σ T,)
    source_lengths: np.ndarray  # int64, (m,)
    target_lengths: np.ndarray  # int64, (m,)

    @classmethod
    def of(cls, pairs: Pairs) -> "WordPairs":
        """Gather pairs of (source ids, target ids)."""
        parts = [*chunks(pairs)]
        empty = cls(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        return cls(
            *(np.concatenate(arrays) for arrays in zip(*(vars(c).values() for c in [empty, *parts]), strict=True))
        )

    def __len__(self) -> int:
        return len(self.source_lengths)

    @property
    def sizes(self) -> tuple[int, int]:
        """The fewest types that hold every id, of source and target."""
        return int(self.source.max(initial=-1)) + 1, int(self.target.max(initial=-1)) + 1

    def only(self, kept: np.ndarray) -> "WordPairs":
        """The pairs that a boolean array (m,) keeps, in order."""
        source, target = (np.repeat(kept, lengths) for lengths in (self.source_lengths, self.target_lengths))
        return WordPairs(self.source[source], self.target[target], self.source_lengths[kept], self.target_lengths[kept])

    def counts(self, sizes: tuple[int, int]) -> sparse.csr_array:
        """C of these pairs (eq. 16), (source types, target types)."""
        share = 1.0 / np.maximum(self.source_lengths, 1)
        left = _sentences(self.source, self.source_lengths, sizes[0], np.repeat(share, self.source_lengths))
        right = _sentences(self.target, self.target_lengths, sizes[1], np.ones(len(self.target)))
        table = left.T.tocsr() @ right
        table.sort_indices()
        return table

    def shapes(self, most: int = 2_000_000) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The pairs by shape: their numbers (n,), sources (n,L) and targets (n,T), n·L·T ≤ most or n = 1.

        Pairs of one shape are dense arrays: nothing is padded. Those with an empty side have no cell and are left out.
        """
        starts = [np.cumsum(lengths) - lengths for lengths in (self.source_lengths, self.target_lengths)]
        order = np.lexsort([self.target_lengths, self.source_lengths])
        lengths = np.stack([self.source_lengths[order], self.target_lengths[order]])  # (2,m)
        edges = np.flatnonzero(np.diff(lengths, axis=1).any(axis=0)) + 1
        for same in np.split(order, edges):
            if not len(same) or not (cells := int(self.source_lengths[same[0]] * self.target_lengths[same[0]])):
                continue
            across, down = (np.arange(side[same[0]]) for side in (self.source_lengths, self.target_lengths))
            for some in np.array_split(same, -(-len(same) * cells // max(most, cells))):
                x = self.source[starts[0][some][:, None] + across]
                yield some, x, self.target[starts[1][some][:, None] + down]


def counts(pairs: Pairs, *, sizes: tuple[int, int] | None = None) -> sparse.csr_array:
    """The count table C of eq. 16, (source types, target types), float64; pairs may be any iterable, read once.

    A pair with an empty side adds nothing. sizes: how many types there are, where not only those up to the largest id.
    """
    total, first = sparse.csr_array((0, 0)), 1
    for corpus in chunks(pairs):
        found = corpus.sizes if sizes is None else sizes
        if sizes is not None and any(have > most for have, most in zip(corpus.sizes, sizes, strict=True)):
            raise ValueError(f"pairs {first} … {first + len(corpus) - 1}: ids up to {corpus.sizes} do not fit {sizes=}")
        shape = (max(total.shape[0], found[0]), max(total.shape[1], found[1]))
        total.resize(shape)
        total = total + corpus.counts(shape)
        first += len(corpus)
    if sizes is not None:
        total.resize(sizes)
    total.sort_indices()
    return total


def chunks(pairs: Pairs, size: int = CHUNK) -> Iterator[WordPairs]:
    """The pairs in order, so many at a time."""
    remaining, first = iter(pairs), 1
    while some := list(islice(remaining, size)):
        for number, pair in enumerate(some, start=first):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError(f"pair {number} must be (source ids, target ids), not {pair!r:.60}")
        source, source_lengths = _flat([pair[0] for pair in some], "source", first)
        target, target_lengths = _flat([pair[1] for pair in some], "target", first)
        yield WordPairs(source, target, source_lengths, target_lengths)
        first += len(some)


def trans(table: sparse.csr_array) -> sparse.csr_array:
    """Trans(o|i) of eq. 17: each row of C sums to 1; that of a word that never occurs stays empty."""
    rows = np.repeat(table.sum(axis=1), np.diff(table.indptr))
    return sparse.csr_array((table.data / rows, table.indices, table.indptr), shape=table.shape)


def beta(translation: sparse.csr_array, source: Ids, target: Ids) -> np.ndarray:
    """β(t,l) = Trans(y_t|x_l) of one sentence pair (eq. 18), (T,L)."""
    (x, y) = (np.asarray(ids, dtype=np.int64) for ids in (source, target))
    for side, ids, size in (("source", x, translation.shape[0]), ("target", y, translation.shape[1])):
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            raise ValueError(f"the {side} has an id outside the table's {size} types: {ids.min()} … {ids.max()}")
    return translation[x].toarray()[:, y].T


def alpha(beta: np.ndarray) -> np.ndarray:
    """α(t,l) of eq. 19: the rows of β made to sum to 1; uniform where a row is 0 (a word unseen with all of these)."""
    total = beta.sum(-1, keepdims=True)
    even = np.full_like(beta, 1.0 / max(beta.shape[-1], 1))
    return np.divide(beta, total, out=even, where=total > 0)


class Cells:
    """Where the cells (x_l, y_t) of sentence pairs stand in the data of a table that stores all of them."""

    def __init__(self, table: sparse.csr_array) -> None:
        self.columns = table.shape[1]
        rows = np.repeat(np.arange(table.shape[0], dtype=np.int64), np.diff(table.indptr))
        self.keys = rows * self.columns + table.indices  # rising: the table's indices are sorted

    def of(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The places of n pairs of one shape, (n,L) and (n,T) -> (n,L,T)."""
        return np.searchsorted(self.keys, x[:, :, None] * self.columns + y[:, None, :])


def _sentences(ids: np.ndarray, lengths: np.ndarray, types: int, values: np.ndarray) -> sparse.csr_array:
    """A row for each sentence, a column for each type; a word that stands there twice is stored twice."""
    return sparse.csr_array((values, ids, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(lengths), types))


def _flat(sentences: list[Any], side: str, first: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
    try:
        whole = map(index, chain.from_iterable(sentences))  # a fraction would be cut off silently
        ids = np.fromiter(whole, dtype=np.int64, count=int(lengths.sum()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"a {side} from pair {first} on is not a sequence of ids ({error})") from None
    if (low := ids.min(initial=0)) < 0:
        number = first + int(np.searchsorted(np.cumsum(lengths), ids.argmin(), side="right"))
        raise ValueError(f"pair {number}: the {side} has the id {low}; ids are whole numbers from 0")
    return ids, lengths
