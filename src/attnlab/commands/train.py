"""attnlab train: train one model, or resume its run, and print the outcome."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.config import split_pairs
from attnlab.tasks.language import LanguageConfig
from attnlab.tasks.task import TaskConfig
from attnlab.terminal import Bar, command_line
from attnlab.training import runs
from attnlab.training.loop import TrainingResult
from attnlab.training.recipe import resolve_recipe


def train_model(
    task: str, settings: Sequence[str], *, out: Path | None, device: str, allow_code: bool = False,
    began: float | None = None,
) -> bool:  # fmt: skip
    """Train a model and return whether its run is finished. Of several processes, only the first one prints.

    began   time.perf_counter() at the start of the command
    """
    recipe = resolve_recipe(task, split_pairs(settings))
    with Bar(recipe.training.steps) as progress:
        how: dict[str, Any] = {"report": progress.show, "note": progress.note, "allow_code": allow_code, "began": began}
        folder, outcome = runs.start_run(recipe, out=out, device=device, **how)
    if int(os.environ.get("RANK", "0")):
        return True
    if not outcome.finished:
        print(f"{folder.path}: stopped at step {outcome.step}, nothing is lost; to resume: {command_line()}")
        return False
    print(f"{folder.path}: finished at step {outcome.step}; {_describe_best(recipe.data, outcome)}")
    if folder.hugging_face.exists():
        print(f"for Hugging Face, attnlab.load and attnlab.record: {folder.hugging_face}")
    return True


def _describe_best(data: TaskConfig, outcome: TrainingResult) -> str:
    """Return the best validation loss; for a text also its unit, the perplexity and the bits per byte."""
    loss, step = f"best validation loss {outcome.best:.4f}", f"at step {outcome.best_step}"
    at_best = (row for row in outcome.history if row["step"] == outcome.best_step)
    scores = next((row for row in at_best if "valid_bits_per_byte" in row), None)
    if scores is None or not isinstance(data, LanguageConfig):
        return f"{loss} {step}"
    unit = "token" if data.unit == "pretrained" else data.unit
    more = f"perplexity {scores['valid_perplexity']:.4g}, {scores['valid_bits_per_byte']:.4g} bits per byte"
    return f"{loss} nats per {unit} ({more}) {step}"
