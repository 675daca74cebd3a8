"""What the jobs of a comparison do, each in a process of its own; all they leave is in folders.

RUNS/NAME/                a run, as attnlab train makes it: what is finished is not trained again
RUNS/NAME/compared.json   what was measured of it
OUT/speed/NAME.json       how fast it trains, where nothing else runs
"""

import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnlab.decoding.evaluation import evaluate_part
from attnlab.experiments.inside import inside
from attnlab.files import write_bytes, write_text
from attnlab.provenance import collect_provenance
from attnlab.tasks.task import Task
from attnlab.training import runs
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import RunFolder

EDITION = 1  # raised when a run is measured otherwise than before
MEASURED = "compared.json"
LOCK_S = 60.0  # how long a run that somebody else still holds is waited for: perhaps it is just dying
WINDOWS, WARM = 5, {"cpu": 1, "cuda": 4}  # of a timing: so many are measured, after so many that are not
UPDATES = {"cpu": 5, "cuda": 50}  # in a window


def train(
    recipe: Recipe,
    folder: str,
    vocabulary: str,
    device: str,
    *,
    task: Task | None = None,
    report: Callable[[dict[str, Any]], None] = lambda values: None,
) -> None:
    """Train a run to its end, from where it stands; KeyboardInterrupt if it is asked to stop before.

    task   the recipe's, where it is at hand already
    """
    path, there = Path(folder), RunFolder(Path(folder))
    if finished(there):
        return
    wait_for(there)
    take_vocabulary(Path(vocabulary), path)
    _, outcome = runs.start_run(recipe, out=folder, device=device, report=report, note=_quiet, task=task)
    if not outcome.finished:
        raise KeyboardInterrupt


def train_and_measure(recipe: Recipe, folder: str, vocabulary: str, device: str) -> None:
    """Train a run to its end and write what is measured of it, unless that is there."""
    if measured(Path(folder)) is not None:
        return
    train(recipe, folder, vocabulary, device)
    run = runs.open_run(folder, device=device)
    part = "test" if "test" in run.task.parts else "valid"
    found: dict[str, Any] = {"edition": EDITION, **evaluate_part(run, part, bootstrap=0)}
    found["scores"] = {score["name"]: score["value"] for score in found.pop("text", [])}
    found["valid_loss"] = run.folder.position()["best"]
    try:
        found["inside"] = inside(run)
    except ValueError as error:  # an attention that an analysis does not cover: the rest is still worth knowing
        found["inside"] = {"failed": " ".join(str(error).split())}
    write_text(Path(folder) / MEASURED, json.dumps(found, ensure_ascii=False, indent=1) + "\n")


def finished(folder: RunFolder) -> bool:
    return bool(folder.position().get("finished"))


def measured(folder: Path) -> dict[str, Any] | None:
    """What was measured of a run, where that is done."""
    file = folder / MEASURED
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return found if found.get("edition") == EDITION else None


def timed(file: Path, hardware: str | int | None) -> dict[str, Any] | None:
    """What a timing found, where it was done, and on this hardware if that is said."""
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    same = found["edition"] == EDITION and hardware in (None, found["about"]["hardware"])
    return found if same else None


class _EnoughError(Exception):
    """The timing is done."""


def time_training(recipe: Recipe, file: str, vocabulary: str, device: str) -> None:
    """Train for a while as attnlab train does, data and all, and write how fast that was and what memory it took.

    tokens_per_second   target tokens, the median of 5 windows of updates, and the slowest and the fastest of them
    memory              MiB at the peak: on CUDA what the allocator held; on a CPU what the resident size of the
                        process grew by from before the model was made
    """
    updates, warm = UPDATES[device], WARM[device]
    training = replace(recipe.training, steps=10**6, log_every=updates, evaluate_every=10**6, evaluate_at=(),
                       checkpoint_every=10**6, keep_last=0, patience=None, logging="none",
                       warmup=recipe.training.warmup_steps)  # fmt: skip
    speeds: list[float] = []

    def report(values: dict[str, Any]) -> None:
        speeds.append(values["tokens_per_second"])
        if len(speeds) == warm + WINDOWS:
            raise _EnoughError

    before = _resident()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(prefix="attnlab-speed-") as scratch:
        shutil.copytree(vocabulary, scratch, dirs_exist_ok=True)
        try:
            runs.start_run(replace(recipe, training=training), out=scratch, device=device, report=report, note=_quiet)
        except _EnoughError:
            pass
        else:
            raise KeyboardInterrupt  # asked to stop
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _resident(peak=True) - before
    timed = speeds[warm:]
    found: dict[str, Any] = {"edition": EDITION, "tokens_per_second": statistics.median(timed), "slowest": min(timed)}
    found |= {"fastest": max(timed), "memory": peak / 2**20, "updates_a_window": updates, "device": device}
    about = collect_provenance(torch.device(device))
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(file), json.dumps(found | {"about": about}, indent=1) + "\n")


def _resident(*, peak: bool = False) -> int:
    """Bytes of memory that this process holds, or has held at most."""
    if peak or not Path("/proc/self/statm").exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def take_vocabulary(made: Path, folder: Path) -> None:
    """Give a run's folder the vocabulary that was made once for all of them; what it has already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in made.iterdir():
        if not (folder / file.name).exists():
            write_bytes(folder / file.name, file.read_bytes())


def wait_for(folder: RunFolder) -> None:
    """Until no process trains there, or long enough: one that is dying lets go of it soon."""
    end = time.monotonic() + LOCK_S
    while folder.is_locked() and time.monotonic() < end:
        time.sleep(0.2)


_quiet: Callable[[Any], None] = lambda _: None  # noqa: E731
