"""Planned runs: a role of a corpus with a seed, and how an item reads them.

Roles train independently. A role is compared with A, so it is measured after A. On a GPU, runs that differ only in
their seed train as one population.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from typing import Any

import torch

from attnlab.experiments.engine import NOT_MEASURED, RowReader
from attnlab.experiments.plan import PlannedRun, Workplace, describe_recipe
from attnlab.experiments.recipe_population import count_fitting, digest_without_seed, find_room, train_recipes
from attnlab.experiments.single_run import count_steps, is_finished
from attnlab.experiments.study import Scale, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.studies.snell2021.measures import measure_agreement
from attnlab.studies.snell2021.plan import LstmCorpus, ScaleSize
from attnlab.studies.snell2021.trials import Curves, Field, RoleMeasure, Trial
from attnlab.tasks.task import Task

GOLD = "A"  # the role that others are compared with


@dataclass(frozen=True)
class RoleRun(PlannedRun):
    """One model of a trial, trained and measured at every checkpoint."""

    corpus: LstmCorpus
    scale: Scale
    seed: int
    role: str
    measure: str = "agreement"
    function: RoleMeasure = measure_agreement
    edition: int = 2  # 2: β^px is ranked by its logit

    @property
    def name(self) -> str:
        return f"{self.corpus.row} at {self.scale} scale, seed {self.seed}, {self.role}, {self.measure}"

    @property
    def recipe(self) -> dict[str, Any]:
        trained = describe_recipe(self.corpus.recipe(self.scale, self.role, self.seed))
        return {"corpus": self.corpus.name, "role": self.role, **trained, "measured": asdict(self.size)}

    @property
    def defaults(self) -> Mapping[str, Any]:
        recipe = self.corpus.recipe(self.scale, self.role, self.seed)
        return recipe.defaults() | {"measured": {each.name: each.default for each in fields(self.size)}}

    @property
    def size(self) -> ScaleSize:
        return self.corpus.size(self.scale)

    @property
    def steps(self) -> int:
        return self.corpus.recipe(self.scale, self.role, self.seed).training.steps

    @property
    def needs(self) -> tuple[PlannedRun, ...]:
        return () if self.role == GOLD else (self.gold,)

    @cached_property
    def gold(self) -> "RoleRun":
        """A of the same trial."""
        return RoleRun(self.corpus, self.scale, self.seed, GOLD)

    def trial(self, place: Workplace) -> Trial:
        ledger = place.open_ledger()
        setting = Setting(self.scale, (self.seed,), place, RowReader(ledger, running=False))
        row = None if self.role == GOLD else place.find_row(self.gold)
        return Trial(Field(self.corpus, setting), self.seed, {GOLD: dict(row.values)} if row else {})

    def group(self, place: Workplace) -> str | None:
        """On a GPU, group runs that differ only in their seed, unless the run was started alone or has no room."""
        trial = self.trial(place)
        if place.device == "cpu" or trial.folder(self.role).position() or not self.group_limit(place):
            return None
        return digest_without_seed(trial.recipe(self.role))

    def group_limit(self, place: Workplace) -> int:
        task, training = _prepare_task(self.corpus, self.scale, place), self.trial(place).recipe(self.role).training
        return count_fitting(task, training, find_room(torch.device(place.device)))

    def is_trained(self, place: Workplace) -> bool:
        trial = self.trial(place)
        return is_finished(trial.folder(self.role), trial.recipe(self.role).training.evaluate_at)

    def is_usable(self, place: Workplace) -> bool:
        row = place.find_row(self)
        references = [int(step) for step in row.values.get("references", ()) if step] if row else ()
        return is_finished(self.trial(place).folder(self.role), references)

    def count_steps(self, place: Workplace) -> int:
        folder = self.trial(place).folder(self.role)
        return self.steps if is_finished(folder) else count_steps(folder)

    def train(self, place: Workplace) -> None:
        self.trial(place).train(self.role)

    def train_together(self, others: Sequence[PlannedRun], place: Workplace) -> None:
        runs = [self, *(other for other in others if isinstance(other, RoleRun))]
        trials, clock = [run.trial(place) for run in runs], time.perf_counter()
        folders = [trial.folder(run.role) for trial, run in zip(trials, runs, strict=True)]
        recipes = [trial.recipe(run.role) for trial, run in zip(trials, runs, strict=True)]
        field = trials[0].field
        train_recipes(field.task, recipes, folders, field.vocabulary, field.device)
        seconds = (time.perf_counter() - clock) / len(runs)
        for trial, run, folder in zip(trials, runs, folders, strict=True):
            if is_finished(folder):
                trial.write_seconds(run.role, seconds)

    def take_measure(self, place: Workplace) -> dict[str, Any]:
        trial, clock = self.trial(place), time.perf_counter()
        curves = self.function(trial, self.role)
        return curves | {"seconds": [trial.read_seconds(self.role), time.perf_counter() - clock]}

    def clean(self, place: Workplace) -> None:
        trial, row = self.trial(place), place.open_ledger().find(self.key)
        folder, references = trial.folder(self.role), row.values.get("references", []) if row else []
        for step in trial.field.steps:
            if step not in references:
                folder.step_file(step).unlink(missing_ok=True)
        folder.previous.unlink(missing_ok=True)


@dataclass(frozen=True)
class CorpusRow:
    """A corpus of an item with its trials, one per seed; no trials and the reason if it cannot be run."""

    field: Field
    trials: tuple[Trial, ...]
    reason: str

    def make_cell(self, item: str, column: str, values: Iterable[float], **about: Any) -> Cell:
        """Return a cell with the tags of the corpus, or the reason why there are no values."""
        shared = {"row": self.field.corpus.row, "tags": self.field.tags, "not_run": self.reason}
        return Cell(item=item, column=column, values=tuple(values), **shared | about)


def read_corpora(
    corpora: Iterable[LstmCorpus],
    setting: Setting,
    list_roles: Callable[[ScaleSize], Iterable[str]],
    *,
    measure: str = "agreement",
    function: RoleMeasure = measure_agreement,
) -> list[CorpusRow]:
    """Read the trials of each corpus from the ledger.

    list_roles          the roles besides A that the item reads, by the size of the corpus
    measure, function   what is measured of them
    """
    fields = [Field(corpus, setting) for corpus in corpora]
    reasons = [field.explain_absence() for field in fields]  # also makes vocabularies, before jobs would do it twice
    plan: dict[tuple[str, int, str], RoleRun] = {}
    for field, reason in zip(fields, reasons, strict=True):
        for seed in () if reason else setting.seeds:
            name, scale = field.corpus.name, setting.scale
            plan[name, seed, GOLD] = RoleRun(field.corpus, scale, seed, GOLD)
            for role in list_roles(field.size):
                plan[name, seed, role] = RoleRun(field.corpus, scale, seed, role, measure, function)
    measured = setting.rows.read_plan(plan)
    passing = (
        {key: x for key, x in measured.failures.items() if not measured.rows[key].final} if setting.running else {}
    )
    if passing:
        (name, seed, role), reason = next(iter(passing.items()))
        failed = f"{len(passing)} of {len(plan)} runs failed; run the same command to try them again"
        raise ValueError(f"{name}, seed {seed}, {role}: {reason} ({failed})")
    rows = []
    for field, reason in zip(fields, reasons, strict=True):
        by_seed: dict[int, dict[str, Curves]] = {}
        for name, seed, role in plan:
            if name == field.corpus.name:
                by_seed.setdefault(seed, {})[role] = measured.values.get((name, seed, role), {})
        trials = tuple(Trial(field, seed, curves) for seed, curves in by_seed.items() if all(curves.values()))
        failures = [x for (name, _, _), x in measured.failures.items() if name == field.corpus.name]
        rows.append(CorpusRow(field, trials, reason or ("" if trials else next(iter(failures), NOT_MEASURED))))
    return rows


@cache
def _prepare_task(corpus: LstmCorpus, scale: Scale, place: Workplace) -> Task:
    """Return the task of a corpus, prepared once per process."""
    return Field(corpus, Setting(scale, (), place, RowReader(place.open_ledger(), running=False))).task
