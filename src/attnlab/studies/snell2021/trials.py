"""Models of a corpus by role and seed: trained by the ordinary loop, found again, and looked at after so many updates.

    OUT/work/runs/FIELD/vocabulary/                   the task's, made once; a field is a scale, a corpus and its size
    OUT/work/runs/FIELD/SEED/ROLE/                    a run's folder, as attnlab train makes it
    OUT/work/runs/FIELD/SEED/ROLE/trained.json        how many seconds it was trained for
    OUT/work/runs/FIELD/SEED/ROLE/measured.json       its curves, once they are measured

All items share them. The weights kept for measuring are deleted once measured.json is there: those of one run take up
to 2 GB. The ones that other runs are compared with (of A, at its best) stay, and the last and the best of each run.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlab.config import compute_digest, suggest_nearest
from attnlab.experiments import work
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
TRAINED, MEASURED = "trained.json", "measured.json"
NAMES = tuple(corpus.name for corpus in (*CORPORA, SMS))
TOKENS = {"cpu": 8192, "cuda": 65_536}  # of a batch that is measured, unless one text alone has more
DRAW = 1  # the seed by which examples are drawn to be measured

Curves = dict[str, list[float]]  # by name, a value for each checkpoint
Measure = Callable[["Trial", str], Curves]  # of a trial and a role, all of whose checkpoints are kept


def append(curves: Curves, values: Mapping[str, float]) -> None:
    """Go on with every curve that a value is given of."""
    for name, value in values.items():
        curves.setdefault(name, []).append(value)


def asked_for(setting: Setting) -> Sequence[str]:
    """The names of the corpora to run: those that data=a,b says, else all."""
    if "data" not in setting.options:
        return NAMES
    names = setting.options["data"].split(",")
    for name in names:
        if name not in NAMES:
            raise ValueError(
                f"data: no corpus is called {name!r}{suggest_nearest(name, NAMES)}; there are {', '.join(NAMES)}"
            )
    return names


class Field:
    """A corpus at a scale: what the trials of all its seeds share."""

    def __init__(self, corpus: LstmCorpus, setting: Setting) -> None:
        self.corpus, self.setting = corpus, setting
        self.size: ScaleSize = corpus.size(setting.scale)
        self.folder = setting.folder.parent / "runs" / f"{setting.scale}-{corpus.name}-{compute_digest(self.size)}"

    def why_not(self) -> str:
        """The reason why it cannot be run; empty where it can."""
        least, scale = self.corpus.from_scale, self.setting.scale
        if SCALES.index(scale) < SCALES.index(least):
            return f"this row is run from scale {least} on"
        if self.corpus.name not in asked_for(self.setting):
            return f"left out by data={self.setting.options['data']}"
        try:
            self.task  # noqa: B018 (to see whether its data are there)
        except OSError as error:  # not at hand, and cannot be fetched
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
        data = replace(recipe.data, data_dir=self.setting.data_dir)  # type: ignore[type-var]
        return TASKS[recipe.task].prepare(data, self.vocabulary)

    @property
    def vocabulary(self) -> Path:
        return self.folder / "vocabulary"

    @cached_property
    def chosen(self) -> dict[str, list[int]]:
        """The examples that are measured: all of validation, or as many as the scale says, and as many of training."""
        most = min(self.task.count_examples("valid"), self.size.measured or self.task.count_examples("valid"))
        orders = {part: np.random.default_rng(DRAW).permutation(self.task.count_examples(part)) for part in PARTS}
        return {part: np.sort(order[:most]).tolist() for part, order in orders.items()}

    @cached_property
    def texts(self) -> dict[str, tuple[list[str], list[str]]]:
        """Of a translation: source and reference of every example that is measured."""
        task: Any = self.task
        sides = {part: (task.read_sources(part), task.read_references(part)) for part in PARTS}
        return {
            part: ([source[k] for k in self.chosen[part]], [reference[k] for k in self.chosen[part]])
            for part, (source, reference) in sides.items()
        }

    @cached_property
    def batches(self) -> dict[str, list[Batch]]:
        """What is measured, in batches as large as the device likes. Of all means Â alone depends on how they are cut:
        each batch is shuffled by a seed of its own.
        """
        return {part: list(self._batches(part)) for part in PARTS}

    def _batches(self, part: str) -> Iterator[Batch]:
        chosen, device = self.chosen[part], self.setting.device
        lengths = tuple(each[chosen] for each in self.task.get_lengths(part))
        budget = max(TOKENS[device.type], *(int(each.max()) for each in lengths))
        for places in plan_batches(lengths, tokens=budget, examples=None, seed=0, epoch=0, shuffle=False):
            batch = self.task.make_batch(part, [chosen[place] for place in places])
            inputs = tuple(x.to(device) for x in batch.inputs)
            yield replace(batch, inputs=inputs, targets=batch.targets.to(device))


@dataclass(frozen=True)
class Trial:
    """A field with one seed."""

    field: Field
    seed: int

    def recipe(self, role: str) -> Recipe:
        return self.field.corpus.recipe(self.field.setting.scale, role, self.seed)

    def described(self, role: str) -> str:
        return f"{self.field.corpus.row}, seed {self.seed}, {role}"

    def folder(self, role: str) -> RunFolder:
        return RunFolder(self.field.folder / str(self.seed) / role)

    def curves(self, role: str, measure: Measure) -> Curves:
        """The curves of a role: read where they are, else its model is trained and measured."""
        folder = self.folder(role)
        folder.claim(self.recipe(role).values())
        found = self.known(role)
        if found is None:
            self.train(role)
            clock = time.perf_counter()
            found = measure(self, role)
            found |= {"seconds": [self._trained_for(role), time.perf_counter() - clock]}
            write_text(folder.path / MEASURED, json.dumps(found, indent=1) + "\n")
        kept = {folder.step_file(step) for step in self.field.steps if step not in found.get("references", [])}
        for file in (*kept, folder.previous):
            file.unlink(missing_ok=True)
        return found

    def known(self, role: str) -> Curves | None:
        """The curves of a role, where it is measured."""
        file = self.folder(role).path / MEASURED
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def train(self, role: str) -> None:
        """Train a role to its end, from where its folder stands."""
        field, recipe, what = self.field, self.recipe(role), self.described(role)
        task, before, clock = field.task, self._trained_for(role), time.perf_counter()
        folder = self.folder(role).path
        folder.mkdir(parents=True, exist_ok=True)
        self.folder(role).claim(recipe.values())

        def note() -> None:
            write_text(folder / TRAINED, json.dumps({"seconds": before + time.perf_counter() - clock}) + "\n")

        try:
            work.train(
                recipe,
                str(folder),
                str(field.vocabulary),
                str(field.setting.device),
                task=task,
                report=lambda values: field.setting.progress(values["step"], recipe.training.steps, what),
            )
        except KeyboardInterrupt:
            note()
            raise
        note()

    def _trained_for(self, role: str) -> float:
        """Seconds that training took so far, interruptions left out."""
        file = self.folder(role).path / TRAINED
        return json.loads(file.read_text(encoding="utf-8"))["seconds"] if file.exists() else 0.0

    def checkpoints(self, role: str) -> Iterator[tuple[int, Model]]:
        """The model after each number of updates: one object, whose weights change from one to the next."""
        for number, step in enumerate(self.field.steps):
            if number == 0:
                model = self.model(role, step)
            else:
                load_weights(model, self._weights(role, step))
            yield step, model
            self.field.setting.progress(number + 1, len(self.field.steps), f"{self.described(role)}, measured")

    def model(self, role: str, step: int) -> Model:
        """A role after so many updates, in evaluation mode; after none, as its seed makes it."""
        recipe = self.recipe(role)
        config = recipe.resolve_model(self.field.task)
        assert isinstance(config, Config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.training.seed)
            model = build(config)
        if step:
            load_weights(model, self._weights(role, step))
        return model.eval().to(self.field.setting.device)

    def _weights(self, role: str, step: int) -> dict[str, torch.Tensor]:
        return read_checkpoint(self.folder(role).step_file(step)).part("model/")
