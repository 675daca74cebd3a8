"""How fast a recipe trains and how much memory it takes, timed while nothing else runs."""

import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from attnlab.experiments.ledger import Ledger
from attnlab.experiments.plan import RecipeRun, Workplace, describe_recipe
from attnlab.provenance import name_hardware
from attnlab.training.recipe import Recipe
from attnlab.training.runs import start_run

WINDOWS, WARM_UP = 5, {"cpu": 1, "cuda": 4}  # number of timed windows, and of untimed windows before them
UPDATES = {"cpu": 5, "cuda": 50}  # per window


class _EnoughError(Exception):
    """All windows are timed."""


@dataclass(frozen=True)
class TimedRun(RecipeRun):
    """A recipe that is trained only until it is timed, on the hardware named."""

    trained: Recipe
    vocabulary: Path
    hardware: str
    measure = "speed"
    edition = 1
    alone = True

    @property
    def recipe(self) -> dict[str, Any]:
        return describe_recipe(self.trained) | {"hardware": self.hardware}

    def take_measure(self, place: Workplace) -> dict[str, Any]:
        return time_training(self.trained, self.vocabulary, place.device)


def name_timed_hardware(ledger: Ledger) -> str:
    """Name the machine on which the last speed of a ledger was measured."""
    return next((row.recipe["hardware"] for row in reversed(ledger.rows()) if row.measure == TimedRun.measure), "")


def time_training(recipe: Recipe, vocabulary: Path, device: str) -> dict[str, Any]:
    """Train for a while as attnlab train does, data included, and return speed and memory.

    tokens_per_second   target tokens, the median of 5 windows of updates, with the slowest and the fastest
    memory              peak in MiB: on CUDA of the allocator; on a CPU the growth of the process's resident size
    """
    updates, warm = UPDATES[device], WARM_UP[device]
    training = replace(recipe.training, steps=10**6, log_every=updates, evaluate_every=10**6, evaluate_at=(),
                       checkpoint_every=10**6, keep_last=0, patience=None, logging="none",
                       warmup=recipe.training.warmup_steps)  # fmt: skip
    speeds: list[float] = []

    def report(values: dict[str, Any]) -> None:
        speeds.append(values["tokens_per_second"])
        if len(speeds) == warm + WINDOWS:
            raise _EnoughError

    before = _read_resident()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(prefix="attnlab-speed-") as scratch:
        shutil.copytree(vocabulary, scratch, dirs_exist_ok=True)
        short = replace(recipe, training=training)
        try:
            start_run(short, out=scratch, device=device, report=report, note=lambda line: None)
        except _EnoughError:
            pass
        else:
            raise KeyboardInterrupt  # the run was asked to stop
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _read_resident(peak=True) - before
    timed = speeds[warm:]
    values: dict[str, Any] = {"tokens_per_second": statistics.median(timed), "slowest": min(timed)}
    values |= {"fastest": max(timed), "memory": peak / 2**20, "updates_a_window": updates, "device": device}
    return values | {"hardware": name_hardware(torch.device(device))}


def _read_resident(*, peak: bool = False) -> int:
    """Return the bytes of memory that this process holds, or held at its peak."""
    held = psutil.Process().memory_info()
    if not peak:
        return int(held.rss)
    if hasattr(held, "peak_wset"):  # on Windows
        return int(held.peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
