"""Models of a corpus by role and seed, at several numbers of updates.

    OUT/work/runs/FIELD/vocabulary/            made once; a field is a scale, a corpus and its size
    OUT/work/runs/FIELD/SEED/ROLE/             a run folder, as attnlab train makes it
    OUT/work/runs/FIELD/SEED/ROLE/trained.json training time in seconds

All items share the runs. Weights kept for measuring take up to 2 GB per run and are deleted once the run is measured.
The last weights of each run stay, and those of A at its best, with which other runs are compared.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from attnlab.config import compute_digest
from attnlab.experiments.corpora import explain_missing_data, select_names
from attnlab.experiments.run_measures import draw_examples, initialize_model, make_batches
from attnlab.experiments.single_run import train_alone
from attnlab.experiments.study import SCALES, Setting
from attnlab.files import write_text
from attnlab.files.user_files import read_json
from attnlab.models.model import Model
from attnlab.models.presets import Config
from attnlab.studies.snell2021.plan import CORPORA, NO_GLOVE, OFFICIAL, SMS, LstmCorpus, ScaleSize
from attnlab.tasks import find_task
from attnlab.tasks.task import Batch, Task
from attnlab.training.checkpoints import load_weights
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import RunFolder, read_checkpoint

PARTS = ("valid", "train")
TRAINED = "trained.json"
NAMES = tuple(corpus.name for corpus in (*CORPORA, *OFFICIAL, SMS))
TOKENS = {"cpu": 8192, "cuda": 65_536}  # largest number in a measured batch, unless one text has more

Curves = dict[str, list[float]]  # by name, a value for each checkpoint


def extend_curves(curves: Curves, values: Mapping[str, float]) -> None:
    """Append a value to each of these curves."""
    for name, value in values.items():
        curves.setdefault(name, []).append(value)


class Field:
    """A corpus at a scale: what the trials of all its seeds share."""

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
        return explain_missing_data(lambda: self.task) if self.setting.running else ""

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.corpus.tags, *(() if self.corpus.translates else NO_GLOVE), *self.setting.tags)

    @property
    def steps(self) -> tuple[int, ...]:
        assert self.size.measured_at is not None
        return self.size.measured_at

    @cached_property
    def task(self) -> Task:
        recipe = self.corpus.recipe(self.setting.scale, "A", 0)
        data = replace(recipe.data, data_dir=self.setting.place.data_dir)  # type: ignore[type-var]
        return find_task(recipe.task).prepare(data, self.vocabulary)

    @property
    def vocabulary(self) -> Path:
        return self.folder / "vocabulary"

    @cached_property
    def indices(self) -> dict[str, list[int]]:
        """The measured examples by part: at most those of validation that the scale has, and as many of training."""
        limit = min(self.task.count_examples("valid"), self.size.measured or self.task.count_examples("valid"))
        return {part: draw_examples(self.task, part, limit) for part in PARTS}

    @cached_property
    def texts(self) -> dict[str, tuple[list[str], list[str]]]:
        """Source and reference of every measured example of a translation."""
        task: Any = self.task
        sides = {part: (task.read_sources(part), task.read_references(part)) for part in PARTS}
        return {
            part: ([source[k] for k in self.indices[part]], [reference[k] for k in self.indices[part]])
            for part, (source, reference) in sides.items()
        }

    @cached_property
    def batches(self) -> dict[str, list[Batch]]:
        """Measured examples in batches that suit the device. Only Â depends on how they are split."""
        tokens, device = TOKENS[self.device.type], self.device
        return {part: list(make_batches(self.task, part, self.indices[part], tokens, device)) for part in PARTS}


@dataclass(frozen=True)
class Trial:
    """A field with one seed, and the curves of its measured roles."""

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
        folder.claim(recipe.values(), recipe.defaults())
        try:
            field, kept = self.field, recipe.training.evaluate_at
            train_alone(recipe, folder, field.vocabulary, str(field.device), kept=kept, task=field.task)
        finally:
            self.write_seconds(role, before + time.perf_counter() - clock)

    def read_seconds(self, role: str) -> float:
        """Return the training time so far in seconds, without interruptions."""
        file = self.folder(role).path / TRAINED
        seconds: float = read_json(file)["seconds"] if file.exists() else 0.0
        return seconds

    def write_seconds(self, role: str, seconds: float) -> None:
        write_text(self.folder(role).path / TRAINED, json.dumps({"seconds": seconds}) + "\n")

    def iterate_checkpoints(self, role: str) -> Iterator[tuple[int, Model]]:
        """Yield a role after each measured number of updates: one model, whose weights change."""
        for number, step in enumerate(self.field.steps):
            if number == 0:
                model = self.load_model(role, step)
            else:
                load_weights(model, self._read_weights(role, step))
            yield step, model

    def load_model(self, role: str, step: int) -> Model:
        """Return a role after this many updates, in evaluation mode; after 0, with its random initialization."""
        recipe = self.recipe(role)
        config = recipe.resolve_model(self.field.task)
        assert isinstance(config, Config)
        model: Any = initialize_model(config, recipe.training.seed)
        if step:
            load_weights(model, self._read_weights(role, step))
        loaded: Model = model.to(self.field.device)
        return loaded

    def _read_weights(self, role: str, step: int) -> dict[str, torch.Tensor]:
        return read_checkpoint(self.folder(role).step_file(step)).part("model/")


RoleMeasure = Callable[[Trial, str], Curves]  # of a trial and a role whose checkpoints are all kept
