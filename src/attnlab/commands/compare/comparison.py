"""Train a set of attentions under equal conditions, measure them, and report what differs.

    data       prepared once, for all runs
    grid       if a key has a list: every row at every point with the first seed; validation chooses the best point
    seeds      the chosen point of every row with every seed
    speed      one row after another, when nothing else runs

The results are a function of OUT/ledger.jsonl: the same command resumes and reuses finished runs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnlab.commands.compare.controls import with_controls
from attnlab.commands.compare.cost import Sizes
from attnlab.commands.compare.plan import ComparisonRow, Plan, said
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.commands.compare.speed import TimedRun
from attnlab.config import compute_digest
from attnlab.decoding.evaluation import evaluate_part
from attnlab.experiments.deadline import Deadline
from attnlab.experiments.engine import Measured, Progress, RowReader, complete
from attnlab.experiments.inside import measure_inside
from attnlab.experiments.jobs import Scheduler
from attnlab.experiments.plan import Measure, TrainedRun, Workplace
from attnlab.provenance import name_hardware
from attnlab.tasks import TASKS
from attnlab.tasks.task import Task
from attnlab.training.recipe import Recipe
from attnlab.training.runs import Run


@dataclass(frozen=True)
class ComparisonTerms:
    """Where and how a comparison runs; out None: compared/NAME."""

    on: Scheduler
    out: Path | None = None
    runs: Path = Path("runs")
    controls: bool = True
    note: Callable[[str], None] = lambda line: None
    progress: Progress = lambda done, total, what: None
    command: str = ""
    until: Deadline | None = None


def compare(plan: Plan, terms: ComparisonTerms) -> tuple[ComparisonResults, Path]:
    """Run what the ledger lacks; return the results and their folder."""
    comparison = _Comparison(plan, terms)
    for line in (*comparison.task.notes, *comparison.plan.notes):
        terms.note(line)
    for row in comparison.plan.rows:
        comparison.note_cost(row)
    place = Workplace.at(comparison.out, device=terms.on.device, command=terms.command)
    results = complete(comparison.read_results, place, terms.on, progress=terms.progress, until=terms.until)
    return results, comparison.out


def measure_loss(run: Run, place: Workplace) -> dict[str, Any]:
    """Return the best validation loss, by which a point of the grid is chosen."""
    return {"valid_loss": run.folder.position()["best"]}


def measure_run(run: Run, place: Workplace) -> dict[str, Any]:
    """Return scores, what is inside, and the curve of the validation loss."""
    part = "test" if "test" in run.task.parts else "valid"
    values: dict[str, Any] = evaluate_part(run, part, bootstrap=0)
    values["scores"] = {score["name"]: score["value"] for score in values.pop("text", [])}
    values |= measure_loss(run, place)
    values["curve"] = [[x["step"], x["valid_loss"]] for x in run.folder.metrics() if "valid_loss" in x]
    try:
        values["inside"] = measure_inside(run)
    except ValueError as error:  # an attention that an analysis does not cover: the rest is still useful
        values["inside"] = {"failed": " ".join(str(error).split())}
    return values


LOSS, COMPARED, SPEED = (
    Measure("validation loss", measure_loss), Measure("comparison", measure_run), Measure("speed", measure_loss)
)  # fmt: skip


class _Comparison:
    """A plan with its data, and its results as a function of the ledger."""

    def __init__(self, plan: Plan, terms: ComparisonTerms) -> None:
        self.terms = terms
        first = plan.recipe(plan.rows[0], 0, plan.seeds[0])
        name = plan.name if terms.controls else f"{plan.name}-without-controls"
        self.out = (terms.out or Path("compared") / name).absolute()
        for key, path in (("out", self.out), ("runs", terms.runs)):
            if path.is_file():
                raise ValueError(f"{key}={path} is a file; give a folder")
        self.vocabulary = self.out / "vocabulary" / compute_digest(first.data)
        self.vocabulary.mkdir(parents=True, exist_ok=True)
        self.task: Task = TASKS[first.task].prepare(first.data, self.vocabulary)
        self.sizes = Sizes(self.task)
        self.plan = with_controls(plan, self.sizes.parameters) if terms.controls else plan

    def read_results(self, rows: RowReader) -> ComparisonResults:
        plan, task = self.plan, self.task
        able = [row for row in plan.rows if any(map(self._can_build, self._list_points(row)))]
        if all(row.control for row in able):
            raise ValueError(f"no row can be built: {self.sizes.why_not(self._recipe(plan.rows[0], 0))}")
        trials = self._read_trials(able, rows)
        chosen = {
            row.label: min(losses, key=losses.__getitem__)
            for row in able
            if (losses := {point: loss for (label, point), loss in trials.values.items() if label == row.label})
        }
        seeds = rows.read_plan({
            (row.label, seed): self._plan(self._recipe(row, chosen[row.label], seed), COMPARED)
            for seed in plan.seeds for row in able if row.label in chosen
        })  # fmt: skip
        hardware = name_hardware(torch.device(self.terms.on.device)) if self.terms.on.here else "a Ray cluster"
        finished = [row for row in able if any((row.label, seed) in seeds.values for seed in plan.seeds)]
        speeds = rows.read_plan({
            row.label: self._plan_timing(self._recipe(row, chosen[row.label]), hardware)
            for row in finished
        })  # fmt: skip
        outcomes = tuple(self._make_result(row, chosen, trials, seeds, speeds) for row in plan.rows)
        part = "test" if "test" in task.parts else "valid"
        known: Any = task
        references = (lambda: known.read_references(part)) if task.architecture == "translation" else None
        return ComparisonResults(plan, task.architecture, part, outcomes, references, tuple(seeds.hardware))

    def note_cost(self, row: ComparisonRow) -> None:
        """Print what a row costs, if it can be built."""
        sizes = [self.sizes.of(recipe) for recipe in self._list_points(row)]
        if known := [size for size in sizes if size]:
            cost = "; or ".join(dict.fromkeys(map(str, known)))
            self.terms.note(f"{row.label}: {cost}{f' ({row.says})' if row.says else ''}")

    def _read_trials(self, rows: list[ComparisonRow], reader: RowReader) -> "_Trials":
        """Return the validation loss of each row at each point with the first seed; nan if there is one point only."""
        if len(self.plan.points) == 1:
            return _Trials({(row.label, 0): math.nan for row in rows}, {})
        plan = {
            (row.label, point): self._plan(self._recipe(row, point), LOSS)
            for row in rows
            for point in range(len(self.plan.points))
            if self._can_build(self._recipe(row, point))
        }
        measured = reader.read_plan(plan)
        return _Trials({key: x["valid_loss"] for key, x in measured.values.items()}, measured.failures)

    def _make_result(
        self,
        row: ComparisonRow,
        chosen: Mapping[str, int],
        trials: "_Trials",
        seeds: Measured[tuple[str, int]],
        speeds: Measured[str],
    ) -> RowResult:
        points = range(len(self.plan.points))
        losses = {point: trials.values[row.label, point] for point in points if (row.label, point) in trials.values}
        result = RowResult(row, trials=losses if len(points) > 1 else {})
        reasons = {point: self._explain(row, point, trials) for point in points if point not in losses}
        if row.label not in chosen:
            size = next(filter(None, map(self.sizes.of, self._list_points(row))), None)
            return replace(result, size=size, failed=tuple(dict.fromkeys(filter(None, reasons.values()))))
        point = chosen[row.label]
        values = {seed: seeds.values[row.label, seed] for seed in self.plan.seeds if (row.label, seed) in seeds.values}
        runs = {seed: self._plan(self._recipe(row, point, seed), COMPARED) for seed in self.plan.seeds}
        untried = [f"{said(self.plan.points[other])}: {reason}" for other, reason in reasons.items()]
        failures = [
            f"seed {seed}: {seeds.failures[row.label, seed]}" for seed in runs if (row.label, seed) in seeds.failures
        ]
        slow = [f"speed: {speeds.failures[row.label]}"] if row.label in speeds.failures else []
        return replace(
            result,
            size=self.sizes.of(self._recipe(row, point)),
            point=point,
            found=values,
            runs={seed: str(self.terms.runs / run.trained.name()) for seed, run in runs.items()},
            curves={seed: [(step, loss) for step, loss in found["curve"]] for seed, found in values.items()},
            speed=speeds.values.get(row.label),
            failed=(*untried, *failures, *slow),
        )

    def _explain(self, row: ComparisonRow, point: int, trials: "_Trials") -> str:
        return trials.failures.get((row.label, point)) or self.sizes.why_not(self._recipe(row, point))

    def _can_build(self, recipe: Recipe) -> bool:
        return self.sizes.of(recipe) is not None

    def _list_points(self, row: ComparisonRow) -> list[Recipe]:
        return [self._recipe(row, point) for point in range(len(self.plan.points))]

    def _recipe(self, row: ComparisonRow, point: int, seed: int | None = None) -> Recipe:
        return self.plan.recipe(row, point, self.plan.seeds[0] if seed is None else seed)

    def _plan(self, recipe: Recipe, measure: Measure) -> TrainedRun:
        return TrainedRun(recipe, measure, runs=self.terms.runs.absolute(), vocabulary=self.vocabulary)

    def _plan_timing(self, recipe: Recipe, hardware: str) -> TimedRun:
        return TimedRun(recipe, SPEED, vocabulary=self.vocabulary, hardware=hardware)


@dataclass(frozen=True)
class _Trials:
    """Validation losses by row and point, and why some are missing."""

    values: Mapping[tuple[str, int], float]
    failures: Mapping[tuple[str, int], str]
