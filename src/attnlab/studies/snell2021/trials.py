"""Models of a corpus by role and seed, read after chosen numbers of updates.

    OUT/work/runs/FIELD/vocabulary/            made once; a field is a scale, a corpus and its size
    OUT/work/runs/FIELD/SEED/ROLE/             a run folder, as attnlab train makes it
    OUT/work/runs/FIELD/SEED/ROLE/trained.json how many seconds it was trained for

All items share the runs. Weights kept for measuring take up to 2 GB per run and are deleted once it is measured. Those
that other runs are compared with (A at its best) stay, and the last weights of each run.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlab.config import compute_digest
from attnlab.experiments.corpora import select_names
from attnlab.experiments.single_run import train_alone
from attnlab.experiments.study import SCALES, Setting
from attnlab.files import write_text
from attnlab.models.model import Model
from attnlab.models.presets import Config, build
from attnlab.studies.snell2021.plan import CORPORA, SMS, LstmCorpus, ScaleSize
from attnlab.tasks import TASKS
from attnlab.tasks.batching import plan_batches
from attnlab.tasks.task import Batch, Task
from attnlab.training.checkpoints import load_weights
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import RunFolder, read_checkpoint

PARTS = ("valid", "train")
TRAINED = "trained.json"
NAMES = tuple(corpus.name for corpus in (*CORPORA, SMS))
TOKENS = {"cpu": 8192, "cuda": 65_536}  # of a measured batch, unless one text has more
DRAW = 1  # the seed that draws the measured examples

Curves = dict[str, list[float]]  # by name, a value for each checkpoint


def extend_curves(curves: Curves, values: Mapping[str, float]) -> None:
    """Append a value to each of these curves."""
    for name, value in values.items():
        curves.setdefault(name, []).append(value)


class Field:
    """A corpus at a scale, with what the trials of all its seeds share."""

    def __init__(self, corpus: LstmCorpus, setting: Setting) -> None:
        self.corpus, self.setting = corpus, setting
        self.size: ScaleSize = corpus.size(setting.scale)
        self.folder = setting.folder / "runs" / f"{setting.scale}-{corpus.name}-{compute_digest(self.size)}"

    @property
    def device(self) -> torch.device:
        return torch.device(self.setting.place.device)

    def explain_absence(self) -> str:
        """Return why it cannot be run, or an empty text."""
        least, scale = self.corpus.from_scale, self.setting.scale
        if SCALES.index(scale) < SCALES.index(least):
            return f"this row runs from scale {least} on"
        if self.corpus.name not in select_names(self.setting, "data", NAMES):
            return f"excluded by data={self.setting.options['data']}"
        if not self.setting.running:
            return ""
        try:
            self.task  # noqa: B018 (to see whether its data are there)
        except OSError as error:  # neither available nor to be fetched
            return " ".join(str(error).split())
        return ""

    @property
    def tags(self) -> tuple[str, ...]:
        return self.corpus.tags if self.setting.scale == "full" else (*self.corpus.tags, "smaller scale")

    @property
    def steps(self) -> tuple[int, ...]:
        assert self.size.measured_at is not None
        return self.size.measured_at

    @cached_property
    def task(self) -> Task:
        recipe = self.corpus.recipe(self.setting.scale, "A", 0)
        data = replace(recipe.data, data_dir=self.setting.place.data_dir)  # type: ignore[type-var]
        return TASKS[recipe.task].prepare(data, self.vocabulary)

    @property
    def vocabulary(self) -> Path:
        return self.folder / "vocabulary"

    @cached_property
    def chosen(self) -> dict[str, list[int]]:
        """The examples that are measured, by part: as many of validation as the scale has, and as many of training."""
        most = min(self.task.count_examples("valid"), self.size.measured or self.task.count_examples("valid"))
        orders = {part: np.random.default_rng(DRAW).permutation(self.task.count_examples(part)) for part in PARTS}
        return {part: np.sort(order[:most]).tolist() for part, order in orders.items()}

    @cached_property
    def texts(self) -> dict[str, tuple[list[str], list[str]]]:
        """Source and reference of every measured example of a translation."""
        task: Any = self.task
        sides = {part: (task.read_sources(part), task.read_references(part)) for part in PARTS}
        return {
            part: ([source[k] for k in self.chosen[part]], [reference[k] for k in self.chosen[part]])
            for part, (source, reference) in sides.items()
        }

    @cached_property
    def batches(self) -> dict[str, list[Batch]]:
        """Measured examples in batches that suit the device. Only Â depends on how they are split."""
        return {part: list(self._make_batches(part)) for part in PARTS}

    def _make_batches(self, part: str) -> Iterator[Batch]:
        chosen, device = self.chosen[part], self.device
        lengths = tuple(each[chosen] for each in self.task.get_lengths(part))
        budget = max(TOKENS[device.type], *(int(each.max()) for each in lengths))
        for places in plan_batches(lengths, tokens=budget, examples=None, seed=0, epoch=0, shuffle=False):
            batch = self.task.make_batch(part, [chosen[place] for place in places])
            inputs = tuple(x.to(device) for x in batch.inputs)
            yield replace(batch, inputs=inputs, targets=batch.targets.to(device))


@dataclass(frozen=True)
class Trial:
    """A field with one seed, and the curves of its roles that are measured."""

    field: Field
    seed: int
    curves: Mapping[str, Curves] = dataclasses.field(default_factory=dict, hash=False)

    def recipe(self, role: str) -> Recipe:
        return self.field.corpus.recipe(self.field.setting.scale, role, self.seed)

    def folder(self, role: str) -> RunFolder:
        return RunFolder(self.field.folder / str(self.seed) / role)

    def train(self, role: str) -> None:
        """Train a role to its end, resuming if possible."""
        before, clock = self.read_seconds(role), time.perf_counter()
        folder, recipe = self.folder(role), self.recipe(role)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.claim(recipe.values())
        try:
            field, kept = self.field, recipe.training.evaluate_at
            train_alone(recipe, folder, field.vocabulary, str(field.device), kept=kept, task=field.task)
        finally:
            self.write_seconds(role, before + time.perf_counter() - clock)

    def read_seconds(self, role: str) -> float:
        """Return how many seconds training took so far, without interruptions."""
        file = self.folder(role).path / TRAINED
        seconds: float = json.loads(file.read_text(encoding="utf-8"))["seconds"] if file.exists() else 0.0
        return seconds

    def write_seconds(self, role: str, seconds: float) -> None:
        write_text(self.folder(role).path / TRAINED, json.dumps({"seconds": seconds}) + "\n")

    def iterate_checkpoints(self, role: str) -> Iterator[tuple[int, Model]]:
        """Yield the model after each number of updates: one object, whose weights change."""
        for number, step in enumerate(self.field.steps):
            if number == 0:
                model = self.load_model(role, step)
            else:
                load_weights(model, self._read_weights(role, step))
            yield step, model

    def load_model(self, role: str, step: int) -> Model:
        """Return a role after this many updates, in evaluation mode; after 0, as its seed initializes it."""
        recipe = self.recipe(role)
        config = recipe.resolve_model(self.field.task)
        assert isinstance(config, Config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.training.seed)
            model = build(config)
        if step:
            load_weights(model, self._read_weights(role, step))
        return model.eval().to(self.field.device)

    def _read_weights(self, role: str, step: int) -> dict[str, torch.Tensor]:
        return read_checkpoint(self.folder(role).step_file(step)).part("model/")


RoleMeasure = Callable[[Trial, str], Curves]  # of a trial and a role, all of whose checkpoints are kept
