"""Sequences as one flat array with offsets, and the plan that divides them into batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
TooLong = Literal["error", "truncate", "skip"]


@dataclass(frozen=True, eq=False)
class Sequences:
    """n sequences of token ids; sequence k is ids[offsets[k]:offsets[k+1]]."""

    ids: np.ndarray  # int32, (total,)
    offsets: np.ndarray  # int64, (n+1,)

    @classmethod
    def from_ids(cls, sequences: Iterable[Sequence[int]], *, begin: int | None = None, end: int | None = None) -> Self:
        """Gather sequences, adding the token `begin` before each and the token `end` after each, if given."""
        pieces, counts = [], []
        for chunk in split_chunks(sequences):
            counts.append(np.fromiter(map(len, chunk), dtype=np.int64, count=len(chunk)))
            pieces.append(np.fromiter(chain.from_iterable(chunk), dtype=np.int32, count=int(counts[-1].sum())))
        plain = np.concatenate([np.zeros(0, dtype=np.int32), *pieces])
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *counts]) + (begin is not None) + (end is not None)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids, added = np.empty(offsets[-1], dtype=np.int32), np.zeros(offsets[-1], dtype=bool)
        for token, places in ((begin, offsets[:-1]), (end, offsets[1:] - 1)):
            if token is not None:
                ids[places], added[places] = token, True
        ids[~added] = plain
        return cls(ids, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: int) -> np.ndarray:
        return self.ids[self.offsets[k] : self.offsets[k + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def get_lengths(self, indices: Sequence[int]) -> np.ndarray:
        rows = np.asarray(indices, dtype=np.int64)
        return self.offsets[rows + 1] - self.offsets[rows]

    def select(self, mask: np.ndarray) -> "Sequences":
        """Return the sequences where mask (n,) is True, in order."""
        lengths = self.lengths
        return Sequences(self.ids[np.repeat(mask, lengths)], np.concatenate([[0], np.cumsum(lengths[mask])]))

    def truncate(self, limit: int) -> "Sequences":
        """Truncate every sequence to `limit` tokens, keeping its last token as the last one."""
        lengths = self.lengths
        place = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], lengths)
        last = place == np.repeat(lengths, lengths) - 1
        kept = (place < limit - 1) | last
        return Sequences(self.ids[kept], np.concatenate([[0], np.cumsum(np.minimum(lengths, limit))]))

    def pad(self, indices: Sequence[int], *, skip: int = 0, drop: int = 0) -> Tensor:
        """Return some sequences, without their first `skip` and last `drop` tokens, as (b,n), padded right with 0."""
        rows = np.asarray(indices, dtype=np.int64)
        start = self.offsets[rows] + skip
        return pad_rows(self.ids, start, self.offsets[rows + 1] - drop - start)


def split_chunks(items: Iterable[T], size: int = 65536) -> Iterator[list[T]]:
    """Yield the items in lists of at most `size`."""
    remaining = iter(items)
    while chunk := list(islice(remaining, size)):
        yield chunk


def pad_rows(ids: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> Tensor:
    """Return the rows ids[start_k : start_k + lengths_k] as one tensor (b,n), padded on the right with 0."""
    columns = np.arange(lengths.max(initial=0))
    if not len(ids):
        return torch.zeros(len(lengths), len(columns), dtype=torch.int64)
    rows = ids.take(start[:, None] + columns, mode="clip").astype(np.int64, copy=False)  # selecting by a mask is slow
    rows *= columns < lengths[:, None]
    return torch.from_numpy(rows)


def limit_lengths(
    lengths: tuple[np.ndarray, ...], limit: int | None, too_long: TooLong, part: str, noun: str
) -> tuple[np.ndarray, str]:
    """Apply max_length and too_long to examples of these lengths, (n,) for each side, called "text" or "pair".

    Return a mask (n,) of the examples to keep, and a note for the log, "" if no example is too long. With
    too_long=truncate all are kept, and the caller truncates them. Raises ValueError for too_long=error.
    """
    longest = np.maximum.reduce(lengths)
    long = longest > (limit or np.inf)
    if not long.any():
        return ~long, ""
    sides = " on a side" if len(lengths) > 1 else ""
    problem = f"{part}: {long.sum():,} of {len(long):,} {noun}s have more than {limit} tokens{sides}"
    if too_long == "error":
        first = int(long.argmax())
        raise ValueError(
            f"{problem}; the first is {noun} {first + 1:,} ({longest[first]} tokens): "
            "raise max_length=, or set too_long=truncate or too_long=skip"
        )
    if too_long == "truncate":
        return np.ones_like(long), f"{problem}: truncated to {limit}"
    if long.all():
        raise ValueError(f"{problem}: too_long=skip would skip all of them; raise max_length=")
    return ~long, f"{problem}: skipped"


def plan_batches(
    lengths: tuple[np.ndarray, ...],
    *,
    tokens: int | None = None,
    examples: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
) -> list[list[int]]:
    """Divide examples into batches of indices. Give either tokens or examples.

    lengths   of each example in each padded tensor, (examples,) each, the primary sort key first
    tokens    upper bound on (longest example) · (examples) of a batch, as in fairseq; groups similar lengths
    examples  number of examples in a batch, whatever their lengths; the last batch may have fewer
    shuffle   draw the examples of each batch from (seed, epoch), and with tokens the order of batches from the epoch;
              otherwise longest first with tokens, given order with examples

    With tokens, the k-th batch has the same sizes for every seed, so that runs of many seeds can train as one.
    """
    if (tokens is None) == (examples is None):
        raise ValueError("give either tokens= (padded tokens in a batch) or examples= (examples in a batch)")
    draw = np.random.default_rng((seed, epoch))
    order = draw.permutation(len(lengths[0])) if shuffle else np.arange(len(lengths[0]))
    if examples is not None:
        return [order[start : start + examples].tolist() for start in range(0, len(order), examples)]
    assert tokens is not None
    order = order[np.lexsort([length[order] for length in reversed(lengths)])]
    batches = _cut_batches(order, np.maximum.reduce(lengths)[order], tokens)
    return [batches[k] for k in np.random.default_rng(epoch).permutation(len(batches))] if shuffle else batches[::-1]


def _cut_batches(order: np.ndarray, widths: np.ndarray, tokens: int) -> list[list[int]]:
    """Fill batches greedily, in order, while (longest example) · (number of examples) stays within the budget."""
    if len(widths) and (longest := widths.max()) > tokens:
        raise ValueError(
            f"example {order[widths.argmax()]} has {longest} tokens, but a batch holds at most {tokens}: "
            "raise batch_tokens=, use batch_examples= instead, or shorten the examples "
            "(max_length= with too_long=truncate or skip; for a language model, block=)"
        )
    batches, start = [], 0
    while start < len(order):
        window = np.maximum.accumulate(widths[start : start + tokens // max(widths[start], 1)])
        count = int((window * np.arange(1, len(window) + 1) <= tokens).sum())
        batches.append(order[start : start + count].tolist())
        start += count
    return batches
