"""Recipes that differ only in their seed, trained as one population, each into its own run folder.

A run has the batches that it has alone, in the same order, padded to the longest of all runs. Long examples come first,
so that the recurrence finishes the short ones early. Very long examples are passed separately, and the rest of their
batch is not padded to them. Dropout comes from the seed of each run; products are in tf32. The run folder then holds
what `attnlab train` leaves there, without metrics and best weights: nothing is evaluated during training. A run whose
loss or gradient is not finite stays unfinished; trained alone, it reports where it diverges.
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
from attnlab.experiments.population import IGNORED, Experiment, Feed, Population, Stacked
from attnlab.experiments.population_training import train_population
from attnlab.experiments.single_run import take_vocabulary, wait_for_lock
from attnlab.files import write_text
from attnlab.mechanisms.kernels.launch import LAUNCHED
from attnlab.models.presets import Config, build
from attnlab.tasks.task import PAD, Task
from attnlab.training.checkpoints import Position
from attnlab.training.loop import TrainConfig, TrainingResult
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import Checkpoint, RunFolder, read_checkpoint, write_checkpoint
from attnlab.training.run_hashes import write_hashes
from attnlab.training.runs import write_what_ran
from attnlab.training.step import choose_widths, pad_tensors

MOST_POSITIONS = 2**19  # of a batch of all runs
POSITION_BYTES = 40_000  # memory of one position of a bidirectional LSTM of width 256
CARD_PARTS = 4  # so that several such jobs fit on one GPU
LONG = 4096  # tokens: longer examples are passed separately
FEW = 4  # fewest examples that are passed separately
PLAIN = {  # the training that a population can do; the rest of a TrainConfig is free
    "accumulate": 1, "optimiser": "adam", "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
    "schedule": "constant", "warmup": 0, "label_smoothing": 0.0, "z_loss": 0.0, "precision": "fp32",
    "patience": None, "keep_last": 0,
}  # fmt: skip


class RecipeSeeds(Experiment):
    """Runs of one recipe with several seeds."""

    def __init__(self, task: Task, recipes: Sequence[Recipe], folders: Sequence[RunFolder]) -> None:
        if len({digest_without_seed(recipe) for recipe in recipes}) != 1:
            raise ValueError("these runs differ in more than their seed, so they cannot train as one population")
        training = recipes[0].training
        for name, value in PLAIN.items():
            if getattr(training, name) != value:
                raise ValueError(f"{name}={getattr(training, name)}: a population needs {name}={value}")
        if training.batch_examples is None:
            raise ValueError("a population needs batches with a fixed number of examples: set batch_examples=")
        if getattr(recipes[0].data, "embeddings", None):
            raise ValueError("embeddings=: runs with pretrained vectors cannot train as one population")
        self.task, self.training = task, training
        order = sorted(zip(recipes, folders, strict=True), key=lambda pair: pair[0].training.seed)
        self.recipes = {recipe.training.seed: recipe for recipe, _ in order}
        self.folders = {recipe.training.seed: folder for recipe, folder in order}
        self.steps, self.lr, self.clip = training.steps, training.lr, training.clip
        self.measured_at = training.evaluate_at
        self.checkpoint_every = max(training.checkpoint_every, training.steps // 6)  # a checkpoint takes gigabytes

    def key(self) -> str:
        return digest_without_seed(next(iter(self.recipes.values())))

    def model(self, seed: int) -> nn.Module:
        config = self.recipes[seed].resolve_model(self.task)
        assert isinstance(config, Config)
        torch.manual_seed(seed)
        return build(config)

    def feed(self, seeds: Sequence[int], device: torch.device) -> Feed:
        rows = self.training.batch_examples
        assert rows is not None
        lengths = np.maximum.reduce(self.task.get_lengths("train"))
        widths, ordinary = (
            choose_widths(lengths, self.training.rungs, together=rows, batches=len(seeds)),
            _find_ordinary(lengths),
        )
        if 0 < ordinary < lengths.max():
            widths = np.union1d(widths, ordinary)
        epoch_steps = -(-len(lengths) // rows)
        plans: dict[int, list[list[list[int]]]] = {}  # of the current epoch, by seed

        def plan_epoch(epoch: int) -> list[list[list[int]]]:
            if epoch not in plans:
                plans.clear()
                plans[epoch] = [
                    self.task.plan_batches("train", examples=rows, seed=seed, epoch=epoch) for seed in seeds
                ]
            return plans[epoch]

        def batches(step: int) -> tuple[Stacked, ...]:
            epoch, number = divmod(step, epoch_steps)
            each = [sorted(plan[number], key=lambda index: -lengths[index]) for plan in plan_epoch(epoch)]
            first = _count_separate(max(int((lengths[indices] > LONG).sum()) for indices in each), rows)
            if not first:
                return (stack_batch(each, rows),)
            head, rest = stack_batch([x[:first] for x in each], first), [x[first:] for x in each]
            return (head, stack_batch(rest, rows - first, ordinary)) if rest[0] else (head,)  # one width: few shapes

        def stack_batch(each: list[list[int]], rows: int, at_least: int = 0) -> Stacked:
            made = self.task.make_batch("train", [index for indices in each for index in indices])
            width = int(widths[np.searchsorted(widths, max(at_least, *(x.shape[1] for x in made.inputs)))])
            goals = made.targets.masked_fill(made.targets == PAD, IGNORED) if made.targets.dim() > 1 else made.targets
            each_own = [x.reshape(len(seeds), -1, *x.shape[1:]) for x in (*made.inputs, goals)]
            shaped = [torch.stack(pad_tensors(x, rows, width)) for x in each_own[:-1]]
            shaped.append(torch.stack(pad_tensors(each_own[-1], rows, width, IGNORED)))
            return tuple(x.pin_memory() if device.type == "cuda" else x for x in shaped)

        return batches

    def measure(self, population: Population, seeds: Sequence[int], step: int) -> dict[str, Tensor]:
        """Keep the weights, to be measured after training."""
        held = population.weights | population.buffers
        for number, seed in enumerate(seeds if step else ()):
            kept = {f"model/{name}": x[number].detach().cpu() for name, x in held.items()}
            write_checkpoint(Checkpoint(kept, {"step": step, "best": math.inf}), self.folders[seed].step_file(step))
        return {}

    def finish(self, seed: int, device: torch.device) -> None:
        """Mark a run as finished, and note its hardware."""
        folder, state = self.folders[seed], vars(Position(step=self.steps, finished=True))
        (folder.path / "ran.json").unlink(missing_ok=True)
        write_what_ran(folder, 0, TrainingResult(self.steps, math.inf, 0, True, "population, tf32"), device, self.steps)
        write_checkpoint(Checkpoint(read_checkpoint(folder.step_file(self.steps)).tensors, state), folder.last)


def digest_without_seed(recipe: Recipe) -> str:
    """Return a digest that is equal for recipes that differ only in their seed."""
    return compute_digest(replace(recipe, training=replace(recipe.training, seed=0)))


def train_recipes(
    task: Task, recipes: Sequence[Recipe], folders: Sequence[RunFolder], vocabulary: Path, device: torch.device
) -> None:
    """Train all runs as one population, resuming if possible. Diverged runs stay unfinished."""
    runs = RecipeSeeds(task, recipes, folders)
    with ExitStack() as locks:
        for seed, folder in runs.folders.items():
            wait_for_lock(folder)
            locks.enter_context(folder.lock())
            folder.claim(runs.recipes[seed].values(), runs.recipes[seed].defaults())
            take_vocabulary(vocabulary, folder.path)
            fitted = asdict(runs.recipes[seed].resolve_model(task))
            write_text(folder.path / "model.json", json.dumps(fitted, indent=1) + "\n")
            write_hashes(folder.path, runs.recipes[seed].data)
        LAUNCHED.clear()
        seeds = list(runs.recipes)
        name = sha256(" ".join(str(folder.path) for folder in runs.folders.values()).encode()).hexdigest()[:12]
        together = folders[0].path.parent / f"as-one-{name}"
        results = train_population(runs, seeds, device=device, folder=together)
        for seed, finite in zip(seeds, results.finite.tolist(), strict=True):
            if finite:
                runs.finish(seed, device)
        for file in together.iterdir():
            file.unlink()
        together.rmdir()


def count_fitting(task: Task, training: TrainConfig, room: int) -> int:
    """Return how many runs fit into one population with `room` positions in one pass, at the widest."""
    if (rows := training.batch_examples) is None:
        return 0
    lengths = np.maximum.reduce(task.get_lengths("train"))
    first = _count_separate(min(rows, int((lengths > LONG).sum())), rows)
    return room // max(rows * _find_ordinary(lengths), first * int(lengths.max()))


def _find_ordinary(lengths: np.ndarray) -> int:
    """Return the greatest length that is not passed separately."""
    return int(lengths[lengths <= LONG].max(initial=0))


def _count_separate(long: int, rows: int) -> int:
    """Return how many examples of a batch are passed separately: a power of two, so that there are few shapes."""
    return min(rows, max(FEW, 1 << (long - 1).bit_length())) if long else 0


def find_room(device: torch.device) -> int:
    """Return the number of positions that a population may have on a device."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return min(MOST_POSITIONS, total // (CARD_PARTS * POSITION_BYTES))
