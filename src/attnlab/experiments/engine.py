"""The one engine for everything that trains several models: plan − ledger = jobs.

    complete(function, place, on)     call a function of the ledger; if it misses rows, run their jobs and call it again

A function asks its RowReader for planned runs. What depends on earlier results, such as the best learning rate of a
search, is planned when those are there. Runs of one group train as one population where there is room. A run that is in
the ledger is never run again. A run that failed is tried once more by the next command, unless its failure is final (a
loss that is not finite).
"""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import torch

from attnlab.experiments.deadline import LEAST_S, Deadline, OutOfTimeError
from attnlab.experiments.jobs import Job, Scheduler
from attnlab.experiments.ledger import Key, Ledger, Row
from attnlab.experiments.plan import PlannedRun, Workplace, find_row
from attnlab.provenance import collect_provenance
from attnlab.training.loop import NotFiniteError

NOT_MEASURED = "not in the ledger"
Progress = Callable[[int, int, str], None]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class MissingRunsError(Exception):
    """Rows that a function of the ledger needs and that are not there yet."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        super().__init__(f"{len(runs)} planned runs are not measured yet")
        self.runs = runs


@dataclass(frozen=True)
class Measured(Generic[K]):
    """What the ledger has of a plan: the values of each run, or why there are none."""

    values: Mapping[K, dict[str, Any]] = field(default_factory=dict)
    failures: Mapping[K, str] = field(default_factory=dict)
    rows: Mapping[K, Row] = field(default_factory=dict)

    @property
    def hardware(self) -> list[str]:
        """Devices with their torch, each once."""
        origins = [row.provenance for row in self.rows.values()]
        return sorted({f"{about['hardware']}, torch {about['torch']}" for about in origins if "hardware" in about})


class RowReader:
    """Rows by plan. When it may run jobs, missing rows raise MissingRunsError; else they count as failures."""

    def __init__(self, ledger: Ledger, *, running: bool, again: bool = False) -> None:
        """again: ignore what the ledger holds now, so that everything asked for is run once more."""
        self.ledger, self.running = ledger, running
        self.attempted: set[Key] = set()
        self.ignored = {row.key for row in ledger.rows()} if again else set()
        self.failures: dict[str, str] = {}  # of all runs asked for, by name

    def read_plan(self, plan: Mapping[K, PlannedRun]) -> Measured[K]:
        missing = [run for run in plan.values() if self.running and self.is_missing(run)]
        if missing:
            raise MissingRunsError(missing)
        rows = {key: find_row(self.ledger, run) for key, run in plan.items()}
        known = {key: row for key, row in rows.items() if row is not None}
        values = {key: dict(row.values) for key, row in known.items() if not row.failed}
        failures = {key: _explain(row) for key, row in rows.items() if key not in values}
        self.failures |= {plan[key].name: reason for key, reason in failures.items()}
        return Measured(values, failures, known)

    def has_any(self, runs: Iterable[PlannedRun]) -> bool:
        return any(find_row(self.ledger, run) for run in runs)

    def is_missing(self, run: PlannedRun) -> bool:
        """Return whether a run must still be measured by this command."""
        if run.key in self.attempted:
            return False
        row = find_row(self.ledger, run)
        return row is None or row.key in self.ignored or bool(row.failed and not row.final)


def complete(
    function: Callable[[RowReader], T],
    place: Workplace,
    on: Scheduler,
    *,
    reader: RowReader | None = None,
    progress: Progress = lambda done, total, what: None,
    until: Deadline | None = None,
) -> T:
    """Return function(rows) once the ledger has every row it asks for. OutOfTimeError near the deadline.

    reader   one for all functions of a command: what it has attempted is not attempted again
    """
    reader = reader or RowReader(place.open_ledger(), running=True)
    while True:
        try:
            return function(reader)
        except MissingRunsError as missing:
            run_plan(missing.runs, place, on, progress=progress, until=until)
            reader.attempted |= {run.key for run in missing.runs}


def gather(rows: RowReader, functions: Sequence[Callable[[RowReader], Any]]) -> list[Any]:
    """Return function(rows) of each; what several of them miss is asked for at once, so that it runs side by side."""
    results: list[Any] = []
    missing: list[PlannedRun] = []
    for function in functions:
        try:
            results.append(function(rows))
        except MissingRunsError as error:
            missing += error.runs
    if missing:
        raise MissingRunsError(missing)
    return results


def run_plan(
    plan: Iterable[PlannedRun], place: Workplace, on: Scheduler, *, progress: Progress, until: Deadline | None = None
) -> None:
    """Train and measure these runs. Each leaves a row in the ledger, with its values or the reason why it failed."""
    runs, ledger = list({run.key: run for run in plan}.values()), place.open_ledger()
    for some, alone in (([run for run in runs if not run.alone], False), ([run for run in runs if run.alone], True)):
        if some:
            jobs = make_jobs(some, place)

            def watch(some: Sequence[PlannedRun] = some) -> None:
                _show_progress(some, place, ledger, progress)

            try:
                failed = on.run(jobs, alone=alone, watch=watch, until=until)
            except OutOfTimeError as error:
                _note_failures(jobs, error.failed, place)
                rows = [ledger.find(run.key) for run in runs]
                left = sum(row is None or bool(row.failed and not row.final) for row in rows)
                raise OutOfTimeError(f"{left} of {len(runs)} runs are left") from None
            _note_failures(jobs, failed, place)


def make_jobs(runs: Sequence[PlannedRun], place: Workplace) -> list[Job]:
    """Return the jobs of these runs: measuring first, which frees disk space, then what others need, then the longest.

    A run that trains alone and needs no other run is trained and measured by one job.
    """
    names = {run.key: run.name for run in runs}
    training: dict[Key, str] = {}
    trained: list[Job] = []
    for group in _group_runs([run for run in runs if not run.is_trained(place)], place):
        first = group[0]
        if _name_group(first, place) is None and all(need.key not in names for need in first.needs):
            continue
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        trained.append(Job(f"{group[0].name}{more}, training", train_runs, (group, place)))
        training |= {run.key: trained[-1].name for run in group}
    restored, seconds = _restore_needs(runs, place), _list_seconds(place)
    needed = {need.key for run in runs for need in run.needs}
    trained.sort(key=lambda job: (all(run.key not in needed for run in job.arguments[0]), -job.arguments[0][0].steps))
    measured = []
    for run in sorted(runs, key=lambda run: -run.steps):
        before = [training[run.key]] if run.key in training else []
        before += [names[need.key] for need in run.needs if need.key in names]
        before += [restored[need.key].name for need in run.needs if need.key in restored]
        least = seconds.get(run.measure, 0.0) if run.is_trained(place) else 0.0  # measuring has no checkpoint
        measured.append(Job(run.name, measure_run, (run, place), tuple(before), max(LEAST_S, least)))
    return [*measured, *restored.values(), *trained]


def train_runs(runs: Sequence[PlannedRun], place: Workplace) -> None:
    """A job: train these runs, several as one population. A diverged run is left for measure_run."""
    if len(runs) == 1 and _name_group(runs[0], place) is None:
        runs[0].train(place)
    else:
        runs[0].train_together(runs[1:], place)


def restore_run(run: PlannedRun, place: Workplace) -> None:
    """A job: train a run whose row is in the ledger once more, because others need its weights."""
    run.train(place)
    run.clean(place)


def measure_run(run: PlannedRun, place: Workplace) -> None:
    """A job: measure a run, trained before if necessary, and append its row."""
    ledger, began, clock = place.open_ledger(), datetime.now(UTC), time.perf_counter()
    about: dict[str, Any] = {"command": place.command, "began": began.isoformat(timespec="seconds")}
    row: dict[str, Any] = {"recipe": run.recipe, "seed": run.seed, "measure": run.measure, "edition": run.edition}
    try:
        if not run.is_trained(place):
            run.train(place)
        row["values"] = run.take_measure(place)
    except NotFiniteError as error:
        row |= {"failed": " ".join(str(error).split()), "final": True}
    about |= collect_provenance(torch.device(place.device)) | run.describe_training(place)
    ledger.append(Row(**row, wall_s=round(time.perf_counter() - clock, 1), provenance=about))
    if not row.get("failed"):
        run.clean(place)


def _restore_needs(runs: Sequence[PlannedRun], place: Workplace) -> dict[Key, Job]:
    """Return the jobs that train needed runs once more, because only their rows are left, by key."""
    planned, ledger, jobs = {run.key for run in runs}, place.open_ledger(), dict[Key, Job]()
    for run in runs:
        for need in [need for need in run.needs if need.key not in planned]:
            if find_row(ledger, need) is None:
                raise ValueError(f"{run.name} needs {need.name}, which is neither planned nor in the ledger")
            if need.key not in jobs and not need.is_usable(place):
                jobs[need.key] = Job(f"{need.name}, training again", restore_run, (need, place))
    return jobs


def _list_seconds(place: Workplace) -> dict[str, float]:
    """Return the longest time that each measure has taken so far."""
    seconds: dict[str, float] = {}
    for row in place.open_ledger().rows():
        seconds[row.measure] = max(seconds.get(row.measure, 0.0), row.wall_s)
    return seconds


def _group_runs(runs: Sequence[PlannedRun], place: Workplace) -> list[tuple[PlannedRun, ...]]:
    """Split runs into populations, each as large as there is room for, and single runs."""
    groups: list[tuple[PlannedRun, ...]] = []
    by_group: dict[str, list[PlannedRun]] = {}
    for run in runs:
        group = _name_group(run, place)
        if group is None:
            groups.append((run,))
        else:
            by_group.setdefault(group, []).append(run)
    for members in by_group.values():
        limit = max(1, members[0].group_limit(place))
        groups += [tuple(members[start : start + limit]) for start in range(0, len(members), limit)]
    return groups


def _name_group(run: PlannedRun, place: Workplace) -> str | None:
    return run.group(place) if place.population else None


def _note_failures(jobs: Sequence[Job], failed: Mapping[str, str], place: Workplace) -> None:
    """Append a row for every run whose job failed, unless it was measured before."""
    ledger = place.open_ledger()
    about = {"command": place.command, "began": datetime.now(UTC).isoformat(timespec="seconds")}
    causes = {run.key: failed[job.name] for job in jobs if job.function is train_runs and job.name in failed
              for run in job.arguments[0]}  # fmt: skip
    for job in jobs:
        if job.function is measure_run and job.name in failed:
            run: PlannedRun = job.arguments[0]
            if (row := ledger.find(run.key)) is None or row.failed:
                what: dict[str, Any] = {"measure": run.measure, "edition": run.edition, "provenance": about}
                reason = causes.get(run.key, failed[job.name])
                ledger.append(Row(recipe=run.recipe, seed=run.seed, failed=reason, **what))


def _show_progress(runs: Sequence[PlannedRun], place: Workplace, ledger: Ledger, progress: Progress) -> None:
    done = sum(ledger.find(run.key) is not None for run in runs)
    steps, total = sum(run.count_steps(place) for run in runs), sum(run.steps for run in runs)
    progress(steps if total else done, total or len(runs), f"{done} of {len(runs)} runs measured")


def _explain(row: Row | None) -> str:
    return NOT_MEASURED if row is None else row.failed
