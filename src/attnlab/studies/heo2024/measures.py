"""What is measured of a run: its quality, and of a deep model also how alike its tokens become, and its gradients.

states      by layer, starting before the first: relative residual, residual and mean cosine of the trained model
            on validation (attnlab.analysis.rank); x of the residual is the mean
gradients   by step and layer, the norm of the loss's gradient by the query projection, without dropout, on the same
            validation batches for every model; step 0 is the random initialization
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from attnlab.analysis.gradient import history
from attnlab.analysis.rank import collapse
from attnlab.experiments.plan import Measure, Workplace
from attnlab.experiments.run_measures import DRAW, initialize_model, measure_quality
from attnlab.recording.depth import record_states
from attnlab.recording.gradients import batch_gradient_norms
from attnlab.tasks.task import Task
from attnlab.training.checkpoints import load_weights
from attnlab.training.run_folder import read_checkpoint
from attnlab.training.runs import Run

EXAMPLES, BATCH = 64, 16  # number of validation examples; of examples in a batch
COLUMNS = {"relative_residual_mean": "relative residual", "residual_mean": "residual norm", "cosine": "mean cosine"}


def measure_with_lambdas(run: Run, place: Workplace) -> dict[str, Any]:
    """Measure quality, and daGPAM's λ."""
    lambdas = {name: x.flatten().tolist() for name, x in run.model.named_parameters() if name.endswith("lambdas")}
    return measure_quality(run) | {"lambdas": lambdas}


def measure_depth(run: Run, place: Workplace) -> dict[str, Any]:
    """Measure quality, rank collapse and gradients."""
    batches = list(draw_batches(run.task, run.model))
    states, norms = measure_states(run.model, [tokens for tokens, _ in batches]), {}
    for step, model in _load_checkpoints(run):
        rows = pd.concat(pd.DataFrame(batch_gradient_norms(model, *batch)) for batch in batches)
        means = rows.groupby(["kind", "layer", "projection"], as_index=False)["norm"].mean()
        norms[step] = means[means["projection"] == "query"].to_dict("records")
    gradients = history(norms)[["step", "layer", "norm"]].to_dict("records")
    return measure_with_lambdas(run, place) | {"states": states, "gradients": gradients}


QUALITY, DEEP = Measure("heo2024", measure_with_lambdas), Measure("heo2024-deep", measure_depth, clean=True)


def measure_states(model: nn.Module, batches: list[Tensor]) -> dict[str, list[float]]:
    """Return each column of a language model by layer, the mean over sentences."""
    tables = []
    for tokens in batches:
        (passed,) = record_states(model, tokens)
        tables.append(collapse(passed.states, passed.mask) * (len(tokens) / sum(map(len, batches))))
    return {name: sum(table[column] for table in tables).tolist() for column, name in COLUMNS.items()}


def draw_batches(task: Task, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets of random whole blocks of validation, the same for every model."""
    (lengths,) = task.get_lengths("valid")
    whole = np.flatnonzero(lengths == lengths.max())
    drawn = np.sort(np.random.default_rng(DRAW).permutation(whole)[:EXAMPLES])
    device = next(model.parameters()).device
    for start in range(0, len(drawn), BATCH):
        batch = task.make_batch("valid", drawn[start : start + BATCH].tolist())
        yield batch.inputs[0].to(device), batch.targets.to(device)


def _load_checkpoints(run: Run) -> Iterator[tuple[int, nn.Module]]:
    """Yield the model as initialized, then after each kept step."""
    config: Any = run.recipe.model
    model: Any = initialize_model(config, run.recipe.training.seed).to(next(run.model.parameters()).device)
    yield 0, model
    for step in run.recipe.training.evaluate_at:
        load_weights(model, read_checkpoint(run.folder.step_file(step)).part("model/"))
        yield step, model
