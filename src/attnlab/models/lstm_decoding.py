"""Where the step-by-step decoding of an LSTM translator stands: the encoded source and the decoder's last state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.models.lstm_layers import State


@dataclass
class LSTMDecoding:
    """A model's start() makes it and each step() moves it on; `models.cache.Decoding` says what the methods are for."""

    memory: Tensor  # (b,j,m)
    mask: Tensor  # (b,1,1,j) which tokens of the source are real
    h: Tensor  # (layers,1,b,e)
    c: Tensor  # (layers,1,b,e)
    length: int | Tensor = 0  # tokens seen; a number on the device once pinned
    limit: int | None = None  # there is no limit

    def places(self, tokens: Tensor) -> Tensor:
        """Where each new token (b,n) stands in its sequence, (n,)."""
        if len(tokens) != len(self.memory):
            sizes = f"the decoding holds {len(self.memory)} examples but the step has {len(tokens)}"
            raise ValueError(f"{sizes}; change the batch by state.select(…)")
        return self.length + torch.arange(tokens.shape[1], device=tokens.device)

    def advance(self, last: State, new: int) -> None:
        if isinstance(self.length, Tensor):
            self.h.copy_(last[0])
            self.c.copy_(last[1])
            self.length.add_(new)
        else:
            (self.h, self.c), self.length = last, self.length + new

    def select(self, examples: Tensor) -> "LSTMDecoding":
        """The state of these examples, (m,) indices into the batch."""
        memory, mask = (x.index_select(0, examples) for x in (self.memory, self.mask))
        h, c = (x.index_select(2, examples) for x in (self.h, self.c))
        return LSTMDecoding(memory, mask, h, c, self.length.clone() if isinstance(self.length, Tensor) else self.length)

    def reorder_(self, examples: Tensor) -> None:
        """As select, in place, where each example continues one with the same source: beams of one sentence."""
        for x in (self.h, self.c):
            x.copy_(x.index_select(2, examples))

    def pin(self, device: torch.device) -> None:
        """Change only in place from here on, and count on the device."""
        self.length = torch.as_tensor(self.length, device=device)

    def within(self, limit: int) -> "LSTMDecoding":
        """This state: none of its tensors grows with the target."""
        return self

    def restart_(self, fresh: "LSTMDecoding") -> None:
        """Become, in the same memory, a state of the same shape that has seen no token."""
        if not isinstance(self.length, Tensor) or fresh.length != 0:
            raise ValueError("restart_ takes a state that has seen no token into a pinned one")
        for name in ("memory", "mask", "h", "c"):
            getattr(self, name).copy_(getattr(fresh, name))
        self.length.zero_()
