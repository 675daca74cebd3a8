"""The runs of a study: trained by the ordinary loop, shared by its items, and measured once.

    OUT/work/runs/NAME/              a run, as attnlab train makes it: found finished, or gone on with
    OUT/work/runs/NAME/MEASURE.json  what was measured of it
    OUT/work/runs/NAME/failed.txt    why it cannot be trained to its end; delete it to try again

A run that fails costs its own values and no others: `failed` says why.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from attnlab.experiments import work
from attnlab.experiments.jobs import attempt
from attnlab.experiments.schedulers import Job
from attnlab.experiments.study import Setting
from attnlab.experiments.verdicts import Cell
from attnlab.files import write_text
from attnlab.training import runs
from attnlab.training.loop import NotFiniteError
from attnlab.training.recipe import Recipe

FAILED, NOT_FINITE = "failed.txt", "it is infinite or no number"
VALIDATION = "validation perplexity"  # as a column
Value = Callable[[dict[str, Any]], float]  # of what was measured
K = TypeVar("K")


def perplexity(part: str) -> Value:
    """Of what a study measures as {"perplexity": {"valid": …, "test": …}}."""
    return lambda found: found["perplexity"][part]


@dataclass(frozen=True)
class Measure:
    """What is measured of a finished run: `of` is a function that another process can import."""

    name: str
    of: Callable[[runs.Run], dict[str, Any]]
    edition: int = 1  # raised when it measures something else than before
    then: Callable[[runs.Run], None] | None = None  # what is done once it is written

    @property
    def file(self) -> str:
        return f"{self.name}-{self.edition}.json"


@dataclass(frozen=True)
class Trained(Generic[K]):
    """What was measured of each run, why of some there is nothing, and what they were trained on."""

    found: Mapping[K, dict[str, Any]]
    failed: Mapping[K, str]
    on: tuple[str, ...] = ()  # devices, each with its torch


def trained(recipes: Mapping[K, Recipe], measure: Measure, vocabulary: Path, setting: Setting) -> Trained[K]:
    """Train and measure what is not there yet; recipes of one corpus, whose vocabulary is made."""
    folders = {key: (setting.folder.parent / "runs" / recipe.name()).absolute() for key, recipe in recipes.items()}
    device = str(setting.device) if setting.on is None else setting.on.device
    jobs = {}
    for key, recipe in recipes.items():
        if not (folders[key] / measure.file).exists():
            arguments = (recipe, str(folders[key]), str(vocabulary), device, measure)
            jobs[recipe.name()] = Job(recipe.name(), train_and_measure, arguments)
    reasons = _run(list(jobs.values()), setting)
    failed = {key: reasons[recipe.name()] for key, recipe in recipes.items() if recipe.name() in reasons}
    found = {key: _read(folders[key] / measure.file) for key in recipes if key not in failed}
    return Trained(found, failed, tuple(runs.list_hardware(folders.values())))


def train_and_measure(recipe: Recipe, folder: str, vocabulary: str, device: str, measure: Measure) -> None:
    """A job: the run to its end, and its measure written, unless it is there."""
    failed = Path(folder) / FAILED
    if failed.exists():
        raise ValueError(failed.read_text(encoding="utf-8"))
    try:
        work.train(recipe, folder, vocabulary, device)
    except NotFiniteError as error:
        write_text(failed, " ".join(str(error).split()))
        raise
    run = runs.open_run(folder, device=device)
    write_text(Path(folder) / measure.file, json.dumps(measure.of(run), ensure_ascii=False, indent=1) + "\n")
    if measure.then is not None:
        measure.then(run)


def cell(trained: Trained[Any], keys: Sequence[Any], value: Value, **about: Any) -> Cell:
    """The cell with a value of each of these runs, one a seed; one that failed or has none is left out, and said."""
    known = [value(trained.found[key]) for key in keys if key in trained.found]
    reason = next((trained.failed[key] for key in keys if key in trained.failed), NOT_FINITE)
    return _of_finite(known, len(keys), reason, about)


def difference(
    trained: Trained[Any], pairs: Sequence[tuple[Any, Any]], values: tuple[Value, Value], **about: Any
) -> Cell:
    """The cell of a contrast: of each pair of runs, both of one seed, a value of the first less one of the second."""
    whole = [pair for pair in pairs if all(key in trained.found for key in pair)]
    reason = next((trained.failed[key] for pair in pairs for key in pair if key in trained.failed), NOT_FINITE)
    gaps = [values[0](trained.found[a]) - values[1](trained.found[b]) for a, b in whole]
    return _of_finite(gaps, len(pairs), reason, about)


def _of_finite(values: Sequence[float], count: int, reason: str, about: dict[str, Any]) -> Cell:
    kept = tuple(x for x in values if math.isfinite(x))
    if not kept:
        return Cell(**about, not_run=reason)
    missing = f"{count - len(kept)} of {count} seeds have no value: {reason}" if len(kept) < count else ""
    note = "; ".join(filter(None, (about.pop("note", ""), missing)))
    return Cell(**about, values=kept, note=note)


def _run(jobs: Sequence[Job], setting: Setting) -> dict[str, str]:
    """The reason of each that failed, by name."""
    if setting.on is not None:

        def watch() -> None:
            done = sum((Path(folder) / measure.file).exists() for _, folder, *_, measure in (j.arguments for j in jobs))
            setting.progress(done, len(jobs), "runs")

        return setting.on.run(jobs, watch=watch)
    failed: dict[str, str] = {}
    for number, job in enumerate(jobs):
        setting.progress(number, len(jobs), job.name)
        if reason := attempt(job, os.getcwd()):
            failed[job.name] = reason
    return failed


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
