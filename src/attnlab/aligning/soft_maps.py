"""Soft maps of words, from one direction or both, before any link is decided.

A map of one direction gives each target word t a distribution over source words s and the special tokens:

    F(s,t) = pooled(t,s) / Σ_s' pooled(t,s')        what goes to special tokens is lost: it speaks for no link

B(s,t) is the same of the other direction, a distribution over target words for each source word. Both directions are
joined before deciding, (F + B)/2 or √(F·B). Words get their value from their pieces:

    mean   the mean over the pieces of the target word of the sum over those of the source word
    max    the largest value of any piece of one with any piece of the other
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from attnlab.aligning.choice import Candidate
from attnlab.aligning.extraction import PairBatch, iterate_maps
from attnlab.analysis.alignment import NOWHERE, assign_rows, word_maps

Pieces = Literal["mean", "max"]
Mean = Literal["mean", "geometric"]
TINY = 1e-30


def read_soft_map(batch: PairBatch, candidate: Candidate, pieces: Pieces = "mean", *, null: bool = False) -> Tensor:
    """Return F (b,T,S) of one direction. Rows are target words; a row of a word without pieces is 0.

    null   also make a row 0 if a special token has its largest value: the word then has no link
    """
    key = candidate.by, candidate.layer, candidate.head
    ((_, values),) = iterate_maps(batch, {key})
    values = values.float().clamp_min(0.0).masked_fill(~batch.real, 0.0)
    rows = assign_rows(batch.labels, candidate.setting)
    if pieces == "max":
        pooled = _pool_by_max(values, rows, batch.keys)
    else:
        pooled = word_maps(values, rows, batch.keys).clamp_min(0.0)
    share = pooled / pooled.sum(-1, keepdim=True).clamp_min(TINY)
    words = share[..., : batch.words]
    if null and share.shape[-1] > batch.words:
        special = share[..., batch.words :].amax(-1, keepdim=True)
        words = words.masked_fill(words.amax(-1, keepdim=True) <= special, 0.0)
    return words


def _pool_by_max(values: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return the largest value of the pieces of each target word with those of each source word, (b,T,S)."""
    b, i, _ = values.shape
    targets, sources = int(rows.max()) + 1, int(keys.max()) + 1
    columns = keys.clamp_min(0).unsqueeze(1).expand(-1, i, -1)
    kept = values.masked_fill((keys == NOWHERE).unsqueeze(1), 0.0)
    by_key = values.new_zeros(b, i, sources).scatter_reduce(2, columns, kept, "amax")
    by_key = by_key.masked_fill((rows == NOWHERE).unsqueeze(2), 0.0)
    where = rows.clamp_min(0).unsqueeze(2).expand(-1, -1, sources)
    return values.new_zeros(b, targets, sources).scatter_reduce(1, where, by_key, "amax")


def fit_shape(values: Tensor, rows: int, columns: int) -> Tensor:
    """Return a map (b,·,·) cut or padded with 0 to (b,rows,columns)."""
    fitted = values.new_zeros(len(values), rows, columns)
    part = values[:, :rows, :columns]
    fitted[:, : part.shape[1], : part.shape[2]] = part
    return fitted


def join_maps(maps: Sequence[Tensor], mean: Mean = "mean") -> Tensor:
    """Return the mean or the geometric mean of maps (b,S,T)."""
    stacked = torch.stack(list(maps))
    if mean == "geometric":
        return stacked.clamp_min(TINY).log().mean(0).exp()
    return stacked.mean(0)


def normalise_similarity(similarity: Tensor, live: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return F and B (b,S,T) of a similarity: softmax over the source words, and over the target words.

    live   (b,S,T) bool: both words exist
    """
    logits = (similarity / temperature).masked_fill(~live, -torch.inf)
    shares = [logits.softmax(dim).nan_to_num(0.0) for dim in (1, 2)]
    return shares[0], shares[1]
