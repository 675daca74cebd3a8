"""What training, scoring and recording ask of a model, whatever it is made of."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from attnlab.models.embedding import Readout


class Model(nn.Module, ABC):
    """softmax(readout(hidden(…))) is what a model predicts."""

    readout: Readout

    @abstractmethod
    def hidden(self, *batch: Any, **named: Any) -> Tensor:
        """What the readout reads; takes what forward takes."""

    def all_blocks(self) -> list[nn.Module]:
        """The layers of every stack: what is worth compiling, as each is the same code many times."""
        return []

    @abstractmethod
    def sequences(self, *batch: Any, **named: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Tokens and mask, (b,n) each, of the "source" and the "target" in what forward takes."""
