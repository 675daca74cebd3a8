"""Sentence pairs as token ids, for translation and the synthetic sequence tasks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from attnlab.tasks.batching import Sequences
from attnlab.tasks.task import BOS, EOS, Batch
from attnlab.tasks.vocabulary import Vocabulary

TooLong = Literal["error", "truncate", "skip"]


@dataclass(frozen=True, eq=False)
class SentencePairs:
    """The pairs of one part. The model reads the source and <s> y_1 … y_n, and is scored on y_1 … y_n </s>."""

    source: Sequences  # x_1 … x_m </s>, optionally with <s> before it
    target: Sequences  # <s> y_1 … y_n </s>

    @classmethod
    def from_ids(cls, source: Iterable[Sequence[int]], target: Iterable[Sequence[int]], *, begin: bool) -> Self:
        """Build pairs from ids without special tokens; begin adds <s> before the source."""
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

    def select(self, mask: np.ndarray) -> "SentencePairs":
        return SentencePairs(self.source.select(mask), self.target.select(mask))


def limit_lengths(
    pairs: SentencePairs, limit: int | None, too_long: TooLong, part: str
) -> tuple[SentencePairs, np.ndarray, list[str]]:
    """Apply max_length and too_long. Return the pairs, a mask of the pairs kept, and notes for the log."""
    kept = np.ones(len(pairs.source), dtype=bool)
    long = np.maximum.reduce(pairs.lengths) > (limit or np.iinfo(np.int64).max)
    if not (number := int(long.sum())):
        return pairs, kept, []
    assert limit is not None
    problem = f"{part}: {number:,} of {len(kept):,} pairs have more than {limit} tokens on a side"
    if too_long == "error":
        first = int(long.argmax())
        raise ValueError(
            f"{problem}; the first is pair {first + 1:,} ({max(length[first] for length in pairs.lengths)} tokens): "
            "raise max_length=, or set too_long=truncate or too_long=skip"
        )
    if too_long == "truncate":
        cut = SentencePairs(pairs.source.truncate(limit), pairs.target.truncate(limit + 1))
        return cut, kept, [f"{problem}: truncated to {limit}"]
    if long.all():
        raise ValueError(f"{problem}: too_long=skip would skip all of them; raise max_length=")
    return pairs.select(~long), ~long, [f"{problem}: skipped"]


def encode_sources(vocabulary: Vocabulary, lines: Sequence[str], *, begin: bool) -> Sequences:
    """Encode source lines as the model reads them, with </s> after each and optionally <s> before."""
    return Sequences.from_ids(vocabulary.encode(lines), begin=BOS if begin else None, end=EOS)
