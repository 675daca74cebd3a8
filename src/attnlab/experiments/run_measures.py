"""What several studies and comparisons measure of a trained run, and the examples that they measure it on."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from attnlab.decoding.evaluation import evaluate_part, score_targets
from attnlab.models.presets import Config, build
from attnlab.tasks.batching import plan_batches
from attnlab.tasks.task import Batch, Task
from attnlab.training.runs import Run

DRAW = 1  # the seed that draws the measured examples


def measure_quality(run: Run) -> dict[str, Any]:
    """Return perplexity on validation and test, BLEU of a translator on test, and how long the run was trained.

    A language model reads each part in windows whose first tokens are context only.
    """
    suffix = "-context" if run.task.architecture == "language" else ""
    test = evaluate_part(run, f"test{suffix}", bootstrap=0)
    return {
        "perplexity": {"valid": score_targets(run, f"valid{suffix}").perplexity, "test": test["perplexity"]},
        "scores": {score["name"]: score["value"] for score in test.get("text", [])},
        "steps": run.folder.position()["step"],
        "best_step": run.folder.position()["best_step"],
        "parameters": sum(p.numel() for p in run.model.parameters()),
    }


def draw_examples(task: Task, part: str, limit: int) -> list[int]:
    """Return the indices of at most `limit` random examples, the same for every model."""
    indices: list[int] = np.sort(np.random.default_rng(DRAW).permutation(task.count_examples(part))[:limit]).tolist()
    return indices


def make_batches(
    task: Task, part: str, indices: Sequence[int], tokens: int, device: torch.device | str
) -> Iterator[Batch]:
    """Yield these examples on a device, longest first, in batches of at most `tokens` or one example."""
    lengths = tuple(each[indices] for each in task.get_lengths(part))
    budget = max(tokens, *(int(each.max()) for each in lengths))
    for places in plan_batches(lengths, tokens=budget, examples=None, seed=0, epoch=0, shuffle=False):
        batch = task.make_batch(part, [indices[place] for place in places])
        yield replace(batch, inputs=tuple(x.to(device) for x in batch.inputs), targets=batch.targets.to(device))


def initialize_model(config: Config, seed: int) -> nn.Module:
    """Return a model with the random initialization of a seed, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(config).eval()
