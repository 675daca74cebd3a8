"""What is measured of a run: how good it is; of the deep one also how alike its tokens become, and its gradients.

states      by layer, from before the first one: relative residual, residual and mean cosine of the trained model
            on validation (attnlab.analysis.rank); x of the residual is the mean
gradients   by step and layer, the norm of the loss's gradient by the query projection: of validation batches that
            are the same for all, without dropout, at the weights kept on the way and, as step 0, those of the start
"""

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from attnlab.analysis.gradient import history
from attnlab.analysis.rank import collapse
from attnlab.decoding.evaluation import evaluate_part, score_targets
from attnlab.experiments.plan import Measure, Workplace
from attnlab.models.presets import Config, build
from attnlab.recording.depth import record_states
from attnlab.recording.gradients import batch_gradient_norms
from attnlab.tasks.task import Task
from attnlab.training.checkpoints import load_weights
from attnlab.training.run_folder import read_checkpoint
from attnlab.training.runs import Run

EXAMPLES, AT_ONCE, DRAW = 64, 16, 1  # of validation; in a batch; the seed by which they are drawn
COLUMNS = {"relative_residual_mean": "relative residual", "residual_mean": "residual norm", "cosine": "mean cosine"}


def measure_quality(run: Run, place: Workplace) -> dict[str, Any]:
    """Measure perplexity and BLEU."""
    suffix = "-context" if run.task.architecture == "language" else ""
    test = evaluate_part(run, f"test{suffix}", bootstrap=0)
    return {
        "perplexity": {"valid": score_targets(run, f"valid{suffix}").perplexity, "test": test["perplexity"]},
        "scores": {score["name"]: score["value"] for score in test.get("text", [])},
        "steps": run.folder.position()["step"],
        "best_step": run.folder.position()["best_step"],
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "lambdas": {name: x.flatten().tolist() for name, x in run.model.named_parameters() if name.endswith("lambdas")},
    }


def measure_depth(run: Run, place: Workplace) -> dict[str, Any]:
    """Measure quality, rank collapse and gradients."""
    batches = list(draw_batches(run.task, run.model))
    found = measure_quality(run, place) | {"states": measure_states(run.model, [tokens for tokens, _ in batches])}
    norms = {}
    for step, model in _load_checkpoints(run):
        rows = pd.concat(pd.DataFrame(batch_gradient_norms(model, *batch)) for batch in batches)
        means = rows.groupby(["kind", "layer", "projection"], as_index=False)["norm"].mean()
        norms[step] = means[means["projection"] == "query"].to_dict("records")
    found["gradients"] = history(norms)[["step", "layer", "norm"]].to_dict("records")
    return found


def delete_steps(run: Run) -> None:
    """The weights that were kept on the way for the gradients."""
    shutil.rmtree(run.folder.path / "steps", ignore_errors=True)


QUALITY, DEEP = Measure("heo2024", measure_quality), Measure("heo2024-deep", measure_depth, clean=delete_steps)


def measure_states(model: nn.Module, batches: list[Tensor]) -> dict[str, list[float]]:
    """Of a language model: each column by layer, the mean over sentences."""
    tables = []
    for tokens in batches:
        (passed,) = record_states(model, tokens)
        tables.append(collapse(passed.states, passed.mask) * (len(tokens) / sum(map(len, batches))))
    return {name: sum(table[column] for table in tables).tolist() for column, name in COLUMNS.items()}


def draw_batches(task: Task, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of whole blocks of validation, the same whatever the model."""
    (lengths,) = task.get_lengths("valid")
    whole = np.flatnonzero(lengths == lengths.max())
    drawn = np.sort(np.random.default_rng(DRAW).permutation(whole)[:EXAMPLES])
    device = next(model.parameters()).device
    for start in range(0, len(drawn), AT_ONCE):
        batch = task.make_batch("valid", [int(k) for k in drawn[start : start + AT_ONCE]])
        yield batch.inputs[0].to(device), batch.targets.to(device)


def initialize_model(config: Config, seed: int) -> nn.Module:
    """The model with the weights that its seed makes, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(config).eval()


def _load_checkpoints(run: Run) -> Iterator[tuple[int, nn.Module]]:
    config: Any = run.recipe.model
    model: Any = initialize_model(config, run.recipe.training.seed).to(next(run.model.parameters()).device)
    yield 0, model
    for step in run.recipe.training.evaluate_at:
        load_weights(model, read_checkpoint(run.folder.step_file(step)).part("model/"))
        yield step, model
