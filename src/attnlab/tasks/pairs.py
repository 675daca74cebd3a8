"""Sentence pairs as token ids, for translation and the synthetic sequence tasks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from attnlab.tasks.batching import Sequences
from attnlab.tasks.task import BOS, EOS, Batch


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

    def truncate(self, limit: int) -> "SentencePairs":
        """Truncate both sides of every pair to `limit` tokens, </s> included."""
        return SentencePairs(self.source.truncate(limit), self.target.truncate(limit + 1))
