"""The models that an item reads, of all its corpora and seeds at once, where there is a scheduler for them.

The roles of a trial do not need each other to be trained, but to be measured they need A, with which they are compared.
What can be measured goes before what is to be trained, since a run's weights are deleted once it is measured; then A;
then what takes longest, so that at the end no long one runs alone. On a GPU runs that differ in their seed alone are
trained as one, as many as there is room for, be it one. Without a scheduler nothing is done: models are made one after
another, when they are read.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from attnlab.experiments.schedulers import Job, Scheduler
from attnlab.experiments.study import Scale, Setting
from attnlab.experiments.work import finished
from attnlab.files import write_text
from attnlab.studies.snell2021.grown import alike, how_many, room_on, train_as_one
from attnlab.studies.snell2021.measures import measure as measure_by_tables
from attnlab.studies.snell2021.plan import LstmCorpus, ScaleSize
from attnlab.studies.snell2021.trials import MEASURED, TRAINED, Field, Measure, Trial
from attnlab.tasks.task import Task

GOLD = "A"  # the role that others are compared with

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CorpusRow:
    """A corpus of an item and its trials, a seed each; none, and the reason, where it cannot be run."""

    field: Field
    trials: tuple[Trial, ...]
    reason: str


@dataclass(frozen=True)
class Wanted:
    """A model that is to be trained and measured, said so that another process can do it."""

    corpus: LstmCorpus
    scale: Scale
    seed: int
    folder: Path  # the item's
    data_dir: str | None
    device: str
    role: str
    measure: Measure

    @property
    def trial(self) -> Trial:
        setting = Setting(self.scale, (self.seed,), torch.device(self.device), self.folder, self.data_dir)
        return Trial(Field(self.corpus, setting), self.seed)

    @property
    def name(self) -> str:
        return self.trial.described(self.role)

    @property
    def beside(self) -> "Wanted":
        """A of the same trial."""
        return replace(self, role=GOLD)

    @property
    def trained(self) -> bool:
        return finished(self.trial.folder(self.role))

    @property
    def measured(self) -> bool:
        return (self.trial.folder(self.role).path / MEASURED).exists()


def rows(
    corpora: Iterable[LstmCorpus],
    setting: Setting,
    others: Callable[[ScaleSize], Iterable[str]],
    measure: Measure = measure_by_tables,
) -> list[CorpusRow]:
    """A row of each corpus; where there is a scheduler, all its models are trained and measured by now.

    others    the roles beside A that the item reads of a corpus of this size
    measure   what is measured of these
    """
    found = [_row(corpus, setting) for corpus in corpora]
    if setting.on is not None:
        want = partial(
            Wanted, scale=setting.scale, folder=setting.folder.absolute(), data_dir=setting.data_dir,
            device=setting.on.device,
        )  # fmt: skip
        wanted = []
        for row in found:
            roles = {GOLD: measure_by_tables, **dict.fromkeys(others(row.field.size), measure)}
            for trial in row.trials:
                wanted += [want(row.field.corpus, seed=trial.seed, role=role, measure=of) for role, of in roles.items()]
        tasks = {row.field.corpus.name: row.field.task for row in found if row.trials}
        make(wanted, tasks, setting.on, setting.progress)
    return found


def make(wanted: Iterable[Wanted], tasks: Mapping[str, Task], on: Scheduler, progress: Progress) -> None:
    """Train and measure those that are not yet; ValueError if some failed, when all that can be done is done.

    tasks   of each corpus, by its name
    """
    missing = [each for each in wanted if not each.measured]
    missing.sort(key=lambda each: -each.trial.field.steps[-1])
    trained, training = [], dict[str, str]()  # the jobs, and the name of each model's
    for group in _groups([each for each in missing if not each.trained], tasks, on.device):
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        trained.append(Job(f"{group[0].name}{more}, trained", train_some, (group,)))
        training |= {each.name: trained[-1].name for each in group}
    trained.sort(key=lambda job: all(each.role != GOLD for each in job.arguments[0]))
    unmeasured = {each.name for each in missing}
    measured = []
    for each in missing:
        before = [training[each.name]] if each.name in training else []
        before += [each.beside.name] if each.role != GOLD and each.beside.name in unmeasured else []
        measured.append(Job(each.name, measure_one, ((each,),), tuple(before)))
    jobs = [*measured, *trained]
    failed = on.run(jobs, watch=lambda: progress(sum(map(_done, jobs)), len(jobs), "models trained and measured"))
    if failed:
        name, reason = next(iter(failed.items()))
        count = len({each.name for job in jobs if job.name in failed for each in job.arguments[0]})
        raise ValueError(
            f"{name}: {reason} ({count} of {len(missing)} models failed; what is finished stays, and the same "
            "command goes on)"
        )


def train_some(wanted: tuple[Wanted, ...]) -> None:
    """A job: trained to their end; on a GPU as one, but for one that diverges, which is left to be measured."""
    if len(wanted) == 1 and not _has_room(wanted[0]):
        return wanted[0].trial.train(wanted[0].role)
    trials, clock = [each.trial for each in wanted], time.perf_counter()
    folders = [trial.folder(each.role) for trial, each in zip(trials, wanted, strict=True)]
    recipes, field = [trial.recipe(each.role) for trial, each in zip(trials, wanted, strict=True)], trials[0].field
    train_as_one(field.task, recipes, folders, field.vocabulary, field.setting.device)
    seconds = (time.perf_counter() - clock) / len(wanted)
    for folder in filter(finished, folders):
        write_text(folder.path / TRAINED, json.dumps({"seconds": seconds}) + "\n")
    return None


def measure_one(wanted: tuple[Wanted]) -> None:
    """A job: measured; trained before, where it is not."""
    (each,) = wanted
    each.trial.curves(each.role, each.measure)


def _groups(wanted: Iterable[Wanted], tasks: Mapping[str, Task], device: str) -> list[tuple[Wanted, ...]]:
    """Those that are trained as one, on a GPU: which differ in their seed alone, as many as there is room for. A run
    that was begun alone goes on alone.
    """
    groups, by_kind = list[tuple[Wanted, ...]](), dict[str, list[Wanted]]()
    for each in wanted:
        if device != "cuda" or each.trial.folder(each.role).position():
            groups.append((each,))
        else:
            by_kind.setdefault(alike(each.trial.recipe(each.role)), []).append(each)
    for kind in by_kind.values():
        training = kind[0].trial.recipe(kind[0].role).training
        most = max(1, how_many(tasks[kind[0].corpus.name], training, room_on(torch.device(kind[0].device))))
        groups += [tuple(kind[start : start + most]) for start in range(0, len(kind), most)]
    return groups


def _has_room(each: Wanted) -> bool:
    """Whether one by itself is trained as a population of one: on a GPU, where its widest batch fits in one pass, and
    it was not begun otherwise."""
    trial = each.trial
    if each.device != "cuda" or trial.folder(each.role).position():
        return False
    return how_many(trial.field.task, trial.recipe(each.role).training, room_on(torch.device(each.device))) > 0


def _row(corpus: LstmCorpus, setting: Setting) -> CorpusRow:
    field = Field(corpus, setting)
    reason = field.why_not()  # makes its vocabulary too, so that no two jobs do
    return CorpusRow(field, () if reason else tuple(Trial(field, seed) for seed in setting.seeds), reason)


def _done(job: Job) -> bool:
    wanted: tuple[Wanted, ...] = job.arguments[0]
    return all(each.measured if job.function is measure_one else each.trained for each in wanted)
