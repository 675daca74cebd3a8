"""What the jobs of the demo do, each in a process of its own; all they leave is in folders.

OUT/runs/NAME/                a run, as attnlab train makes it
OUT/runs/NAME/measured.json   what was measured of it
OUT/runs/NAME/records/STEP.safetensors   of the first seed: the Record of the page's sentences
OUT/copying/                  what attnlab reproduce leaves of the study of copying

What is finished is not done again.
"""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlab.commands.demo.measures import measured
from attnlab.experiments import reproduction as reproduce
from attnlab.files import write_text
from attnlab.studies import open_study
from attnlab.training import runs
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import RunFolder

EDITION = 1  # raised when a run is measured otherwise than before
MEASURED, RECORDS = f"measured-{EDITION}.json", "records"
STUDY, ITEM = "snell2021", "fig3"


def learn(recipe: Recipe, folder: str, moments: Sequence[int], recorded: bool) -> None:
    """Train a run to its end, measure it at its moments, and forget the weights of all but the last."""
    path = Path(folder)
    if found(path, recorded) is not None:
        return
    there = RunFolder(path)
    if there.position().get("finished") and not all(there.step_file(step).exists() for step in moments[1:]):
        shutil.rmtree(path)  # measured otherwise before, and its weights were let go
    _, outcome = runs.start_run(recipe, out=folder, device="cpu", report=_quiet, note=_quiet)
    if not outcome.finished:
        raise KeyboardInterrupt
    run = runs.open_run(folder, device="cpu", weights="last")
    values = measured(run, moments, path / RECORDS if recorded else None)
    write_text(path / MEASURED, json.dumps(values | {"recorded": recorded}, indent=1) + "\n")
    shutil.rmtree(path / "steps", ignore_errors=True)
    run.folder.previous.unlink(missing_ok=True)


def copied(folder: str, seeds: int) -> reproduce.ItemResult:
    """What the study of copying came to at smoke scale; it is run where it was not."""
    command = f"attnlab reproduce {STUDY} --only={ITEM} --scale=smoke --seeds={seeds}"
    terms = reproduce.StudyTerms("smoke", torch.device("cpu"), seeds, command=command)
    (outcome,) = reproduce.reproduce(open_study(STUDY), terms, Path(folder), only=[ITEM])
    return outcome


def found(folder: Path, recorded: bool = False) -> dict[str, Any] | None:
    """What was measured of a run, where that is done, with records where they are asked for."""
    file = folder / MEASURED
    values = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return values if values is not None and (values["recorded"] or not recorded) else None


def step(folder: Path) -> int:
    """How far a run is."""
    lines = RunFolder(folder).metrics()
    return lines[-1]["step"] if lines else 0


def stoppable(function: Callable[..., Any], *arguments: Any) -> None:
    """A job of its own process: asked to stop it ends as on Ctrl-C, and what it was just writing goes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    function(*arguments)


_quiet: Callable[[Any], None] = lambda _: None  # noqa: E731
