"""A task: examples in parts ("train", "valid", "test", …), cut into batches of padded token ids on the CPU.

The batches of an epoch are a plan, lists of example indices, and a pure function of (part, budget, seed, epoch): to
resume is to make the plan again and go on at an index; with w processes, process r takes batches r, r+w, ….
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

from attnlab.config import suggest_nearest
from attnlab.tasks.batching import plan_batches

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")  # by id, in every vocabulary

Architecture = Literal["translation", "language", "classification"]


@dataclass(frozen=True)
class Batch:
    """b examples.

    inputs   what the model's forward takes, in order, padded with PAD on the right: translation (source, target_in);
             language (tokens,); classification (tokens,)
    targets  token ids (b,n), PAD where nothing is scored; or class ids (b,), all scored
    count    how many targets are scored, known without asking a device
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    count: int
    indices: list[int]


class Task(ABC):
    """Examples of one kind of problem. `notes` holds a line for the log for everything done to the data."""

    architecture: Architecture
    config_type: ClassVar[type]
    notes: list[str]

    @classmethod
    @abstractmethod
    def prepare(cls, config: Any, folder: Path) -> "Task":
        """The task of a configuration; its vocabulary is made and stored in folder, or read from it if it is there."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""

    @abstractmethod
    def get_sizes(self) -> dict[str, int]:
        """What the model must fit: "vocabulary", and "source_vocabulary" or "classes"."""

    @abstractmethod
    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        """How wide each example is in each padded tensor, (examples,) each; the first sorts before the second."""

    @abstractmethod
    def make_batch(self, part: str, indices: list[int]) -> Batch:
        """The examples of these indices, padded to the longest of them."""

    def plan_batches(
        self,
        part: str,
        *,
        tokens: int | None = None,
        examples: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        widths: np.ndarray | None = None,
    ) -> list[list[int]]:
        """The batches of an epoch: similar lengths together, at most so many padded tokens in any of its tensors.

        widths, rising, are those that batches will be padded to: an example counts as the first it fits under.

        tokens bounds (longest example) · (examples), fairseq's rule. With examples instead, a batch holds so many
        of any length, the last one fewer. Shuffled, the order is drawn from (seed, epoch); else longest first, or
        with examples as they stand.
        """
        lengths = self.get_lengths(part)
        if widths is not None:
            lengths = (widths[np.searchsorted(widths, np.maximum.reduce(lengths))],)
        return plan_batches(lengths, tokens=tokens, examples=examples, seed=seed, epoch=epoch, shuffle=shuffle)

    def count_examples(self, part: str) -> int:
        """How many examples a part has."""
        return len(self.get_lengths(part)[0])

    def add_notes(self, *lines: str) -> None:
        """Keep lines for the log, each once."""
        self.notes += [line for line in lines if line not in self.notes]

    def check_part(self, part: str) -> None:
        if part not in self.parts:
            raise ValueError(f"no part {part!r}{suggest_nearest(part, self.parts)}; there are {', '.join(self.parts)}")


class TaskConfig:
    """What the configurations of tasks have in common: each value is one its field allows."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, field.name), hints[field.name]
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{field.name} must be one of {', '.join(get_args(hint))}, not {value!r}")
            least = 0 if field.name == "data_seed" else 1
            if hint in (int, int | None) and value is not None and value < least:
                raise ValueError(f"{field.name} must be at least {least}, not {value}")
        self.check()

    def check(self) -> None:
        """What one field asks of another."""
