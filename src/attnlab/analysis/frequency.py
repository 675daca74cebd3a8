"""Frequency ranks of tokens in bins, from the counts of this corpus or of another one.

Tokens with the same count have the same rank. Neighbouring ranks share a bin while they hold at most 1/BINS of the
corpus together, so a frequent token has a bin to itself. A file of counts has one line for each token: the token, a tab
and its count; or three integers: its rank, its count and its id (as Kobayashi et al. 2020 publish).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BINS = 512


@dataclass(frozen=True, eq=False)
class Frequency:
    """The frequency bin of every token of a vocabulary."""

    bins: Tensor  # (vocabulary,) the bin of each token: 0 = most frequent, −1 = unknown count
    single: Tensor  # (bins,) bool, True = all its tokens have the same rank

    @classmethod
    def from_counts(cls, counts: Tensor, here: Tensor | None = None) -> "Frequency":
        """Build the bins from counts (vocabulary,), 0 = unknown. `here` has this corpus's counts if they differ."""
        known = counts > 0
        if not known.any():
            raise ValueError("no token has a count above 0, so there are no ranks")
        values, rank = np.unique(-counts[known].numpy(), return_inverse=True)  # rank 0: the most frequent
        mass = np.bincount(rank, weights=(counts if here is None else here)[known].double().numpy())
        most = max(mass.sum() / BINS, 1.0)
        bins = np.zeros(len(values), dtype=np.int64)
        held = mass[0]
        for place in range(1, len(values)):
            held += mass[place]
            bins[place] = bins[place - 1] + (held > most)
            if held > most:
                held = mass[place]
        of_token = torch.full_like(counts, -1)
        of_token[known] = torch.from_numpy(bins[rank])
        return cls(of_token, torch.from_numpy(np.bincount(bins) == 1))


def parse_counts(text: str, pieces: Sequence[str], where: str) -> Tensor:
    """Parse the text of a file of counts to counts (vocabulary,); `where` names the file in errors."""
    counts = [0] * len(pieces)
    places: Mapping[str, int] = {piece: token for token, piece in enumerate(pieces)}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        token, tab, count = line.rpartition("\t")
        words = line.split()
        if tab and _is_count(count.strip()) and len(words) == 2:
            place = places.get(token, -1)
        elif len(words) == 3 and all(map(_is_count, words)):
            place, count = int(words[2]), words[1]
        else:
            raise ValueError(f"{where}:{number}: a line must be a token, a tab and its count; or rank, count and id")
        if place >= len(pieces):
            raise ValueError(f"{where}:{number}: token id {place} is outside the model's vocabulary of {len(pieces):,}")
        if place >= 0:
            counts[place] = int(count)
    if not any(counts):
        raise ValueError(f"{where}: none of the tokens is in the model's vocabulary")
    return torch.tensor(counts)


def _is_count(word: str) -> bool:
    return word.isdecimal() and len(word) < 16  # fits int64
