"""Inside a trained run: diversity of heads, rank collapse and gradients, on the same validation examples for all runs.

    jsd         Jensen–Shannon divergence of two heads in nats over a sentence; the mean over pairs, layers and kinds
    residual    relative residual ‖X − 1xᵀ‖ / ‖X‖ of the states X that the last self-attention reads; x is their mean
    cosine      mean cosine of two of these states; a residual of 0 and a cosine of 1 mean that the tokens collapsed
    gradient    Frobenius norm of the loss's gradient by the query projection, the mean over layers; with the trained
                weights and, as initial_gradient, with those at initialization

attnlab.analysis.diversity, rank and gradient have the equations. Noise and dropout are off, because noise alone raises
the divergence: a noisy attention is measured at its mean logits.
"""

from typing import Any

import pandas as pd
from torch import nn

from attnlab.analysis.diversity import Diversity
from attnlab.analysis.rank import Rank
from attnlab.config import describe_error
from attnlab.experiments.run_measures import draw_examples, initialize_model, make_batches
from attnlab.huggingface.fine_tuning import TunedConfig
from attnlab.huggingface.recorder import record
from attnlab.models.attention import MultiHead
from attnlab.recording.gradients import batch_gradient_norms
from attnlab.training.runs import Run

EXAMPLES, TOKENS = 200, 2048  # number of validation examples; tokens in a batch
KEY = ["kind", "layer"]


def measure_inside(run: Run) -> dict[str, Any]:
    """Return the values above, or {"failed": reason} if an analysis does not cover the attention."""
    try:
        return _measure(run)
    except ValueError as error:
        return {"failed": describe_error(error)}


def _measure(run: Run) -> dict[str, Any]:
    """Return the values above, `layers` with the values of each layer, and the number of examples."""
    diversity, rank = Diversity(), Rank()
    device = next(run.model.parameters()).device
    projected = any(isinstance(module, MultiHead) for module in run.model.modules())
    start = _initialize(run) if projected else None
    gradients: dict[str, list[pd.DataFrame]] = {"gradient": [], "initial_gradient": []}
    examples = draw_examples(run.task, "valid", EXAMPLES)
    for batch in make_batches(run.task, "valid", examples, TOKENS, device):
        recorded = record(run.model, batch.inputs)
        diversity.add(recorded)
        rank.add(recorded, weights=False)
        for name, model in (("gradient", run.model if projected else None), ("initial_gradient", start)):
            if model is not None:
                gradients[name].append(pd.DataFrame(batch_gradient_norms(model, batch.inputs, batch.targets)))
    layers = _join_layers(diversity.pairs(), rank.states(), {name: rows for name, rows in gradients.items() if rows})
    rows = [{key: x.item() if hasattr(x, "item") else x for key, x in row.items()} for row in layers.to_dict("records")]
    return _summarize(layers) | {"examples": len(examples), "layers": rows}


def _join_layers(pairs: pd.DataFrame, states: pd.DataFrame, gradients: dict[str, list[pd.DataFrame]]) -> pd.DataFrame:
    of = "state" if "state" in set(states["of"]) else "inputs"  # of an unknown block only what it reads
    columns = {"relative_residual_mean": "residual", "cosine": "cosine"}
    layers = states[states["of"] == of].set_index(KEY)[list(columns)].rename(columns=columns).assign(of=of)
    if len(pairs):  # a single head has no pairs
        layers = layers.join(pairs.groupby(KEY)["jsd"].mean())
    for name, frames in gradients.items():
        rows = pd.concat(frames)
        layers = layers.join(rows[rows["projection"] == "query"].groupby(KEY)["norm"].mean().rename(name))
    return layers.reset_index()


def _summarize(layers: pd.DataFrame) -> dict[str, Any]:
    kinds = list(layers["kind"])
    last = next(kind for kind in ("decoder-self", "encoder-self", "cross") if kind in kinds)
    deepest = layers[layers["kind"] == last].iloc[-1]
    summary = {"residual": float(deepest["residual"]), "cosine": float(deepest["cosine"])}
    means = {name: float(layers[name].mean()) for name in ("jsd", "gradient", "initial_gradient") if name in layers}
    return {**summary, "of": f"{last}, {deepest['of']}", **means}


def _initialize(run: Run) -> nn.Module | None:
    """Return the model with its initial weights; None if some of them do not come from the seed."""
    config, task = run.recipe.model, run.task
    if isinstance(config, TunedConfig) or (hasattr(task, "read_embeddings") and task.read_embeddings() is not None):
        return None
    return initialize_model(config, run.recipe.training.seed).to(next(run.model.parameters()).device)
