"""The interface of a model to training, scoring and recording."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from attnlab.models.embedding import Readout


class Model(nn.Module, ABC):
    """A model that predicts softmax(readout(hidden(…)))."""

    readout: Readout
    restored: frozenset[str] = frozenset()  # names of fixed weights that building restores: no checkpoint has them

    def forward(self, *batch: Any, **named: Any) -> Tensor:
        """Return the logits; takes the arguments of `hidden`."""
        return self.readout(self.hidden(*batch, **named))

    @abstractmethod
    def hidden(self, *batch: Any, **named: Any) -> Tensor:
        """Return the input of the readout."""

    def all_blocks(self) -> list[nn.Module]:
        """Return the layers of every stack. Compiling them pays off because all layers share the same code."""
        return []

    @abstractmethod
    def sequences(self, *batch: Any, **named: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Return tokens and mask, (b,n) each, of "source" and "target" in a batch; takes the arguments of `hidden`."""
