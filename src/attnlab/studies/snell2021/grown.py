"""Runs that differ in their seed alone, trained as one population, each into a folder of its own.

What a folder holds then is what `attnlab train` leaves there: the weights at every step that is evaluated, the last
ones, and that it is finished; but no metrics, since nothing is evaluated on the way. A run has the batches it has
alone, in the same order, padded to the longest of all runs; its dropout is drawn from its own seed.
"""

import json
import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.checkpointing import Position
from attnlab.config import digest
from attnlab.mechanisms.kernels.launch import LAUNCHED
from attnlab.models.presets import Config, build
from attnlab.population import IGNORED, Experiment, Feed, Population, grow
from attnlab.recipe import Recipe
from attnlab.runs import note_what_ran
from attnlab.stepping import fit, ladder, mean_width
from attnlab.store import Checkpoint, RunFolder, write_checkpoint, write_text
from attnlab.tasks.task import PAD, Task
from attnlab.tasks.text import write_atomically
from attnlab.train import Outcome, TrainConfig

PLAIN = {  # how a population is trained; the rest of a TrainConfig is free
    "accumulate": 1, "optimiser": "adam", "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
    "schedule": "constant", "warmup": 0, "label_smoothing": 0.0, "precision": "fp32", "patience": None, "keep_last": 0,
}  # fmt: skip


class Runs(Experiment):
    """The runs of some recipes, by their seeds."""

    def __init__(self, task: Task, recipes: Sequence[Recipe], folders: Sequence[RunFolder]) -> None:
        if len({alike(recipe) for recipe in recipes}) != 1:
            raise ValueError("these runs differ in more than their seed, and cannot be trained as one")
        training = recipes[0].training
        for name, value in PLAIN.items():
            if getattr(training, name) != value:
                raise ValueError(f"{name}={getattr(training, name)}: runs are trained as one only with {name}={value}")
        if training.batch_examples is None:
            raise ValueError("runs are trained as one only where a batch has a number of examples: say batch_examples=")
        self.task, self.training = task, training
        self.recipes = {recipe.training.seed: recipe for recipe in recipes}
        self.folders = dict(zip(self.recipes, folders, strict=True))
        self.steps, self.lr, self.clip = training.steps, training.lr, training.clip
        self.measured_at, self.checkpoint_every = training.evaluate_at, max(training.checkpoint_every, 6000)

    def key(self) -> str:
        return alike(next(iter(self.recipes.values())))

    def model(self, seed: int) -> nn.Module:
        config = self.recipes[seed].fitted(self.task)
        assert isinstance(config, Config)
        torch.manual_seed(seed)
        return build(config)

    def feed(self, seeds: Sequence[int], device: torch.device) -> Feed:
        rows = self.training.batch_examples
        assert rows is not None
        lengths = np.maximum.reduce(self.task.lengths("train"))
        widths = ladder(lengths, self.training.rungs, together=rows * len(seeds))
        epoch_steps = -(-len(lengths) // rows)
        plans: dict[int, list[list[list[int]]]] = {}  # of the newest epoch, each seed's

        def planned(epoch: int) -> list[list[list[int]]]:
            if epoch not in plans:
                plans.clear()
                plans[epoch] = [self.task.plan("train", examples=rows, seed=seed, epoch=epoch) for seed in seeds]
            return plans[epoch]

        def batches(step: int) -> tuple[Tensor, ...]:
            epoch, number = divmod(step, epoch_steps)
            each = [plan[number] for plan in planned(epoch)]
            made = self.task.batch("train", [index for indices in each for index in indices])  # padded alike
            width = int(widths[np.searchsorted(widths, max(x.shape[1] for x in made.inputs))])
            goals = made.targets.masked_fill(made.targets == PAD, IGNORED) if made.targets.dim() > 1 else made.targets
            each_own = [x.unflatten(0, (len(seeds), -1)) for x in (*made.inputs, goals)]
            shaped = [torch.stack(fit(x, rows, width)) for x in each_own[:-1]]
            shaped.append(torch.stack(fit(each_own[-1], rows, width, IGNORED)))
            return tuple(x.pin_memory() if device.type == "cuda" else x for x in shaped)

        return batches

    def measure(self, population: Population, seeds: Sequence[int], step: int) -> dict[str, Tensor]:
        """Nothing is measured here: the weights are kept, to be measured later."""
        if step:
            for number, seed in enumerate(seeds):
                self._write(population, number, {"step": step, "best": math.inf}, self.folders[seed].kept(step))
        return {}

    def finish(self, seed: int, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Say that a run is finished, and what it ran on."""
        folder, state = self.folders[seed], vars(Position(step=self.steps, finished=True))
        note_what_ran(folder, 0, Outcome(self.steps, math.inf, 0, True, "population"), device)
        write_checkpoint(Checkpoint({f"model/{name}": x for name, x in weights.items()}, state), folder.last)

    def _write(self, population: Population, number: int, state: dict, file: Path) -> None:
        held = population.weights | population.buffers
        kept = {f"model/{name}": x[number].detach().cpu() for name, x in held.items()}
        write_checkpoint(Checkpoint(kept, state), file)


def alike(recipe: Recipe) -> str:
    """Equal for recipes that differ in their seed alone."""
    return digest(replace(recipe, training=replace(recipe.training, seed=0)))


def train_as_one(
    task: Task, recipes: Sequence[Recipe], folders: Sequence[RunFolder], vocabulary: Path, device: torch.device
) -> float:
    """Train them all to their end; the seconds it took. ValueError, when the others are done, if some diverged."""
    runs, clock = Runs(task, recipes, folders), time.perf_counter()
    with ExitStack() as locks:
        for recipe, folder in zip(recipes, folders, strict=True):
            locks.enter_context(folder.locked())
            folder.claim(recipe.values())
            for file in vocabulary.iterdir():
                if not (folder.path / file.name).exists():
                    write_atomically(folder.path / file.name, file.read_bytes())
            write_text(folder.path / "model.json", json.dumps(asdict(recipe.fitted(task)), indent=1) + "\n")
        LAUNCHED.clear()
        seeds = list(runs.recipes)
        together = folders[0].path.parent / f"as-one-{len(seeds)}-{min(seeds)}-{runs.key()}"
        grown = grow(runs, seeds, device=device, folder=together, processes=1)
        for number, seed in enumerate(seeds):
            if grown.finite[number]:
                runs.finish(seed, {name: x[number] for name, x in grown.weights.items()}, device)
    diverged = [str(folder.path) for folder, finite in zip(folders, grown.finite.tolist(), strict=True) if not finite]
    if diverged:
        raise ValueError(f"{', '.join(diverged)}: a loss or a gradient was not finite; lower lr=, or clip=")
    for file in together.iterdir():
        file.unlink()
    together.rmdir()
    return time.perf_counter() - clock


def how_many(task: Task, training: TrainConfig, *, room: int = 2**19, wider: float = 2.0) -> int:
    """How many runs are worth training as one: their batches fit together, and are not much wider than one's own.

    room    positions of all batches, at their widest
    wider   the mean width of all batches together, by that of one
    """
    rows, lengths = training.batch_examples, np.maximum.reduce(task.lengths("train"))
    if rows is None:
        return 1
    most, alone = room // (rows * int(lengths.max())), mean_width(lengths, rows)
    return max(1, bisect_right(range(1, most + 1), wider * alone, key=lambda runs: mean_width(lengths, rows * runs)))
