"""Sentence pairs as ids: what translation and the synthetic sequence tasks train on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from attnlab.tasks.batching import Sequences
from attnlab.tasks.task import BOS, EOS, Batch
from attnlab.tasks.vocabulary import Vocabulary

TooLong = Literal["error", "truncate", "skip"]


@dataclass(frozen=True, eq=False)
class SentencePairs:
    """Pairs of one part; the model reads the source and <s> y_1 … y_n, and is scored on y_1 … y_n </s>."""

    source: Sequences  # x_1 … x_m </s>, with <s> before it where asked for
    target: Sequences  # <s> y_1 … y_n </s>

    @classmethod
    def from_ids(cls, source: Iterable[Sequence[int]], target: Iterable[Sequence[int]], *, begin: bool) -> "SentencePairs":
        """Pairs of ids without special tokens; begin: put <s> before the source too."""
        source_ids = Sequences.from_ids(source, begin=BOS if begin else None, end=EOS)
        return cls(source_ids, Sequences.from_ids(target, begin=BOS, end=EOS))

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        return self.target.lengths - 1, self.source.lengths

    def make_batch(self, indices: list[int]) -> Batch:
        source = self.source.pad(indices)
        target_in, targets = self.target.pad(indices, drop=1), self.target.pad(indices, skip=1)
        count = int((self.target.get_lengths(indices) - 1).sum())
        return Batch((source, target_in), targets, count, list(indices))

    def select(self, kept: np.ndarray) -> "SentencePairs":
        return SentencePairs(self.source.select(kept), self.target.select(kept))


def limit_lengths(
    pairs: SentencePairs, longest: int | None, too_long: TooLong, part: str
) -> tuple[SentencePairs, np.ndarray, list[str]]:
    """The pairs of which no side is longer than a model allows, which of them are left, and a note on what was done."""
    kept = np.ones(len(pairs.source), dtype=bool)
    long = np.maximum.reduce(pairs.lengths) > (longest or np.iinfo(np.int64).max)
    if not (number := int(long.sum())):
        return pairs, kept, []
    assert longest is not None
    found = f"{part}: {number:,} of {len(kept):,} pairs have more than {longest} tokens on a side"
    if too_long == "error":
        where = int(long.argmax())
        raise ValueError(
            f"{found}, the first is pair {where + 1:,} ({max(length[where] for length in pairs.lengths)} tokens); "
            "raise max_length=, or set too_long=truncate or too_long=skip"
        )
    if too_long == "truncate":
        cut = SentencePairs(pairs.source.truncate(longest), pairs.target.truncate(longest + 1))
        return cut, kept, [f"{found}: cut to {longest}"]
    if long.all():
        raise ValueError(f"{found}: nothing would be left; raise max_length=")
    return pairs.select(~long), ~long, [f"{found}: skipped"]


def encode_sources(vocabulary: Vocabulary, lines: Sequence[str], *, begin: bool) -> Sequences:
    """Lines as a model reads them, as the source of what is to be translated."""
    return Sequences.from_ids(vocabulary.encode(lines), begin=BOS if begin else None, end=EOS)
