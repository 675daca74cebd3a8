"""Planned runs: rows that a ledger should have, each with the work that measures it.

    plan − ledger = jobs

A TrainedRun trains a recipe with the ordinary loop and measures the finished run. A Calculation is a function of a
seed that trains nothing. studies/ and experiments/ have others, such as the seeds of a population.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnlab.config import FREE_KEYS, compute_digest
from attnlab.experiments.joint_recipes import count_fitting, name_group, train_jointly
from attnlab.experiments.ledger import FILE, Key, Ledger, Row, digest_recipe
from attnlab.experiments.single_run import count_steps, is_finished, train_alone
from attnlab.files.user_files import read_json
from attnlab.tasks import find_task
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import RunFolder
from attnlab.training.runs import Run, choose_device, open_run


@dataclass(frozen=True)
class Workplace:
    """Where planned runs compute, and where they keep what they need to resume."""

    folder: Path  # runs/, vocabulary/ and populations/
    ledger: Path
    device: str = "cpu"
    data_dir: str | None = None
    command: str = ""
    population: bool = True  # whether to train runs as one on a GPU

    @classmethod
    def at(cls, out: Path, **options: Any) -> "Workplace":
        """Return the place of an output folder: OUT/ledger.jsonl and OUT/work."""
        return cls(out.absolute() / "work", out.absolute() / FILE, **options)

    def open_ledger(self) -> Ledger:
        return _open_ledger(self.ledger)

    def find_row(self, run: "PlannedRun") -> Row | None:
        return find_row(self.open_ledger(), run)


@lru_cache
def _open_ledger(path: Path) -> Ledger:
    """Return one object per file and process, which reads only what is new."""
    return Ledger(path)


def find_row(ledger: Ledger, run: "PlannedRun") -> Row | None:
    """Return the row of a planned run, also one from before its recipe had all its keys."""
    key = run.key
    return ledger.find(key) or ledger.find_older(key, run.recipe, run.defaults)


class PlannedRun(ABC):
    """One row to be. Another process can import and do it; called again, it resumes."""

    measure: str
    edition: int
    seed: int | None
    alone: bool = False  # nothing else may run beside it, so that a clock can be trusted

    @property
    @abstractmethod
    def name(self) -> str:
        """A unique name for people."""

    @property
    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """Everything that fixes the values, as JSON, without the seed."""

    @abstractmethod
    def take_measure(self, place: Workplace) -> dict[str, Any]:
        """Return the values, once the run is trained."""

    @property
    def key(self) -> Key:
        return Key(digest_recipe(json.loads(json.dumps(self.recipe))), self.seed, self.measure, self.edition)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults of the recipe's keys, so that a row from before a key was added still counts."""
        return {}

    @property
    def needs(self) -> tuple["PlannedRun", ...]:
        """Runs whose rows must be in the ledger before this one is measured."""
        return ()

    @property
    def steps(self) -> int:
        """Number of updates, to start the longest first and to show progress; 0: nothing is trained."""
        return 0

    def group(self, place: Workplace) -> str | None:
        """Return a name shared by runs that train as one population there, or None."""
        return None

    def group_limit(self, place: Workplace) -> int:
        """Return how many runs of one group there is room for."""
        return 1

    def is_trained(self, place: Workplace) -> bool:
        return True

    def is_usable(self, place: Workplace) -> bool:
        """Return whether runs that need this one find what they read of it beside its row."""
        return self.is_trained(place)

    def count_steps(self, place: Workplace) -> int:
        """Return how many updates are done."""
        return self.steps if self.is_trained(place) else 0

    def train(self, place: Workplace) -> None:  # noqa: B027 (nothing to train by default)
        """Train this run to its end."""

    def train_together(self, others: Sequence["PlannedRun"], place: Workplace) -> None:
        """Train this run and others of its group as one population. A diverged run stays untrained."""
        raise NotImplementedError(f"{self.name} has no population")

    def describe_training(self, place: Workplace) -> dict[str, Any]:
        """Return how it was trained, for its row: "trained": "in a population of 12"."""
        return {}

    def clean(self, place: Workplace) -> None:  # noqa: B027 (nothing to delete by default)
        """Delete what only measuring needed, after the row is written."""


@dataclass(frozen=True)
class Measure:
    """What is measured of a finished run, by a function that another process can import."""

    name: str
    function: Callable[[Run, Workplace], dict[str, Any]]
    edition: int = 1  # raised when it measures something else than before
    clean: bool = False  # it reads the weights that evaluate_at= keeps, which are deleted once the row is written


def describe_recipe(recipe: Recipe, folder: Path | None = None) -> dict[str, Any]:
    """Return every value of a recipe but the seed and where it runs; files below `folder` are named relative to it."""

    def keep(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: keep(x) for key, x in value.items() if key not in FREE_KEYS}
        if isinstance(value, str) and folder is not None and value.startswith(f"{folder}/"):
            return value.removeprefix(f"{folder}/")
        return value

    values: dict[str, Any] = keep(recipe.values())
    return values | {"training": {key: x for key, x in values["training"].items() if key != "seed"}}


