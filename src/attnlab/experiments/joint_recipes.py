"""Recipes of Transformers that differ in their seed and in plain numbers, trained as one, each into its own run folder.

Which numbers may differ: `OWN` in training/together.py, dropout rates of the model, and options of its attentions that
are real numbers. On a GPU the experiment engine trains such runs together by itself, as many at once as fit into its
memory.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from attnlab.config import compute_digest
from attnlab.experiments.single_run import take_vocabulary, wait_for_lock
from attnlab.files import write_text
from attnlab.mechanisms.kernels.launch import LAUNCHED
from attnlab.models.transformer import build
from attnlab.models.transformer_config import TransformerConfig
from attnlab.tasks.task import Task
from attnlab.training.loop import TrainConfig, TrainingResult
from attnlab.training.memory import explain_memory
from attnlab.training.recipe import Recipe
from attnlab.training.run_folder import RunFolder
from attnlab.training.run_hashes import check_unchanged, write_hashes
from attnlab.training.runs import write_what_ran
from attnlab.training.together import FILE, OWN, JointRun, JointTraining

OWN_RATES = ("dropout", "attention_dropout", "activation_dropout")
TRAINED_BYTES = 24  # of a parameter: weight, two gradients and two moments in float32, weight and gradient in bf16
SHARE = 0.7  # of the memory that is free
Report = Callable[[RunFolder, dict[str, Any]], None]


def name_group(recipe: Recipe) -> str | None:
    """Return a name that recipes share if they can train as one; None: this one trains alone."""
    model, training = recipe.model, recipe.training
    if not isinstance(model, TransformerConfig) or model.adaptive_cutoffs or training.optimiser == "muon":
        return None
    if training.logging != "none" or recipe.code():
        return None
    defaults: dict[str, Any] = {item.name: item.default for item in fields(TrainConfig) if item.name in OWN}
    own: dict[str, Any] = dict.fromkeys(OWN_RATES, 0.0) | {"attention": "softmax", "attention_options": {}}
    own |= {"cross_attention": None, "cross_attention_options": {}}
    shared = compute_digest(replace(recipe, training=replace(training, **defaults), model=replace(model, **own)))
    return f"{shared} {describe_attentions(model)}"


def check_recipes(recipes: Sequence[Recipe]) -> None:
    """Raise ValueError, naming what differs, if these recipes cannot train as one."""
    if not recipes:
        raise ValueError("a population needs at least one recipe")
    first, *others = recipes
    if name_group(first) is None:
        raise ValueError(
            "these runs train alone: an adaptive softmax, optimiser=muon, logging=, pretrained models and attentions "
            "in files of your own have no population"
        )
    for number, recipe in enumerate(others, start=2):
        if name_group(recipe) != name_group(first):
            shown = "; ".join(f"{key}={old} and {key}={new}" for key, old, new in _list_shared(first, recipe))
            raise ValueError(f"run 1 and run {number} cannot train as one: {shown or 'their attentions differ'}")
    if len({compute_digest(recipe) for recipe in recipes}) < len(recipes):
        raise ValueError("two of these runs are the same: give each its own seed, learning rate or other number")


def _list_shared(first: Recipe, other: Recipe) -> list[tuple[str, Any, Any]]:
    """List the settings in which two recipes differ, but members may not: their names and both values."""
    found = []
    for part, old in first.values().items():
        new = other.values()[part]
        for key, value in old.items() if isinstance(old, dict) else [(part, old)]:
            now = new.get(key) if isinstance(new, dict) else new
            if value != now and key not in OWN and key not in OWN_RATES:
                found.append((key, value, now))
    return found


def describe_attentions(model: TransformerConfig) -> str:
    """Name the attentions of all layers with their options, except options that are real numbers."""
    chosen = [model.list_attentions(kind) for kind in model.attention_kinds]
    return repr(
        [
            [(name, {key: x for key, x in options.items() if not isinstance(x, float)}) for name, options in layers]
            for layers in chosen
        ]
    )


def train_jointly(
    task: Task, recipes: Sequence[Recipe], folders: Sequence[RunFolder], vocabulary: Path, device: torch.device,
    report: Report = lambda folder, values: None,
) -> list[bool]:  # fmt: skip
    """Train these runs as one, resuming if possible. Return which are finished: a run that diverged is not.

    Raises ValueError if the recipes differ in more than the numbers that members may have of their own.
    """
    check_recipes(recipes)
    with ExitStack() as locks:
        models, runs = [], []
        for recipe, folder in zip(recipes, folders, strict=True):
            wait_for_lock(folder)
            locks.enter_context(folder.lock())
            folder.claim(recipe.values(), recipe.defaults())
            check_unchanged(folder.path, recipe.data)
            take_vocabulary(vocabulary, folder.path)
            config = recipe.resolve_model(task)
            assert isinstance(config, TransformerConfig)
            write_text(folder.path / "model.json", json.dumps(asdict(config), indent=1) + "\n")
            write_hashes(folder.path, recipe.data)
            torch.manual_seed(recipe.training.seed)
            models.append(build(config))
            runs.append(JointRun(recipe.training, folder))
        LAUNCHED.clear()
        name = sha256(" ".join(str(folder.path.resolve()) for folder in folders).encode()).hexdigest()[:12]
        together = folders[0].path.parent / f"as-one-{name}"
        together.mkdir(parents=True, exist_ok=True)
        with explain_memory(lambda: f" for {len(runs)} runs as one; train fewer at once, or lower batch_tokens="):
            training = JointTraining(
                task, models, runs, device=device, file=together / FILE,
                report=lambda number, values: report(folders[number], values),
            )  # fmt: skip
            first = training.step
            finished = training.run()
        kind = f"{type(training.stepper).__name__.removesuffix('Members').lower()} in a population of {len(runs)}"
        for run, is_finished in zip(runs, finished, strict=True):
            if is_finished:
                outcome = TrainingResult(run.position.step, run.position.best, run.position.best_step, True, kind)
                write_what_ran(run.folder, first, outcome, device, run.config.steps)
        together.rmdir()
        return finished


def count_fitting(recipe: Recipe, task: Task, device: torch.device) -> int:
    """Return how many such runs fit into the memory of a device, reckoned without running one."""
    config = recipe.resolve_model(task)
    assert isinstance(config, TransformerConfig)
    if device.type != "cuda":
        return 1 << 20
    with torch.device("meta"):
        parameters = sum(x.numel() for x in build(config).parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int(SHARE * free) // (TRAINED_BYTES * parameters + count_activation_bytes(recipe, config)))


def count_activation_bytes(recipe: Recipe, config: TransformerConfig) -> int:
    """Reckon what one pass of a run keeps for its gradient, in bytes."""
    training = recipe.training
    tokens = training.batch_tokens if training.batch_examples is None else 2**16
    layers = config.layers + (config.decoder_layers or config.layers if config.model == "translator" else 0)
    block = 2 * (40 * config.width + 6 * config.feed_forward) + 8 * config.heads * 256
    words = config.classes if config.model == "classifier" else config.target_vocabulary or config.vocabulary
    return tokens * (2 * layers * block + 12 * words)
