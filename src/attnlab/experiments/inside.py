"""What a trained run is like inside, on the same examples of the validation part for every run.

    jsd         Jensen–Shannon divergence of two heads in nats over a sentence; the mean over pairs, layers and kinds
    residual    relative residual ‖X − 1xᵀ‖ / ‖X‖ of the states, x their mean, that the last self-attention is given
    cosine      mean cosine of two of them; a residual of 0 and a cosine of 1 say that the tokens have collapsed
    gradient    Frobenius norm of the loss's gradient by the query projection, the mean over layers; with the trained
                weights and, as initial_gradient, with those that the seed started from

attnlab.analysis.diversity, rank and gradient have the equations. Noise and dropout are off: attention with noise is
seen at its mean logits, since noise by itself raises the divergence.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch

from attnlab.analysis.diversity import Diversity
from attnlab.analysis.rank import Rank
from attnlab.huggingface.fine_tuning import TunedConfig
from attnlab.huggingface.recorder import record
from attnlab.models.attention import MultiHead
from attnlab.models.presets import build
from attnlab.recording.gradients import batch_gradient_norms
from attnlab.tasks.batching import plan_batches
from attnlab.tasks.task import Batch, Task
from attnlab.training.runs import Run

EXAMPLES, TOKENS, DRAW = 200, 2048, 1  # of validation; in a batch; the seed by which they are drawn
KEY = ["kind", "layer"]


def inside(run: Run) -> dict[str, Any]:
    """The means above, `layers` with each by layer, and how many examples were read."""
    diversity, rank = Diversity(), Rank()
    device = next(run.model.parameters()).device
    projected = any(isinstance(module, MultiHead) for module in run.model.modules())
    start = _as_it_started(run) if projected else None
    gradients: dict[str, list[pd.DataFrame]] = {"gradient": [], "initial_gradient": []}
    for batch in _batches(run.task):
        inputs, targets = tuple(x.to(device) for x in batch.inputs), batch.targets.to(device)
        seen = record(run.model, inputs)
        diversity.add(seen)
        rank.add(seen, weights=False)
        for name, model in (("gradient", run.model if projected else None), ("initial_gradient", start)):
            if model is not None:
                gradients[name].append(pd.DataFrame(batch_gradient_norms(model, inputs, targets)))
    layers = _by_layer(diversity.pairs(), rank.states(), {name: rows for name, rows in gradients.items() if rows})
    return _summary(layers) | {"examples": min(EXAMPLES, run.task.count_examples("valid")), "layers": _records(layers)}


def _by_layer(pairs: pd.DataFrame, states: pd.DataFrame, gradients: dict[str, list[pd.DataFrame]]) -> pd.DataFrame:
    of = "state" if "state" in set(states["of"]) else "inputs"  # where the block was not understood, what it reads
    columns = {"relative_residual_mean": "residual", "cosine": "cosine"}
    found = states[states["of"] == of].set_index(KEY)[list(columns)].rename(columns=columns).assign(of=of)
    if len(pairs):  # one head has no other to differ from
        found = found.join(pairs.groupby(KEY)["jsd"].mean())
    for name, frames in gradients.items():
        rows = pd.concat(frames)
        found = found.join(rows[rows["projection"] == "query"].groupby(KEY)["norm"].mean().rename(name))
    return found.reset_index()


def _summary(layers: pd.DataFrame) -> dict[str, Any]:
    kinds = list(layers["kind"])
    last = next(kind for kind in ("decoder-self", "encoder-self", "cross") if kind in kinds)
    deepest = layers[layers["kind"] == last].iloc[-1]
    found = {
        "residual": float(deepest["residual"]),
        "cosine": float(deepest["cosine"]),
        "of": f"{last}, {deepest['of']}",
    }
    means = ("jsd", "gradient", "initial_gradient")
    return found | {name: float(layers[name].mean()) for name in means if name in layers}


def _batches(task: Task) -> Iterator[Batch]:
    """The same examples in the same batches, whatever the model."""
    size = task.count_examples("valid")
    drawn = np.sort(np.random.default_rng(DRAW).permutation(size)[:EXAMPLES])
    lengths = tuple(each[drawn] for each in task.get_lengths("valid"))
    budget = max(TOKENS, *(int(each.max()) for each in lengths))
    for places in plan_batches(lengths, tokens=budget, examples=None, seed=0, epoch=0, shuffle=False):
        yield task.make_batch("valid", [int(drawn[place]) for place in places])


def _as_it_started(run: Run) -> torch.nn.Module | None:
    """The model with the weights that its seed makes; None where some came from elsewhere."""
    config, task = run.recipe.model, run.task
    if isinstance(config, TunedConfig) or (hasattr(task, "read_embeddings") and task.read_embeddings() is not None):
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.recipe.training.seed)
        return build(config).eval().to(next(run.model.parameters()).device)


def _records(layers: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {key: value.item() if hasattr(value, "item") else value for key, value in row.items()}
        for row in layers.to_dict("records")
    ]
