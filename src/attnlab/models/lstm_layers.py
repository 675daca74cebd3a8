"""LSTM layers over the words of a sequence, in one direction or both.

    gates = W_ih x + b_ih + b_hh        outputs = recurrence(gates, W_hh, …)       layer k+1 reads dropout(outputs of k)

The two directions of a layer run side by side in one recurrence; the second reads x reversed. If a training batch has
more tokens than the vocabulary has words, the first layer looks up its gates in a table W_ih E + b of all words. The
result is the same, with fewer products.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import widen
from attnlab.models.batching_rule import apply_as_one_call
from attnlab.models.embedding import InputEmbedding
from attnlab.models.recurrence import recurrence

State = tuple[Tensor, Tensor]  # h and c
MOST_WORDS = 512  # maximum number of words whose gradients are summed by a product


class LSTMLayer(nn.Module):
    """One layer with the parameters of nn.LSTM, stacked over directions, initialized from U(±size^−½)."""

    def __init__(self, inputs: int, size: int, *, directions: int = 1) -> None:
        super().__init__()
        self.size, self.directions = size, directions
        self.input_weight = nn.Parameter(torch.empty(directions, 4 * size, inputs))  # W_ih
        self.recurrent_weight = nn.Parameter(torch.empty(directions, 4 * size, size))  # W_hh
        self.input_bias = nn.Parameter(torch.empty(directions, 4 * size))
        self.recurrent_bias = nn.Parameter(torch.empty(directions, 4 * size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def compute_gates(self, x: Tensor) -> Tensor:
        """Map inputs (b,n,inputs) to their part of the gates, (directions,b,n,4·size); the second reads in reverse."""
        read = x.unsqueeze(0) if self.directions == 1 else torch.stack([x, x.flip(1)])
        return self._project_inputs(read.flatten(1, 2)).unflatten(1, x.shape[:2])

    def look_up_gates(self, tokens: Tensor, words: Tensor) -> Tensor:
        """Return the gates of x = words[tokens], looked up in a table of all words (v,inputs)."""
        table = self._project_inputs(words.expand(self.directions, -1, -1))  # (directions,v,4·size)
        read = tokens.unsqueeze(0) if self.directions == 1 else torch.stack([tokens, tokens.flip(1)])
        gates: Tensor = _LookUp.apply(read, table)
        return gates

    def _project_inputs(self, x: Tensor) -> Tensor:
        bias = (self.input_bias + self.recurrent_bias).unsqueeze(1)
        return torch.baddbmm(bias, x, self.input_weight.mT)

    def forward(self, gates: Tensor, live: Tensor | None = None, start: State | None = None) -> tuple[Tensor, State]:
        """Map gates (directions,b,n,4·size) to outputs (b,n,directions·size) and last states (directions,b,size).

        live    (b,n), True at tokens; None: every position
        start   h and c before the first position, (directions,b,size) each; None: 0
        """
        if start is None:
            start = (gates.new_zeros(*gates.shape[:2], self.size),) * 2
        if live is not None:
            live = live.unsqueeze(0) if self.directions == 1 else torch.stack([live, live.flip(1)])
        outputs, h, c = recurrence(gates, self.recurrent_weight, *start, live)
        if self.directions == 1:
            return outputs.squeeze(0), (h, c)
        forth, back = outputs.unbind()
        return torch.cat([forth, back.flip(1)], dim=-1), (h, c)


class LSTMStack(nn.Module):
    """Embedding and layers: tokens (b,n) -> outputs (b,n,directions·size), last states (layers,directions,b,size)."""

    def __init__(self, embedding: InputEmbedding, layers: Iterable[LSTMLayer], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.layers = embedding, nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)  # between layers only

    def forward(self, tokens: Tensor, live: Tensor | None = None, start: State | None = None) -> tuple[Tensor, State]:
        x, ends = tokens, []
        for number, layer in enumerate(self.layers):
            gates = layer.compute_gates(self.dropout(x)) if number else self._compute_first_gates(x)  # type: ignore[operator]
            x, last = layer(gates, live, None if start is None else (start[0][number], start[1][number]))
            ends.append(last)
        h, c = (torch.stack(each) for each in zip(*ends, strict=True))
        return x, (h, c)

    def _compute_first_gates(self, tokens: Tensor) -> Tensor:
        """Return the gates of the first layer."""
        layer: LSTMLayer = self.layers[0]  # type: ignore[assignment]
        words: nn.Embedding = self.embedding.words  # type: ignore[assignment]
        if self.training and words.num_embeddings < tokens.numel():
            try:
                return layer.look_up_gates(tokens, _read_words(words))
            except IndexError:
                pass  # a token outside the vocabulary: self.embedding raises below
        return layer.compute_gates(self.embedding(tokens))


def _read_words(words: nn.Embedding) -> Tensor:
    """Return the vectors of all words; the padding has no gradient, as in nn.Embedding."""
    weight = words.weight
    if words.padding_idx is None:
        return weight
    is_padding = torch.arange(words.num_embeddings, device=weight.device) == words.padding_idx
    return torch.where(is_padding.unsqueeze(1), weight.detach(), weight)


class _LookUp(torch.autograd.Function):
    """The rows tokens (s,b,n) of s tables (s,v,d), as (s,b,n,d). vmap over more tables stays one call.

    On a GPU, the gradient of small tables is a product with the tokens as vectors of 0 and 1. That reads the gradient
    once; torch sorts the tokens instead.
    """

    @staticmethod
    def forward(tokens: Tensor, table: Tensor) -> Tensor:
        return F.embedding(_number_rows(tokens, table.shape[1]), table.flatten(0, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tokens, table = inputs
        ctx.words = table.shape[1]
        ctx.save_for_backward(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, sum_by_word(grad, tokens, ctx.words, by_product=grad.is_cuda and ctx.words <= MOST_WORDS)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        (output,) = apply_as_one_call(_LookUp, info.batch_size, in_dims, inputs)
        return output, 0


def sum_by_word(x: Tensor, tokens: Tensor, words: int, *, by_product: bool) -> Tensor:
    """Add up x (s,b,n,d) over the places (b,n) of each word: (s,words,d). Sums are in float32 and in a fixed order."""
    if by_product:
        places = (tokens.flatten(1).unsqueeze(1) == torch.arange(words, device=x.device).unsqueeze(1)).to(x.dtype)
        return places @ x.flatten(1, 2)
    rows, wide = _number_rows(tokens, words), x if x.is_cuda else widen(x)  # on a GPU torch sums in float32 by itself
    total = torch.ops.aten.embedding_dense_backward(wide, rows, len(x) * words, -1, False)
    return total.to(x.dtype).unflatten(0, (-1, words))


def _number_rows(tokens: Tensor, words: int) -> Tensor:
    """Number the rows of all tables one after another."""
    return tokens + words * torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