class RecipeRun(PlannedRun):
    """A planned run whose model is that of one recipe."""

    trained: Recipe

    @property
    def seed(self) -> int:  # type: ignore[override]
        return self.trained.training.seed

    @property
    def name(self) -> str:
        return f"{self.trained.name()}, {self.measure}"

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.trained.defaults()


@dataclass(frozen=True)
class TrainedRun(RecipeRun):
    """A recipe with its seed, trained by the ordinary loop into work/runs/NAME, and one measure of it."""

    trained: Recipe
    by: Measure
    files: Path | None = None  # a folder of generated text, whose path is not part of the recipe
    runs: Path | None = None  # the folder of runs; by default the place's
    vocabulary: Path | None = None  # made once for all runs of a corpus; by default in the place's folder

    @property
    def measure(self) -> str:  # type: ignore[override]
        return self.by.name

    @property
    def edition(self) -> int:  # type: ignore[override]
        return self.by.edition

    @property
    def recipe(self) -> dict[str, Any]:
        return describe_recipe(self.trained, self.files)

    @property
    def steps(self) -> int:
        return self.trained.training.steps

    def folder(self, place: Workplace) -> RunFolder:
        return RunFolder(((self.runs or place.folder / "runs") / self.trained.name()).absolute())

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """The steps whose weights the measure reads."""
        return self.trained.training.evaluate_at if self.by.clean else ()

    def is_trained(self, place: Workplace) -> bool:
        return is_finished(self.folder(place), self.kept_steps)

    def count_steps(self, place: Workplace) -> int:
        return self.steps if self.is_trained(place) else count_steps(self.folder(place))

    def group(self, place: Workplace) -> str | None:
        """On a GPU, group runs that differ in plain numbers, unless the run was started alone."""
        begun = bool(self.folder(place).position())
        return None if place.device == "cpu" or begun else name_group(self.trained)

    def group_limit(self, place: Workplace) -> int:
        recipe, vocabulary = self.trained, self.vocabulary or prepare_vocabulary(self.trained, place)
        return count_fitting(
            recipe, find_task(recipe.task).prepare(recipe.data, vocabulary), choose_device(place.device)
        )

    def train(self, place: Workplace) -> None:
        vocabulary = self.vocabulary or prepare_vocabulary(self.trained, place)
        train_alone(self.trained, self.folder(place), vocabulary, place.device, kept=self.kept_steps)

    def train_together(self, others: Sequence[PlannedRun], place: Workplace) -> None:
        runs = [self, *(other for other in others if isinstance(other, TrainedRun))]
        if len(runs) == 1:
            return self.train(place)
        recipe, vocabulary = self.trained, self.vocabulary or prepare_vocabulary(self.trained, place)
        task, folders = find_task(recipe.task).prepare(recipe.data, vocabulary), [run.folder(place) for run in runs]
        train_jointly(task, [run.trained for run in runs], folders, vocabulary, choose_device(place.device))

    def take_measure(self, place: Workplace) -> dict[str, Any]:
        return self.by.function(open_run(self.folder(place).path, device=place.device, asked=self.trained), place)

    def describe_training(self, place: Workplace) -> dict[str, Any]:
        file = self.folder(place).path / "ran.json"
        stepper = read_json(file, list)[-1]["stepper"] if file.exists() else ""
        return {"trained": stepper} if "population" in stepper else {}

    def clean(self, place: Workplace) -> None:
        if self.by.clean:
            shutil.rmtree(self.folder(place).path / "steps", ignore_errors=True)
            self.folder(place).previous.unlink(missing_ok=True)


@dataclass(frozen=True)
class Calculation(PlannedRun):
    """A function of a place and a seed that trains nothing, or keeps its own checkpoints in the place's folder."""

    title: str
    settings: Mapping[str, Any] = field(hash=False)  # what fixes the values
    function: Callable[[Workplace, int | None], dict[str, Any]] = field(hash=False)
    seed: int | None = None
    edition: int = 1

    @property
    def measure(self) -> str:  # type: ignore[override]
        return self.title

    @property
    def name(self) -> str:
        return f"{self.title} {self.key.digest}" + ("" if self.seed is None else f", seed {self.seed}")

    @property
    def recipe(self) -> dict[str, Any]:
        return dict(self.settings)

    def take_measure(self, place: Workplace) -> dict[str, Any]:
        return self.function(place, self.seed)


def prepare_vocabulary(recipe: Recipe, place: Workplace) -> Path:
    """Make what a task derives from its data, once for all runs; OSError if the data are not available."""
    folder = (place.folder / "vocabulary" / compute_digest(recipe.data)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    find_task(recipe.task).prepare(recipe.data, folder)
    return folder
