"""Runs that differ in their seed alone, trained as one population, each into a folder of its own.

A run has the batches it has alone, in the same order, but padded to the longest of all runs, and with long examples
first, so that the recurrence is soon done with the short ones; very long ones are passed apart, and the rest of their
batch is not padded to them. Its dropout is drawn from its own seed, for that width; products are in tf32. Its
folder then holds what `attnlab train` leaves there, but for metrics and the best weights: nothing is evaluated on the
way. One whose loss or gradient is not finite is left unfinished, to be trained alone, which says where it goes wrong.
"""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.config import compute_digest
from attnlab.experiments.population import IGNORED, Experiment, Feed, Population, Stacked, grow
from attnlab.experiments.work import take_vocabulary, wait_for
from attnlab.files import write_text
from attnlab.mechanisms.kernels.launch import LAUNCHED
from attnlab.models.presets import Config, build
from attnlab.tasks.task import PAD, Task
from attnlab.training.checkpoints import Position
from attnlab.training.loop import TrainConfig, TrainingResult
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import Checkpoint, RunFolder, read_checkpoint, write_checkpoint
from attnlab.training.runs import write_what_ran
from attnlab.training.step import choose_widths, pad_tensors

MOST = 2**19  # positions
BYTES = 40_000  # that a position takes of an LSTM of 256 in both directions
PARTS = 4  # of a card
LONG = 4096  # tokens: longer examples are passed apart; seldom, since a pass takes the time of its longest
FEW = 4  # examples that are passed apart, at least
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
        if getattr(recipes[0].data, "embeddings", None):
            raise ValueError("embeddings=: runs that start from vectors are not trained as one")
        self.task, self.training = task, training
        order = sorted(zip(recipes, folders, strict=True), key=lambda pair: pair[0].training.seed)
        self.recipes = {recipe.training.seed: recipe for recipe, _ in order}
        self.folders = {recipe.training.seed: folder for recipe, folder in order}
        self.steps, self.lr, self.clip = training.steps, training.lr, training.clip
        self.measured_at = training.evaluate_at
        self.checkpoint_every = max(training.checkpoint_every, training.steps // 6)  # each takes gigabytes

    def key(self) -> str:
        return alike(next(iter(self.recipes.values())))

    def model(self, seed: int) -> nn.Module:
        config = self.recipes[seed].resolve_model(self.task)
        assert isinstance(config, Config)
        torch.manual_seed(seed)
        return build(config)

    def feed(self, seeds: Sequence[int], device: torch.device) -> Feed:
        rows = self.training.batch_examples
        assert rows is not None
        lengths = np.maximum.reduce(self.task.get_lengths("train"))
        widths, ordinary = choose_widths(lengths, self.training.rungs, together=rows, batches=len(seeds)), _ordinary(lengths)
        if 0 < ordinary < lengths.max():
            widths = np.union1d(widths, ordinary)
        epoch_steps = -(-len(lengths) // rows)
        plans: dict[int, list[list[list[int]]]] = {}  # of the newest epoch, each seed's

        def planned(epoch: int) -> list[list[list[int]]]:
            if epoch not in plans:
                plans.clear()
                plans[epoch] = [self.task.plan_batches("train", examples=rows, seed=seed, epoch=epoch) for seed in seeds]
            return plans[epoch]

        def batches(step: int) -> tuple[Stacked, ...]:
            epoch, number = divmod(step, epoch_steps)
            each = [sorted(plan[number], key=lambda index: -lengths[index]) for plan in planned(epoch)]
            first = _apart(max(int((lengths[indices] > LONG).sum()) for indices in each), rows)
            if not first:
                return (padded(each, rows),)
            head, rest = padded([x[:first] for x in each], first), [x[first:] for x in each]
            return (head, padded(rest, rows - first, ordinary)) if rest[0] else (head,)  # one width: few shapes

        def padded(each: list[list[int]], rows: int, at_least: int = 0) -> Stacked:
            made = self.task.make_batch("train", [index for indices in each for index in indices])  # padded alike
            width = int(widths[np.searchsorted(widths, max(at_least, *(x.shape[1] for x in made.inputs)))])
            goals = made.targets.masked_fill(made.targets == PAD, IGNORED) if made.targets.dim() > 1 else made.targets
            each_own = [x.unflatten(0, (len(seeds), -1)) for x in (*made.inputs, goals)]
            shaped = [torch.stack(pad_tensors(x, rows, width)) for x in each_own[:-1]]
            shaped.append(torch.stack(pad_tensors(each_own[-1], rows, width, IGNORED)))
            return tuple(x.pin_memory() if device.type == "cuda" else x for x in shaped)

        return batches

    def measure(self, population: Population, seeds: Sequence[int], step: int) -> dict[str, Tensor]:
        """Nothing is measured here: the weights are kept, to be measured later."""
        held = population.weights | population.buffers
        for number, seed in enumerate(seeds if step else ()):
            kept = {f"model/{name}": x[number].detach().cpu() for name, x in held.items()}
            write_checkpoint(Checkpoint(kept, {"step": step, "best": math.inf}), self.folders[seed].step_file(step))
        return {}

    def finish(self, seed: int, device: torch.device) -> None:
        """Say what a run ran on, and that it is finished."""
        folder, state = self.folders[seed], vars(Position(step=self.steps, finished=True))
        (folder.path / "ran.json").unlink(missing_ok=True)
        write_what_ran(folder, 0, TrainingResult(self.steps, math.inf, 0, True, "population, tf32"), device)
        write_checkpoint(Checkpoint(read_checkpoint(folder.step_file(self.steps)).tensors, state), folder.last)


def alike(recipe: Recipe) -> str:
    """Equal for recipes that differ in their seed alone."""
    return compute_digest(replace(recipe, training=replace(recipe.training, seed=0)))


def train_as_one(
    task: Task, recipes: Sequence[Recipe], folders: Sequence[RunFolder], vocabulary: Path, device: torch.device
) -> None:
    """Train them all to their end, from where they stand as one; one that diverged is not finished then."""
    runs = Runs(task, recipes, folders)
    with ExitStack() as locks:
        for seed, folder in runs.folders.items():
            wait_for(folder)
            locks.enter_context(folder.lock())
            folder.claim(runs.recipes[seed].values())
            take_vocabulary(vocabulary, folder.path)
            fitted = asdict(runs.recipes[seed].resolve_model(task))
            write_text(folder.path / "model.json", json.dumps(fitted, indent=1) + "\n")
        LAUNCHED.clear()
        seeds = list(runs.recipes)
        name = sha256(" ".join(str(folder.path) for folder in runs.folders.values()).encode()).hexdigest()[:12]
        together = folders[0].path.parent / f"as-one-{name}"
        grown = grow(runs, seeds, device=device, folder=together, processes=1)
        for seed, finite in zip(seeds, grown.finite.tolist(), strict=True):
            if finite:
                runs.finish(seed, device)
        for file in together.iterdir():
            file.unlink()
        together.rmdir()


def how_many(task: Task, training: TrainConfig, room: int) -> int:
    """How many runs there is room for as one: as many as have so many positions in one pass, at the widest."""
    if (rows := training.batch_examples) is None:
        return 0
    lengths = np.maximum.reduce(task.get_lengths("train"))
    first = _apart(min(rows, int((lengths > LONG).sum())), rows)
    return room // max(rows * _ordinary(lengths), first * int(lengths.max()))


def _ordinary(lengths: np.ndarray) -> int:
    """The longest that is not passed apart."""
    return int(lengths[lengths <= LONG].max(initial=0))


def _apart(long: int, rows: int) -> int:
    """How many of a batch are passed apart where so many are long: a power of two, so that there are few shapes."""
    return min(rows, max(FEW, 1 << (long - 1).bit_length())) if long else 0


def room_on(device: torch.device) -> int:
    """Positions of batches that are trained as one, so that several such jobs fit on a card."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return min(MOST, total // (PARTS * BYTES))
