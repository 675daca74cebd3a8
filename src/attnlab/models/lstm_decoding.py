"""The state of incremental decoding of an LSTM translator: the encoded source and the decoder's last state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.models.cache import check_batch
from attnlab.models.lstm_layers import State


@dataclass
class LSTMDecoding:
    """The state of one decoding; a model's start() creates it and each step() advances it, as `cache.Decoding`."""

    memory: Tensor  # (b,j,m)
    mask: Tensor  # (b,1,1,j), False at padding of the source
    h: Tensor  # (layers,1,b,e)
    c: Tensor  # (layers,1,b,e)
    length: int | Tensor = 0  # number of tokens seen; a tensor on the device if pinned
    limit: int | None = None  # no limit

    def positions(self, tokens: Tensor) -> Tensor:
        """Return the position of each new token (b,n) in its sequence, (n,)."""
        check_batch(self.memory, tokens)
        return self.length + torch.arange(tokens.shape[1], device=tokens.device)

    def advance(self, last: State, new: int) -> None:
        if isinstance(self.length, Tensor):
            self.h.copy_(last[0])
            self.c.copy_(last[1])
            self.length.add_(new)
        else:
            (self.h, self.c), self.length = last, self.length + new

    def select(self, examples: Tensor) -> "LSTMDecoding":
        """Return the state of these examples, (m,) indices into the batch."""
        memory, mask = (x.index_select(0, examples) for x in (self.memory, self.mask))
        h, c = (x.index_select(2, examples) for x in (self.h, self.c))
        return LSTMDecoding(memory, mask, h, c, self.length.clone() if isinstance(self.length, Tensor) else self.length)

    def reorder_(self, examples: Tensor) -> None:
        """Select in place; each example must continue one with the same source, as beams of one sentence do."""
        for x in (self.h, self.c):
            x.copy_(x.index_select(2, examples))

    def pin(self, device: torch.device) -> None:
        """Move the position to the device; after this, the state changes only in place."""
        self.length = torch.as_tensor(self.length, device=device)

    def share_prefix(self, limit: int) -> "LSTMDecoding":
        """Return this state: none of its tensors grows with the target."""
        return self

    def restart_(self, fresh: "LSTMDecoding") -> None:
        """Become, in the same memory, a state of the same shape that has seen no token yet."""
        if not isinstance(self.length, Tensor) or fresh.length != 0:
            raise ValueError("restart_ needs a pinned state, and a fresh one that has seen no token")
        for name in ("memory", "mask", "h", "c"):
            getattr(self, name).copy_(getattr(fresh, name))
        self.length.zero_()
