"""Embeddings of input tokens, and readouts that predict words or classes.

    input     x_t = scale · E[token_t] + position_t           output    log p(w) = log softmax(hidden Wᵀ + b)_w

Adaptive input and softmax (Baevski & Auli 2019, §3; Grave et al. 2017): the vocabulary is sorted by frequency and split
into bands. Band k has vectors of size width / factor^k and a projection P_k to the width. One softmax covers the words
of band 0 and one class for each other band. Each other band has a softmax of its words:

    log p(w) = log softmax([E_0; C] hidden)_w                                             w in band 0
    log p(w) = log softmax([E_0; C] hidden)_class(k) + log softmax(E_k P_kᵀ hidden)_w     w in band k

Input and output share embeddings and projections. Band 0 is projected on the input side only.
"""

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import widen
from attnlab.models.dropout import Dropout


class SinusoidalPositions(nn.Module):
    """sin(t·ω_c) in the first half of the channels c, cos(t·ω_c) in the second; ω from 1 to 10⁻⁴ (fairseq's layout)."""

    def forward(self, x: Tensor, start: int | Tensor) -> Tensor:
        """Return the vectors (n,e) of positions start, start+1, … to add to x (b,n,e); start may be a tensor."""
        length, width = x.shape[1:]
        half, dtype = width // 2, torch.promote_types(x.dtype, torch.float32)
        channel = torch.arange(half, device=x.device, dtype=dtype)
        rate = torch.exp(channel * (-math.log(10000.0) / max(half - 1, 1)))
        angle = (start + torch.arange(length, device=x.device, dtype=dtype))[:, None] * rate
        return F.pad(torch.cat([angle.sin(), angle.cos()], dim=1), (0, width % 2)).to(x.dtype)


class LearnedPositions(nn.Module):
    """A trained vector for each position."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_length, width)

    def forward(self, x: Tensor, start: int | Tensor) -> Tensor:
        if isinstance(start, Tensor):
            return self.table(start + torch.arange(x.shape[1], device=x.device))
        stop = start + x.shape[1]
        if stop > self.table.num_embeddings:
            raise ValueError(f"the sequence has {stop} tokens, but max_length={self.table.num_embeddings}")
        return self.table.weight[start:stop]


class AdaptiveEmbedding(nn.Module):
    """E_k[token] P_kᵀ for a token of band k. Every band is computed for every token, which avoids a device sync."""

    def __init__(
        self, vocabulary: int, width: int, cutoffs: tuple[int, ...], *, factor: int = 4, padding: int = 0
    ) -> None:
        super().__init__()
        if not 0 <= padding < cutoffs[0]:
            raise ValueError(f"padding must be a token of the first band, 0 to {cutoffs[0] - 1}, got {padding}")
        self.edges, self.padding = (0, *cutoffs, vocabulary), padding
        sizes = [width // factor**k for k in range(len(cutoffs) + 1)]
        counts = [stop - start for start, stop in pairwise(self.edges)]
        self.words = nn.ParameterList(torch.empty(n, size) for n, size in zip(counts, sizes, strict=True))  # E_k
        self.projections = nn.ParameterList(torch.empty(width, size) for size in sizes)  # P_k

    def forward(self, tokens: Tensor) -> Tensor:
        bands = zip(pairwise(self.edges), self.words, self.projections, strict=True)
        return torch.stack([self._band(tokens, *edges, words, projection) for edges, words, projection in bands]).sum(0)

    def _band(self, tokens: Tensor, start: int, stop: int, words: Tensor, projection: Tensor) -> Tensor:
        """Return the vectors of the tokens of one band, 0 for the others. torch raises on a token outside all bands."""
        inside = (tokens >= start) & (tokens < stop)
        lowest, highest = None if start == 0 else 0, None if stop == self.edges[-1] else stop - start - 1
        place = (tokens - start).clamp(lowest, highest)
        vectors = F.embedding(place, words, self.padding if start == 0 else None)
        return F.linear(vectors, projection) * inside.unsqueeze(-1)


class InputEmbedding(nn.Module):
    """x = dropout(scale · words(tokens) + positions)."""

    def __init__(
        self, words: nn.Module, positions: nn.Module | None, *, scale: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.words, self.positions, self.scale = words, positions, scale
        self.dropout = Dropout(dropout)

    @property
    def limit(self) -> int | None:
        """Maximum sequence length; None: unlimited."""
        return self.positions.table.num_embeddings if isinstance(self.positions, LearnedPositions) else None

    def forward(self, tokens: Tensor, start: int | Tensor = 0) -> Tensor:
        """Embed tokens (b,n) at positions start, start+1, …: (b,n,e)."""
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens must be integers (batch, length), got {tokens.dtype} {tuple(tokens.shape)}")
        try:
            x = self.words(tokens) if self.scale == 1 else self.scale * self.words(tokens)
        except IndexError:  # raised by torch on a CPU; checking here only keeps the normal path free of device syncs
            words: Any = self.words
            vocabulary = words.edges[-1] if isinstance(words, AdaptiveEmbedding) else words.weight.shape[-2]
            wrong = tokens[(tokens < 0) | (tokens >= vocabulary)].tolist()
            if not wrong:
                raise
            raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, the vocabulary, got {wrong[0]}") from None
        return self.dropout(x if self.positions is None else x + self.positions(x, start))


class Readout(nn.Module, ABC):
    """A map from hidden vectors (…,e) to a distribution over words or classes: softmax(forward(hidden))."""

    @abstractmethod
    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (…,vocabulary)."""

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Return log p, (…,vocabulary)."""
        return _log_softmax(self(hidden))

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return −log p(target) of each target (…)."""
        logits = widen(self(hidden).flatten(0, -2))
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)


