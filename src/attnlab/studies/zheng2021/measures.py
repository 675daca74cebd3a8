"""What is measured of a run: how good it is, and how much its heads differ, with noise and without.

    perplexity    of the validation and the test part; of a language model in windows that only read the first tokens
    BLEU          of the test part by sacrebleu, and as the authors score it, with compounds split at their hyphens
    jsd           of every two heads of every layer, in nats over a sentence, on the validation part (§5.2)
    mean          the average JSD, over all pairs of all layers of all kinds of attention (Table 4)

`jsd` and `mean` are at the mean logits. Attention that draws noise has also `sampled_mean`, of one sampled pass; and of
softmax attention `noised_mean` says what the same noise does where nothing was learnt with it: the null.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from attnlab.analysis.diversity import Diversity
from attnlab.decoding.evaluation import evaluate_part, score_targets
from attnlab.experiments.plan import Measure, Workplace
from attnlab.recording.noise_null import make_noisy_model
from attnlab.recording.watch import record
from attnlab.tasks.batching import plan_batches
from attnlab.tasks.task import Batch, Task
from attnlab.training.runs import Run

EXAMPLES, TOKENS = 1000, 4096  # of validation, at most, drawn once; in a batch
DRAW, NOISE = 1, 3  # seeds: of the examples, and of the noise


def measure_quality(run: Run, place: Workplace) -> dict[str, Any]:
    """Measure quality and head diversity."""
    language = run.task.architecture == "language"
    suffix = "-context" if language else ""
    test = evaluate_part(run, f"test{suffix}", bootstrap=0)
    found: dict[str, Any] = {
        "perplexity": {"valid": score_targets(run, f"valid{suffix}").perplexity, "test": test["perplexity"]},
        "scores": {score["name"]: score["value"] for score in test.get("text", [])},
        "steps": run.folder.position()["step"],
        "best_step": run.folder.position()["best_step"],
        "parameters": sum(p.numel() for p in run.model.parameters()),
    }
    return found | measure_diversity(run)


def measure_diversity(run: Run) -> dict[str, Any]:
    """The divergences of a run's heads, of which it has two or more."""
    attention = run.recipe.model.attention
    pairs = _compare_heads(run, run.model)
    found: dict[str, Any] = {"jsd": pairs[["kind", "layer", "head_a", "head_b", "jsd"]].to_dict("records")}
    found |= {"mean": float(pairs["jsd"].mean()), "mean_per_query": float(pairs["jsd_per_query"].mean())}
    if attention in ("coda", "coda-cs"):
        found["sampled_mean"] = float(_compare_heads(run, run.model, noise=NOISE)["jsd"].mean())
    if attention == "softmax":
        found["noised_mean"] = float(_compare_heads(run, make_noisy_model(run.model), noise=NOISE)["jsd"].mean())
    return found


QUALITY_AND_HEADS = Measure("zheng2021", measure_quality)


def _compare_heads(run: Run, model: Any, noise: int | None = None) -> pd.DataFrame:
    counted = Diversity()
    device = next(model.parameters()).device
    for batch in _batches(run.task):
        counted.add(record(model, tuple(x.to(device) for x in batch.inputs), noise=noise))
    return counted.pairs()


def _batches(task: Task) -> Iterator[Batch]:
    """The same examples in the same batches, whatever the model."""
    drawn = np.sort(np.random.default_rng(DRAW).permutation(task.count_examples("valid"))[:EXAMPLES])
    lengths = tuple(each[drawn] for each in task.get_lengths("valid"))
    budget = max(TOKENS, *(int(each.max()) for each in lengths))
    for places in plan_batches(lengths, tokens=budget, examples=None, seed=0, epoch=0, shuffle=False):
        yield task.make_batch("valid", [int(drawn[place]) for place in places])
