"""Layers of LSTM over the words of a sequence, one direction or both.

    gates = W_ih x + b_ih + b_hh        outputs = recurrence(gates, W_hh, …)       layer k+1 reads dropout(outputs of k)

The two directions of a layer run side by side in one recurrence, for which the second reads x turned round. In
training, where the words are fewer than the tokens of a batch, the first layer's gates are looked up in a table
W_ih E + b of all words instead: the same numbers for a fraction of the products.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.models.embedding import InputEmbedding
from attnlab.models.recurrence import recurrence

State = tuple[Tensor, Tensor]  # h and c


class LSTMLayer(nn.Module):
    """One layer; parameters as nn.LSTM's, stacked over its directions, all U(±size^−½)."""

    def __init__(self, inputs: int, size: int, *, directions: int = 1) -> None:
        super().__init__()
        self.size, self.directions = size, directions
        self.input_weight = nn.Parameter(torch.empty(directions, 4 * size, inputs))  # W_ih
        self.recurrent_weight = nn.Parameter(torch.empty(directions, 4 * size, size))  # W_hh
        self.input_bias = nn.Parameter(torch.empty(directions, 4 * size))
        self.recurrent_bias = nn.Parameter(torch.empty(directions, 4 * size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def gates(self, x: Tensor) -> Tensor:
        """The inputs' part of the gates, (b,n,inputs) -> (directions,b,n,4·size), as each direction reads x: the second
        from its end."""
        read = x.unsqueeze(0) if self.directions == 1 else torch.stack([x, x.flip(1)])
        return self._projected(read.flatten(1, 2)).unflatten(1, x.shape[:2])

    def gates_of_words(self, tokens: Tensor, words: Tensor) -> Tensor:
        """The same of x = words[tokens], looked up in a table of all words (v,inputs)."""
        table = self._projected(words.expand(self.directions, -1, -1)).flatten(0, 1)  # (directions·v,4·size)
        read = torch.stack((tokens, len(words) + tokens.flip(1))[: self.directions])
        return F.embedding(read, table)

    def _projected(self, x: Tensor) -> Tensor:
        bias = (self.input_bias + self.recurrent_bias).unsqueeze(1)
        return torch.baddbmm(bias, x, self.input_weight.mT)

    def forward(self, gates: Tensor, live: Tensor | None = None, start: State | None = None) -> tuple[Tensor, State]:
        """gates (directions,b,n,4·size) -> outputs (b,n,directions·size) and the last states (directions,b,size).

        live (b,n), None: every position; start (directions,b,size) each, None: 0.
        """
        if start is None:
            start = (gates.new_zeros(*gates.shape[:2], self.size),) * 2
        if self.directions == 1:
            outputs, *last = recurrence(gates, self.recurrent_weight, *start, None if live is None else live[None])
            return outputs.squeeze(0), (last[0], last[1])
        both = None if live is None else torch.stack([live, live.flip(1)])
        outputs, *last = recurrence(gates, self.recurrent_weight, *start, both)
        forth, back = outputs.unbind()
        return torch.cat([forth, back.flip(1)], dim=-1), (last[0], last[1])


class LSTMStack(nn.Module):
    """Words and layers: tokens (b,n) -> outputs (b,n,directions·size), last states (layers,directions,b,size)."""

    def __init__(self, embedding: InputEmbedding, layers: Iterable[LSTMLayer], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.layers = embedding, nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)  # between layers only

    def forward(self, tokens: Tensor, live: Tensor | None = None, start: State | None = None) -> tuple[Tensor, State]:
        first, *further = self.layers
        x, last = first(self._gates(tokens), live, _of_layer(start, 0))
        ends = [last]
        for number, layer in enumerate(further, start=1):
            x, last = layer(layer.gates(self.dropout(x)), live, _of_layer(start, number))  # type: ignore[operator]
            ends.append(last)
        h, c = (torch.stack(each) for each in zip(*ends, strict=True))
        return x, (h, c)

    def _gates(self, tokens: Tensor) -> Tensor:
        """Those of the first layer."""
        layer: LSTMLayer = self.layers[0]  # type: ignore[assignment]
        words: nn.Embedding = self.embedding.words  # type: ignore[assignment]
        if self.training and words.num_embeddings < tokens.numel():
            try:
                every = torch.arange(words.num_embeddings, device=tokens.device)
                return layer.gates_of_words(tokens, words(every))
            except IndexError:
                pass  # a token that is no word: said below
        return layer.gates(self.embedding(tokens))


def _of_layer(start: State | None, number: int) -> State | None:
    return None if start is None else (start[0][number], start[1][number])