class LinearReadout(Readout):
    """hidden Wᵀ + b, or cap · tanh((hidden Wᵀ + b) / cap), as in Gemma 2. W may be that of an embedding (tied)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, cap: float | None = None) -> None:
        super().__init__()
        self.weight, self.bias, self.cap = weight, bias, cap  # (vocabulary,e), (vocabulary,)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.weight, self.bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class AdaptiveReadout(Readout):
    """The adaptive softmax over the bands of an adaptive embedding; it shares that embedding's vectors and projections.

    Its logits are log-probabilities. Dropout applies to the hidden vectors and to their projections into a band.
    """

    def __init__(self, embedding: AdaptiveEmbedding, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.edges, self.words, self.projections = embedding.edges, embedding.words, embedding.projections
        width = len(embedding.projections[0])
        self.classes = nn.Linear(width, len(embedding.words) - 1, bias=False)
        self.dropout = Dropout(dropout)
        self.dropouts = nn.ModuleList(Dropout(dropout) for _ in embedding.words[1:])  # of the bands from 1 on

    def forward(self, hidden: Tensor) -> Tensor:
        return self.log_prob(hidden)

    def log_prob(self, hidden: Tensor) -> Tensor:
        hidden = self.dropout(hidden)
        words, *classes = self._head(hidden).split([self.edges[1]] + [1] * (len(self.words) - 1), dim=-1)
        tails = [log_class + self._tail(hidden, band) for band, log_class in enumerate(classes, start=1)]
        return torch.cat([words, *tails], dim=-1)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden, words = self.dropout(hidden).flatten(0, -2), targets.flatten()
        band = torch.stack([words >= edge for edge in self.edges[1:-1]]).sum(0)
        place = torch.where(band == 0, words, self.edges[1] + band - 1)  # in the head: the word, or its band's class
        log_prob = self._head(hidden).gather(1, place[:, None])[:, 0]
        for k in range(1, len(self.words)):
            (rows,) = torch.where(band == k)
            inside = self._tail(hidden[rows], k).gather(1, words[rows, None] - self.edges[k])[:, 0]
            log_prob = log_prob.index_add(0, rows, inside)
        return -log_prob.view(targets.shape)

    def _head(self, hidden: Tensor) -> Tensor:
        """Return log p of each word of band 0, then of each other band: (…, words + bands − 1)."""
        return _log_softmax(torch.cat([F.linear(hidden, self.words[0]), self.classes(hidden)], dim=-1))

    def _tail(self, hidden: Tensor, band: int) -> Tensor:
        """Return log p of each word of a band, given the band."""
        inner = self.dropouts[band - 1](hidden @ self.projections[band])
        return _log_softmax(F.linear(inner, self.words[band]))


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
