"""Train a set of attentions under equal conditions, measure them, and say what differs.

    data       prepared once, for all runs
    grid       where a key has a list: every row at every point, with the first seed; the best on validation is chosen
    seeds      the chosen point of every row with every seed, each trained and measured as a job of its own
    speed      one row after another, when nothing else of it runs

Everything that is finished is found again, so the same command goes on after an interruption.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnlab.commands.compare.controls import with_controls
from attnlab.commands.compare.cost import Sizes
from attnlab.commands.compare.plan import ComparisonRow, Plan, said
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.config import compute_digest
from attnlab.experiments import work
from attnlab.experiments.schedulers import Job, Scheduler
from attnlab.provenance import collect_provenance
from attnlab.tasks import TASKS
from attnlab.tasks.task import Task
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import RunFolder

Note = Callable[[str], None]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ComparisonTerms:
    """Where and how a comparison runs; out None: compared/NAME."""

    on: Scheduler
    out: Path | None = None
    runs: Path = Path("runs")
    controls: bool = True
    note: Note = lambda line: None
    progress: Progress = lambda done, total, what: None


def compare(plan: Plan, terms: ComparisonTerms) -> tuple[ComparisonResults, Path]:
    """Run what is not there yet; what came out, and the folder that is for it."""
    return _Comparing(plan, terms).results()


class _Comparing:
    def __init__(self, plan: Plan, terms: ComparisonTerms) -> None:
        self.terms = terms
        first = plan.recipe(plan.rows[0], 0, plan.seeds[0])
        name = plan.name if terms.controls else f"{plan.name}-without-controls"
        self.out = (terms.out or Path("compared") / name).absolute()
        for key, path in (("out", self.out), ("runs", terms.runs)):
            if path.is_file():
                raise ValueError(f"{key}={path} is a file; give a folder, or none")
        self.vocabulary = self.out / "vocabulary" / compute_digest(first.data)
        self.vocabulary.mkdir(parents=True, exist_ok=True)
        self.task: Task = TASKS[first.task].prepare(first.data, self.vocabulary)
        self.sizes = Sizes(self.task)
        self.plan = with_controls(plan, self.sizes.parameters) if terms.controls else plan
        self.failed: dict[str, str] = {}  # the reason, by the name of the run

    def results(self) -> tuple[ComparisonResults, Path]:
        plan, task = self.plan, self.task
        for line in (*task.notes, *plan.notes):
            self.terms.note(line)
        able = [row for row in plan.rows if self._can_be_built(row)]
        if all(row.control for row in able):
            raise ValueError(f"no row can be built: {self.sizes.why_not(self._recipe(plan.rows[0], 0))}")
        trials = self._trials(able)
        chosen = {row.label: min(found, key=found.__getitem__) for row in able if (found := trials[row.label])}
        self._seeds([row for row in able if row.label in chosen], chosen)
        ready = [row for row in able if row.label in chosen and self._finished(row, chosen[row.label])]
        speeds = self._speeds(ready, chosen)
        outcomes = tuple(self._outcome(row, chosen, trials, speeds) for row in plan.rows)
        part = "test" if "test" in task.parts else "valid"
        known: Any = task
        references = (lambda: known.read_references(part)) if task.architecture == "translation" else None
        return ComparisonResults(plan, task.architecture, part, outcomes, references), self.out

    def _can_be_built(self, row: ComparisonRow) -> bool:
        """Whether some point of the grid can; what it costs is told."""
        made = [self.sizes.of(self._recipe(row, point)) for point in range(len(self.plan.points))]
        known = [size for size in made if size]
        if known:
            cost = "; or ".join(dict.fromkeys(map(str, known)))
            self.terms.note(f"{row.label}: {cost}{f' ({row.says})' if row.says else ''}")
        return bool(known)

    def _trials(self, rows: Iterable[ComparisonRow]) -> dict[str, dict[int, float]]:
        """The validation loss of each row at each point with the first seed; of one point alone, nothing is to do."""
        plan, rows = self.plan, list(rows)
        if len(plan.points) == 1:
            return {row.label: {0: math.nan} for row in rows}
        pairs = [(row, point) for row in rows for point in range(len(plan.points))]
        self._run(work.train, [self._recipe(row, point) for row, point in pairs], f"grid of {len(plan.points)}")
        found: dict[str, dict[int, float]] = {row.label: {} for row in rows}
        for row, point in pairs:
            folder = self._folder(self._recipe(row, point))
            if work.finished(folder):
                found[row.label][point] = folder.position()["best"]
        return found

    def _seeds(self, rows: Iterable[ComparisonRow], chosen: Mapping[str, int]) -> None:
        recipes = [self._recipe(row, chosen[row.label], seed) for seed in self.plan.seeds for row in rows]
        self._run(work.train_and_measure, recipes, f"{len(self.plan.seeds)} seeds")

    def _speeds(self, rows: Iterable[ComparisonRow], chosen: Mapping[str, int]) -> dict[str, Any]:
        """Of each row, timed alone; what another machine took is timed again where all jobs run on this one."""
        recipes = {row.label: self._recipe(row, chosen[row.label]) for row in rows}
        files = {label: self.out / "speed" / f"{recipe.name()}.json" for label, recipe in recipes.items()}
        here = collect_provenance(torch.device(self.terms.on.device))["hardware"] if self.terms.on.here else None
        jobs = {}
        for label, recipe in recipes.items():
            if not work.timed(files[label], here):
                arguments = (recipe, str(files[label]), str(self.vocabulary), self.terms.on.device)
                jobs[recipe.name()] = Job(recipe.name(), work.time_training, arguments)

        def watch() -> None:
            done = sum(work.timed(file, here) is not None for file in files.values())
            self.terms.progress(done, len(files), "speed, one after another")

        failed = self.terms.on.run(list(jobs.values()), alone=True, watch=watch)
        self.failed |= {name: f"speed: {reason}" for name, reason in failed.items()}
        return {label: work.timed(file, here) for label, file in files.items()}

    def _run(self, function: Callable[..., None], recipes: Iterable[Recipe], what: str) -> None:
        """Jobs for the recipes whose runs are not finished, or not measured; each run once."""
        each = {recipe.name(): recipe for recipe in recipes}
        jobs = []
        for name, recipe in each.items():
            folder = self._folder(recipe)
            if work.finished(folder) and (function is work.train or work.measured(folder.path)):
                continue
            arguments = (recipe, str(folder.path), str(self.vocabulary), self.terms.on.device)
            jobs.append(Job(name, function, arguments))
        if len(jobs) < len(each):
            self.terms.note(f"{what}: {len(each) - len(jobs)} of {len(each)} runs are there already")
        total = sum(recipe.training.steps for recipe in each.values())

        def watch() -> None:
            steps = sum(_step(self._folder(recipe), recipe) for recipe in each.values())
            self.terms.progress(steps, total, f"{what}, {len(each)} runs")

        self.failed |= self.terms.on.run(jobs, watch=watch)

    def _outcome(
        self, row: ComparisonRow, chosen: Mapping[str, int], trials: Mapping[str, Any], speeds: Mapping[str, Any]
    ) -> RowResult:
        made = RowResult(row, trials=trials.get(row.label, {}) if len(self.plan.points) > 1 else {})
        if row.label not in chosen:
            reasons = [self._why(self._recipe(row, point)) for point in range(len(self.plan.points))]
            sizes = [self.sizes.of(self._recipe(row, point)) for point in range(len(self.plan.points))]
            size = next(filter(None, sizes), None)
            return replace(made, size=size, failed=tuple(dict.fromkeys(filter(None, reasons))))
        point = chosen[row.label]
        missing = [other for other in range(len(self.plan.points)) if other not in trials[row.label]]
        untried = [f"{said(self.plan.points[k])}: {self._why(self._recipe(row, k))}" for k in missing]
        recipes = {seed: self._recipe(row, point, seed) for seed in self.plan.seeds}
        folders = {seed: self._folder(recipe) for seed, recipe in recipes.items()}
        found = {seed: known for seed, folder in folders.items() if (known := work.measured(folder.path))}
        whys = {seed: self._why(recipe) for seed, recipe in recipes.items()}
        return replace(
            made,
            size=self.sizes.of(recipes[self.plan.seeds[0]]),
            point=point,
            found=found,
            runs={seed: str(folder.path) for seed, folder in folders.items()},
            curves={seed: _curve(folders[seed]) for seed in found},
            speed=speeds.get(row.label),
            failed=(*untried, *(f"seed {seed}: {why}" for seed, why in whys.items() if why)),
        )

    def _why(self, recipe: Recipe) -> str:
        return self.failed.get(recipe.name()) or self.sizes.why_not(recipe)

    def _finished(self, row: ComparisonRow, point: int) -> bool:
        """Whether some seed got to its end."""
        return any(work.finished(self._folder(self._recipe(row, point, seed))) for seed in self.plan.seeds)

    def _recipe(self, row: ComparisonRow, point: int, seed: int | None = None) -> Recipe:
        return self.plan.recipe(row, point, self.plan.seeds[0] if seed is None else seed)

    def _folder(self, recipe: Recipe) -> RunFolder:
        return RunFolder((self.terms.runs / recipe.name()).absolute())


def _step(folder: RunFolder, recipe: Recipe) -> int:
    """How far a run is, by the last line of its metrics."""
    if work.finished(folder):
        return recipe.training.steps
    try:
        with open(folder.metrics_file, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            return json.loads(file.read().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError, KeyError):  # not begun, or a line half written
        return 0


def _curve(folder: RunFolder) -> list[tuple[int, float]]:
    return [(line["step"], line["valid_loss"]) for line in folder.metrics() if "valid_loss" in line]
