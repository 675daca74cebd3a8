"""Train a set of attentions under equal conditions, measure them, and report what differs.

    data       prepared once, for all runs
    grid       if a key has a list: every row at every point with the first seed; validation chooses the best point
    seeds      the chosen point of every row with every seed
    controls   of rows that beat the first one, if only these get some: tried and run like any other row
    speed      one row after another, when nothing else runs

The results are a function of OUT/ledger.jsonl: the same command resumes and reuses finished runs, and `draw` reads a
ledger without running anything.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from attnlab.commands.compare.controls import SOFTMAX, add_controls, control_winners
from attnlab.commands.compare.cost import CostTable, ModelCost
from attnlab.commands.compare.plan import ComparisonRow, Plan, format_settings
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.commands.compare.speed import TimedRun, name_timed_hardware
from attnlab.config import compute_digest
from attnlab.decoding.evaluation import evaluate_part, is_translation
from attnlab.experiments.deadline import Deadline
from attnlab.experiments.engine import Measured, Progress, RowReader, complete
from attnlab.experiments.inside import measure_inside
from attnlab.experiments.jobs import Scheduler
from attnlab.experiments.ledger import Ledger
from attnlab.experiments.plan import Measure, TrainedRun, Workplace
from attnlab.provenance import name_hardware
from attnlab.tasks import find_task
from attnlab.tasks.task import Task
from attnlab.training.recipe import Recipe
from attnlab.training.runs import Run

Controls = Literal["all", "winners", "none"]
SUFFIXES: dict[Controls, str] = {"all": "", "winners": "-with-controls-of-winners", "none": "-without-controls"}


@dataclass(frozen=True)
class ComparisonTerms:
    """Where and how a comparison runs; out None: compared/NAME."""

    on: Scheduler
    out: Path | None = None
    runs: Path = Path("runs")
    controls: Controls = "all"
    note: Callable[[str], None] = lambda line: None
    progress: Progress = lambda done, total, what: None
    command: str = ""
    until: Deadline | None = None
    timed: bool = True  # whether to measure the speed of each row
    population: bool = True  # whether to train runs as one on a GPU


def compare(plan: Plan, terms: ComparisonTerms) -> tuple[ComparisonResults, Path]:
    """Run what the ledger lacks; return the results and their folder. OutOfTimeError near the deadline."""
    comparison = _Comparison(plan, terms)
    place = Workplace.at(comparison.out, device=terms.on.device, command=terms.command, population=terms.population)
    measured = sum(not row.failed for row in place.open_ledger().rows())
    reused = [f"{place.ledger} has {measured} rows already"] if measured else []
    for line in (*comparison.task.notes, *comparison.plan.notes, *comparison.list_costs(), *reused):
        terms.note(line)
    results = complete(comparison.read_results, place, terms.on, progress=terms.progress, until=terms.until)
    return results, comparison.out


def draw(plan: Plan, terms: ComparisonTerms, ledger: Path) -> tuple[ComparisonResults, Path]:
    """Return the results that a ledger has, and the folder for their files. Nothing is trained."""
    comparison = _Comparison(plan, replace(terms, out=terms.out or ledger.parent))
    return comparison.read_results(RowReader(Ledger(ledger), running=False)), comparison.out


def measure_loss(run: Run, place: Workplace) -> dict[str, Any]:
    """Return the best validation loss, by which a point of the grid is chosen."""
    return {"valid_loss": run.folder.position()["best"]}


def measure_run(run: Run, place: Workplace) -> dict[str, Any]:
    """Return scores, what is inside, and the curve of the validation loss."""
    values: dict[str, Any] = evaluate_part(run, choose_part(run.task), bootstrap=0)
    values["scores"] = {score["name"]: score["value"] for score in values.pop("text", [])}
    values["curve"] = [[x["step"], x["valid_loss"]] for x in run.folder.metrics() if "valid_loss" in x]
    return values | measure_loss(run, place) | {"inside": measure_inside(run)}


def choose_part(task: Task) -> str:
    """Return the part that measures quality: test, or validation if there is no test part."""
    return "test" if "test" in task.parts else "valid"


LOSS, COMPARED = Measure("validation loss", measure_loss), Measure("comparison", measure_run)


class _Comparison:
    """A plan with its data, and its results as a function of the ledger."""

    def __init__(self, plan: Plan, terms: ComparisonTerms) -> None:
        self.terms = terms
        first = plan.recipe(plan.rows[0], 0)
        name = plan.name + SUFFIXES[terms.controls]
        self.out, self.runs = (terms.out or Path("compared") / name).absolute(), terms.runs.absolute()
        for key, path in (("out", self.out), ("runs", self.runs)):
            if path.is_file():
                raise ValueError(f"{key}={path} is a file; give a folder")
        self.vocabulary = self.out / "vocabulary" / compute_digest(first.data)
        self.vocabulary.mkdir(parents=True, exist_ok=True)
        self.task: Task = find_task(first.task).prepare(first.data, self.vocabulary)
        self.costs = CostTable(self.task)
        self.plan = add_controls(plan, self.costs.count_parameters) if terms.controls == "all" else plan
        self.points = range(len(self.plan.points))
        if terms.controls == "winners" and plan.rows[0].settings != SOFTMAX:
            raise ValueError(f"--control-winners: the first row must be softmax, got {plan.rows[0].label}")

    def list_costs(self) -> list[str]:
        """Return a line for each row: its cost, or why it cannot be built."""
        lines = []
        for row in self.plan.rows:
            costs = dict.fromkeys(str(cost) for point in self.points if (cost := self._find_cost(row, point)))
            description = f" ({row.description})" if row.description else ""
            reason = "" if costs else f"cannot be built and gets no run: {self.costs.explain(self.plan.recipe(row, 0))}"
            lines.append(f"{row.label}: {'; or '.join(costs) or reason}{description}")
        return lines

    def read_results(self, rows: RowReader) -> ComparisonResults:
        """Return the results that the ledger holds."""
        if self.terms.controls == "winners":
            plain = self._read_plan(self.plan, rows, timed=False)
            plan = control_winners(self.plan, plain.list_winners(), self.costs.count_parameters)
            return self._read_plan(plan, rows, timed=self.terms.timed)
        return self._read_plan(self.plan, rows, timed=self.terms.timed)

    def _read_plan(self, plan: Plan, rows: RowReader, *, timed: bool) -> ComparisonResults:
        """Return the results of all rows of a plan; timed: with their speeds."""
        task = self.task
        usable = [row for row in plan.rows if any(self._find_cost(row, point) for point in self.points)]
        if all(row.is_control for row in usable):
            raise ValueError(f"no row can be built: {self.costs.explain(plan.recipe(plan.rows[0], 0))}")
        trials = self._read_trials(usable, rows)
        chosen = {}
        for row in usable:
            if losses := self._list_losses(row, trials):
                chosen[row.label] = min(losses, key=losses.__getitem__)
        usable = [row for row in usable if row.label in chosen]
        recipes = {
            (row.label, seed): plan.recipe(row, chosen[row.label], seed) for seed in plan.seeds for row in usable
        }
        seeds = rows.read_plan({key: self._plan_run(recipe, COMPARED) for key, recipe in recipes.items()})
        finished = {label: recipes[label, plan.seeds[0]] for label, _ in seeds.values}
        hardware = self._name_hardware(rows)
        timings = {label: TimedRun(x, self.vocabulary, hardware) for label, x in finished.items()} if timed else {}
        speeds = rows.read_plan(timings)
        results = tuple(self._make_result(row, chosen.get(row.label), trials, seeds, speeds) for row in plan.rows)
        part, known = choose_part(task), cast(Any, task)
        references = (lambda: known.read_references(part)) if is_translation(task) else None
        score = task.name_main_score(vars(plan.recipe(plan.rows[0], 0).data))
        return ComparisonResults(plan, score, part, results, references, tuple(seeds.hardware))

    def _read_trials(self, rows: list[ComparisonRow], reader: RowReader) -> Measured[tuple[str, int]]:
        """Return the validation loss of each row at each point with the first seed; nan without a grid."""
        if len(self.points) == 1:
            return Measured({(row.label, 0): {"valid_loss": math.nan} for row in rows})
        pairs = [(row, point) for row in rows for point in self.points if self._find_cost(row, point)]
        plan = {(row.label, point): self._plan_run(self.plan.recipe(row, point), LOSS) for row, point in pairs}
        return reader.read_plan(plan)

    def _list_losses(self, row: ComparisonRow, trials: Measured[tuple[str, int]]) -> dict[int, float]:
        keys = [(row.label, point) for point in self.points]
        return {key[1]: trials.values[key]["valid_loss"] for key in keys if key in trials.values}

    def _make_result(
        self,
        row: ComparisonRow,
        point: int | None,
        trials: Measured[tuple[str, int]],
        seeds: Measured[tuple[str, int]],
        speeds: Measured[str],
    ) -> RowResult:
        """Return the result of one row at its chosen point; None: it failed at every point."""
        plan, label = self.plan, row.label
        losses = self._list_losses(row, trials)
        failed = {p: trials.failures.get((label, p)) or self.costs.explain(plan.recipe(row, p))
                  for p in self.points if p not in losses}  # fmt: skip
        result = RowResult(row, point=point, trials=losses if len(self.points) > 1 else {})
        if point is None:
            cost = next(filter(None, (self._find_cost(row, p) for p in self.points)), None)
            return replace(result, cost=cost, failures=tuple(dict.fromkeys(failed.values())))
        recipes = {seed: plan.recipe(row, point, seed) for seed in plan.seeds}
        failures = [f"{format_settings(plan.points[p])}: {reason}" for p, reason in failed.items()]
        failures += [f"seed {s}: {seeds.failures[label, s]}" for s in recipes if (label, s) in seeds.failures]
        failures += [f"speed: {speeds.failures[label]}"] if label in speeds.failures else []
        return replace(
            result,
            cost=self._find_cost(row, point),
            measured={s: seeds.values[label, s] for s in recipes if (label, s) in seeds.values},
            runs={s: str(self.runs / recipe.name()) for s, recipe in recipes.items()},
            speed=speeds.values.get(label),
            failures=tuple(failures),
        )

    def _find_cost(self, row: ComparisonRow, point: int) -> ModelCost | None:
        return self.costs.find(self.plan.recipe(row, point))

    def _plan_run(self, recipe: Recipe, measure: Measure) -> TrainedRun:
        return TrainedRun(recipe, measure, runs=self.runs, vocabulary=self.vocabulary)

    def _name_hardware(self, rows: RowReader) -> str:
        """Name the machine whose speeds are read: this one, or when nothing runs, the last that the ledger knows."""
        if not rows.running:
            return name_timed_hardware(rows.ledger)
        return name_hardware(torch.device(self.terms.on.device)) if self.terms.on.here else "a Ray cluster"
