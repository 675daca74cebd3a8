"""The models that an item reads, of all its corpora and seeds at once, where there is a scheduler for them.

The roles of a trial do not need each other to be trained, but to be measured they need A, with which they are compared.
What can be measured goes before what is to be trained, since a run's weights are deleted once it is measured; then A;
then what takes longest, so that at the end no long one runs alone. Without a scheduler nothing is done: models are made
one after another, when they are read.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from attnlab.scheduling import Job, Scheduler
from attnlab.studies.compare.work import finished
from attnlab.studies.snell2021.corpora import Corpus, Size
from attnlab.studies.snell2021.measures import measure as measure_by_tables
from attnlab.studies.snell2021.trials import MEASURED, Field, Measure, Trial
from attnlab.studies.study import Scale, Setting

GOLD = "A"  # the role that others are compared with

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """A corpus of an item and its trials, a seed each; none, and the reason, where it cannot be run."""

    field: Field
    trials: tuple[Trial, ...]
    reason: str


@dataclass(frozen=True)
class Wanted:
    """A model that is to be trained and measured, said so that another process can do it."""

    corpus: Corpus
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
    corpora: Iterable[Corpus],
    setting: Setting,
    others: Callable[[Size], Iterable[str]],
    measure: Measure = measure_by_tables,
) -> list[Row]:
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
        make(wanted, setting.on, setting.progress)
    return found


def make(wanted: Iterable[Wanted], on: Scheduler, progress: Progress) -> None:
    """Train and measure those that are not yet; ValueError if some failed, when all that can be done is done."""
    missing = [each for each in wanted if not each.measured]
    missing.sort(key=lambda each: -each.trial.field.steps[-1])
    gold = [Job(each.name, measure_one, (each,)) for each in missing if each.role == GOLD]
    others = [each for each in missing if each.role != GOLD]
    trained = [Job(f"{each.name}, its training", train_one, (each,)) for each in others if not each.trained]
    named = {job.name for job in (*gold, *trained)}
    measured = [
        Job(each.name, measure_one, (each,), tuple(named & {each.beside.name, f"{each.name}, its training"}))
        for each in others
    ]
    jobs = [*measured, *gold, *trained]
    failed = on.run(jobs, watch=lambda: progress(sum(map(_done, jobs)), len(jobs), "models trained and measured"))
    if failed:
        name, reason = next(iter(failed.items()))
        count = len({job.arguments[0].name for job in jobs if job.name in failed})
        raise ValueError(
            f"{name}: {reason} ({count} of {len(missing)} models failed; what is finished stays, and the same "
            "command goes on)"
        )


def train_one(wanted: Wanted) -> None:
    """A job: trained to its end."""
    wanted.trial.train(wanted.role)


def measure_one(wanted: Wanted) -> None:
    """A job: trained, where it is not, and measured."""
    wanted.trial.curves(wanted.role, wanted.measure)


def _row(corpus: Corpus, setting: Setting) -> Row:
    field = Field(corpus, setting)
    reason = field.why_not()  # makes its vocabulary too, so that no two jobs do
    return Row(field, () if reason else tuple(Trial(field, seed) for seed in setting.seeds), reason)


def _done(job: Job) -> bool:
    wanted: Wanted = job.arguments[0]
    return wanted.measured if job.function is measure_one else wanted.trained
