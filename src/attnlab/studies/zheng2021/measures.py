"""What is measured of a run: its quality (experiments/run_measures.py), and how much its heads differ.

    jsd              Jensen–Shannon divergence of every two heads of every layer, in nats over a sentence (§5.2)
    mean             the average JSD, over all pairs of all layers of all kinds of attention (Table 4)
    mean_per_query   the same, divided by the number of queries of a sentence
    sampled_mean     the average JSD of one noisy pass, of attention that draws noise
    noised_mean      the average JSD of softmax attention that is given the same noise: the null

All are on validation; `jsd`, `mean` and `mean_per_query` are at the mean logits.
"""

from typing import Any

import pandas as pd

from attnlab.analysis.diversity import Diversity
from attnlab.experiments.plan import Measure, Workplace
from attnlab.experiments.run_measures import draw_examples, make_batches, measure_quality
from attnlab.recording.noise_null import make_noisy_model
from attnlab.recording.watch import record
from attnlab.training.runs import Run

EXAMPLES, TOKENS = 1000, 4096  # largest number of validation examples; of tokens in a batch
NOISE = 3  # the seed of the noise
JSD = "average JSD (nats)"  # the column of read_jsd


def measure_quality_and_heads(run: Run, place: Workplace) -> dict[str, Any]:
    return measure_quality(run) | measure_diversity(run)


def measure_diversity(run: Run) -> dict[str, Any]:
    """Return the divergences of a run that has at least two heads."""
    attention = run.recipe.model.attention
    pairs = _compare_heads(run, run.model)
    values: dict[str, Any] = {"jsd": pairs[["kind", "layer", "head_a", "head_b", "jsd"]].to_dict("records")}
    values |= {"mean": float(pairs["jsd"].mean()), "mean_per_query": float(pairs["jsd_per_query"].mean())}
    if attention in ("coda", "coda-cs"):
        values["sampled_mean"] = float(_compare_heads(run, run.model, noise=NOISE)["jsd"].mean())
    if attention == "softmax":
        values["noised_mean"] = float(_compare_heads(run, make_noisy_model(run.model), noise=NOISE)["jsd"].mean())
    return values


def read_jsd(values: dict[str, Any]) -> float:
    mean: float = values["mean"]
    return mean


QUALITY_AND_HEADS = Measure("zheng2021", measure_quality_and_heads)


def _compare_heads(run: Run, model: Any, noise: int | None = None) -> pd.DataFrame:
    diversity, device = Diversity(), next(model.parameters()).device
    for batch in make_batches(run.task, "valid", draw_examples(run.task, "valid", EXAMPLES), TOKENS, device):
        diversity.add(record(model, batch.inputs, noise=noise))
    return diversity.pairs()
