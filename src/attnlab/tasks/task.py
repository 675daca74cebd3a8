"""A task: examples in parts ("train", "valid", "test", …), served as batches of padded token ids on the CPU.

The plan of an epoch is a list of batches, each a list of example indices. It is a pure function of (part, budget, seed,
epoch): a resumed run computes the same plan and skips to its index. Of w processes, process r takes batches r, r+w, ….
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from torch import Tensor

from attnlab.config import check_fields, suggest_nearest
from attnlab.tasks.batching import plan_batches

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")  # by id, in every vocabulary

Architecture = Literal["translation", "language", "classification"]
Score = Literal["accuracy", "perplexity"]


@dataclass(frozen=True)
class Batch:
    """A batch of b examples.

    inputs   arguments of the model's forward, in order, padded on the right with PAD: translation (source, target_in);
             language (tokens,); classification (tokens,)
    targets  token ids (b,n), PAD where nothing is scored; or class ids (b,), all scored
    count    number of scored targets, known without a device synchronization
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    count: int
    indices: list[int]


class Task(ABC):
    """The examples of one kind of problem. `notes` lists, for the log, every change made to the data."""

    architecture: Architecture
    config_type: ClassVar[type]
    notes: list[str]
    has_text: bool = True  # False: its sequences are symbols, which no command reads or writes as text

    @abstractmethod
    def __init__(self, config: Any, folder: Path) -> None: ...

    @classmethod
    def prepare(cls, config: Any, folder: Path) -> Self:
        """Build the task of a configuration. The vocabulary is loaded from folder, or built and stored there."""
        return cls(config, folder)

    @classmethod
    def name_main_score(cls, data: Mapping[str, Any]) -> Score:
        """Return the score to show of a run first; data: the values of its configuration."""
        return "accuracy" if getattr(cls, "architecture", None) == "classification" else "perplexity"

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""

    @abstractmethod
    def get_sizes(self) -> dict[str, int]:
        """Return the sizes the model needs: "vocabulary", and "source_vocabulary" or "classes"."""

    @abstractmethod
    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        """Return the length of each example in each padded tensor, (examples,) each, the primary sort key first."""

    @abstractmethod
    def make_batch(self, part: str, indices: list[int]) -> Batch:
        """Build the batch of these examples, padded to the longest of them."""

    def plan_batches(self, part: str, *, widths: np.ndarray | None = None, **budget: Any) -> list[list[int]]:
        """Divide an epoch of a part into batches of example indices.

        widths   ascending widths that batches are padded to; an example counts as the first width that holds it
        budget   arguments of `batching.plan_batches`: tokens or examples, seed, epoch, shuffle
        """
        lengths = self.get_lengths(part)
        if widths is not None:
            lengths = (widths[np.searchsorted(widths, np.maximum.reduce(lengths))],)
        return plan_batches(lengths, **budget)

    def count_examples(self, part: str) -> int:
        """Return the number of examples in a part."""
        return len(self.get_lengths(part)[0])

    def count_bytes(self, part: str) -> int | None:
        """Return the number of bytes of the text that a part scores, in UTF-8; None if its targets are no text."""
        return None

    def add_notes(self, *lines: str) -> None:
        """Add lines to the notes, skipping those already there."""
        self.notes += [line for line in lines if line not in self.notes]

    def check_part(self, part: str) -> None:
        if part not in self.parts:
            hint = suggest_nearest(part, self.parts)
            raise ValueError(f"unknown part {part!r}{hint}; available: {', '.join(self.parts)}")


class TaskConfig:
    """Base of the task configurations. Raises ValueError for a value that its field does not allow."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:
        """Raise ValueError if fields do not fit together."""

    def resolve(self) -> Self:
        """Return the configuration with the values that follow from others."""
        return self
