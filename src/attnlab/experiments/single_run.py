"""Train one run in its own folder, and see how far it is."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attnlab.files import write_bytes
from attnlab.tasks.task import Task
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import RunFolder
from attnlab.training.runs import start_run

LOCK_S = 60.0  # how long to wait for a process that holds the folder: it may be about to end


def train_alone(
    recipe: Recipe,
    folder: RunFolder,
    vocabulary: Path,
    device: str,
    *,
    kept: Sequence[int] = (),
    task: Task | None = None,
    export: bool = True,
    report: Callable[[dict[str, Any]], None] = lambda values: None,
) -> None:
    """Train a run to its end, resuming if possible; KeyboardInterrupt if it is asked to stop before.

    kept   steps whose weights must be there; a finished run that lacks them is trained again
    task   the recipe's task, if it is prepared already
    export  save a finished fine-tuned model in the format of Hugging Face too
    """
    if is_finished(folder, kept):
        return
    wait_for_lock(folder)
    if is_finished(folder):  # its weights were deleted when it was measured
        for file in [file for file in folder.path.iterdir() if file.is_file()]:
            file.unlink()
    take_vocabulary(vocabulary, folder.path)
    how: dict[str, Any] = {"device": device, "report": report, "task": task, "export": export}
    _, result = start_run(recipe, out=str(folder.path), note=lambda line: None, **how)
    if not result.finished:
        raise KeyboardInterrupt


def is_finished(folder: RunFolder, kept: Sequence[int] = ()) -> bool:
    """Return whether a run is trained to its end and the weights after these steps are there."""
    return bool(folder.position().get("finished")) and all(folder.step_file(step).exists() for step in kept)


def count_steps(folder: RunFolder) -> int:
    """Return the number of updates of an unfinished run, by the last line of its metrics."""
    try:
        with open(folder.metrics_file, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            step: int = json.loads(file.read().splitlines()[-1])["step"]
            return step
    except (OSError, ValueError, IndexError, KeyError):  # not begun, or a line half written
        return 0


def take_vocabulary(source: Path, folder: Path) -> None:
    """Copy the vocabulary that all runs share into a run's folder; existing files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not (folder / file.name).exists():
            write_bytes(folder / file.name, file.read_bytes())


def wait_for_lock(folder: RunFolder) -> None:
    """Wait until no process trains in the folder, at most LOCK_S."""
    end = time.monotonic() + LOCK_S
    while folder.is_locked() and time.monotonic() < end:
        time.sleep(0.2)
