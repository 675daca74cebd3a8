"""The interface of a model to training, scoring and recording, and the checks of its configuration."""

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from attnlab.config import check_fields
from attnlab.models.embedding import Readout


class ModelConfig:
    """The checks of a configuration, which is a dataclass with these fields and others."""

    model: str
    vocabulary: int
    target_vocabulary: int | None
    padding: int

    def check_values(self) -> None:
        """Raise ValueError for a value outside its range or its list of names."""
        check_fields(self, minima={"padding": 0})
        for name, value in vars(self).items():
            if name.endswith("dropout") and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if self.padding >= min(self.vocabulary, self.target_vocabulary or self.vocabulary):
            raise ValueError(f"padding must be a token of the vocabulary, got {self.padding}")

    def reject_keys(self, *names: str, owner: str) -> None:
        """Raise ValueError if one of these fields, which only `owner` have, differs from its default."""
        defaults = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} is for {owner} only, got {getattr(self, name)!r} for a {self.model}")


class Model(nn.Module, ABC):
    """A model that predicts softmax(readout(hidden(…)))."""

    readout: Readout

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
