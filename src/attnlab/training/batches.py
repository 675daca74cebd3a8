"""The batches of each update, taken from the plan of its epoch.

For captured steps, a batch is padded to one of a few widths. A batch with a fixed number of examples (batch_examples=)
is as wide as its longest example. If that is too large for one pass, or splitting saves half of the positions, the
batch is computed in several passes whose gradients add up, the longest examples first.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attnlab.tasks.task import PAD, Batch, Task
from attnlab.training.checkpoints import Position
from attnlab.training.step import choose_widths, pad_tensors

if TYPE_CHECKING:
    from attnlab.training.loop import TrainConfig

ROOM = 2**16  # largest number of positions (examples × width) in one pass of a batch with a fixed number of examples


class Batches:
    """A source of batches: called with a run's position, it returns the batches of the next update.

    padded: pad batches to a few widths, so that steps can be captured
    """

    def __init__(self, task: Task, config: "TrainConfig", accelerator: Any, *, padded: bool) -> None:
        self.task, self.config, self.accelerator = task, config, accelerator
        self.widths: np.ndarray | None = None
        if padded:
            self.widths = _widths(np.maximum.reduce(task.get_lengths("train")), config)
        self.epoch, self.plan = -1, list[list[int]]()

    def __call__(self, position: Position) -> list[Batch]:
        """Return this process's batches of the next update, and advance the position."""
        chosen = self.choose(position)
        return [batch for indices in chosen for batch in self._passes(self.task.make_batch("train", indices))]

    def choose(self, position: Position) -> list[list[int]]:
        """Return the examples of this process's batches of the next update, and advance the position."""
        each, examples = self.config.accumulate * self.accelerator.num_processes, self.config.batch_examples
        if position.epoch != self.epoch:
            self.epoch = position.epoch
            size = {"tokens": self.config.batch_tokens} if examples is None else {"examples": examples}
            seeds = {"seed": self.config.seed, "epoch": self.epoch}
            self.plan = self.task.plan_batches("train", **size, **seeds, widths=self.widths)
            if len(self.plan) < each:
                needs = f"an update needs {each} batches, but an epoch has only {len(self.plan)}"
                raise ValueError(f"{needs}; lower batch_tokens= or accumulate=")
        start = position.index * each + self.accelerator.process_index
        chosen = self.plan[start : (position.index + 1) * each : self.accelerator.num_processes]
        position.index += 1
        if (position.index + 1) * each > len(self.plan):
            position.epoch, position.index = position.epoch + 1, 0
        return chosen

    def find_shape(self, longest: int) -> tuple[int, int] | None:
        """Return the rows and width to which a batch of at most batch_tokens is padded, or None if it is not."""
        width = self._width(longest)
        return None if self.widths is None else (self.config.batch_tokens // width, width)

    def agree_on_update(self, update: list[Batch], stop: bool) -> tuple[int, bool]:
        """Return the number of targets of this update in all processes, and whether any process should stop."""
        targets, stops = self.sum_over_processes(sum(batch.count for batch in update), stop)
        return round(targets), stops > 0

    def sum_over_processes(self, *values: float) -> list[float]:
        if self.accelerator.num_processes == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(sums).tolist()

    def _passes(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batch, in several passes if one is too large or half padding."""
        examples = self.config.batch_examples
        if examples is None or self.accelerator.num_processes > 1:
            yield self._fit_shape(batch, examples or self.config.batch_tokens // self._width(_longest(batch)))
            return
        lengths = torch.stack([(x != PAD).sum(1) for x in _select_wide(batch)]).amax(0)
        lengths, order = lengths.sort(descending=True, stable=True)
        widths = [self._width(length) for length in lengths.tolist()]
        if (rows := self._rows(widths, examples)) >= len(widths):
            yield self._fit_shape(batch, rows)
            return
        start, indices = 0, [batch.indices[k] for k in order.tolist()]
        while start < len(widths):
            rows = self._rows(widths[start:], examples)
            yield self._fit_shape(self.task.make_batch("train", indices[start : start + rows]), rows)
            start += rows

    def _rows(self, widths: list[int], examples: int) -> int:
        """Return the number of rows of the next pass; widths are those of the remaining examples, in falling order.

        The pass takes as many examples as fit into ROOM; or only a quarter or a sixteenth of the batch, if that saves
        half of the positions.
        """
        rows = examples
        while rows > 1 and rows * widths[0] > ROOM:
            rows = -(-rows // 2)
        if self.widths is not None and rows >= len(widths):
            for few in (examples // 4, examples // 16):
                if 0 < few < len(widths) and 2 * (few * widths[0] + examples * widths[few]) <= rows * widths[0]:
                    return few
        return rows

    def _width(self, longest: int) -> int:
        return longest if self.widths is None else int(self.widths[np.searchsorted(self.widths, longest)])

    def _fit_shape(self, batch: Batch, rows: int) -> Batch:
        """Pad the batch to its captured shape; return it unchanged if steps are not captured."""
        if self.widths is None:
            return batch
        shaped = pad_tensors([*batch.inputs, batch.targets], rows, self._width(_longest(batch)))
        *inputs, targets = (x.pin_memory() for x in shaped)
        return replace(batch, inputs=tuple(inputs), targets=targets)


def _widths(lengths: np.ndarray, config: "TrainConfig") -> np.ndarray:
    """Choose the widths to pad to. With batch_examples=, three quarters suit the longest examples of whole batches."""
    if config.batch_examples is None:
        return choose_widths(lengths, config.rungs)
    few = config.rungs // 4
    wide = choose_widths(lengths, config.rungs - few, together=config.batch_examples)
    return np.union1d(wide, choose_widths(lengths, few)) if few else wide


def _select_wide(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that have a width, (b,n)."""
    return [x for x in (*batch.inputs, batch.targets) if x.dim() == 2]


def _longest(batch: Batch) -> int:
    return max(x.shape[1] for x in _select_wide(batch))
