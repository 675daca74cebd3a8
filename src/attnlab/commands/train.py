"""attnlab train: train one model, or resume its run, and print the outcome."""

import os
from collections.abc import Sequence
from typing import Any

from attnlab.config import split_pairs
from attnlab.terminal import Bar
from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe


def train_model(task: str, settings: Sequence[str], *, allow_code: bool = False) -> bool:
    """Train a model and return whether its run is finished. Of several processes, only the first one prints."""
    values = split_pairs(settings)
    out, device = values.pop("out", None), values.pop("device", "auto")
    recipe = resolve_recipe(task, values)
    with Bar(recipe.training.steps) as progress:
        how: dict[str, Any] = {"report": progress.show, "note": progress.note, "allow_code": allow_code}
        folder, outcome = runs.start_run(recipe, out=out, device=device, **how)
    if int(os.environ.get("RANK", "0")):
        return True
    if not outcome.finished:
        command = " ".join(["attnlab train", task, *settings, *["--allow-code"] * allow_code])
        print(f"{folder.path}: stopped at step {outcome.step}, nothing is lost; to resume: {command}")
        return False
    best = f"best validation loss {outcome.best:.4f} at step {outcome.best_step}"
    print(f"{folder.path}: finished at step {outcome.step}; {best}")
    if folder.hugging_face.exists():
        print(f"for Hugging Face, attnlab.load and attnlab.record: {folder.hugging_face}")
    return True
