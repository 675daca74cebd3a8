"""What is measured of a run, at each of its moments and at its end, on held-out sentences.

moments            steps, from 0; `at` has the values of each:
accuracy           of the next word
aer_weight,        of every cross-attention head: alignment error rate, if each target word is linked to the source word
aer_norm           with the largest weight, or the largest norm ‖αf(x)‖ (attnlab.analysis.alignment and contribution)
right, below       of every such head, mean over words: weight on the source of the next word, and negative weight
agreement          A(α, β): how often the largest weight of the last cross attention is on the word from which the
                   probe β predicts best (attnlab.analysis.agreement); chance: for unrelated α and β
head               at the end: layer and head with the lowest aer_weight on other sentences, those of the test part
inside             at the end: diversity of heads, rank and gradients (attnlab.experiments.inside)
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from attnlab.analysis.agreement import agreement, random_baseline
from attnlab.analysis.alignment import NOWHERE, choose_words, compute_rate
from attnlab.analysis.contribution import norms
from attnlab.commands.demo.sentences import Sentences, choose_shown
from attnlab.experiments.inside import measure_inside
from attnlab.experiments.plan import Measure, Workplace
from attnlab.experiments.run_measures import initialize_model
from attnlab.recording.probe import beta, record_probes
from attnlab.recording.watch import record
from attnlab.records.record import Layer
from attnlab.tasks.task import PAD
from attnlab.training.checkpoints import load_weights
from attnlab.training.run_folder import read_checkpoint
from attnlab.training.runs import Run
from attnlab.training.scoring import score_batches

RECORDS = "records"  # folder in that of a run: STEP.safetensors for each moment


def measure_learner(run: Run, place: Workplace, *, recorded: bool = False) -> dict[str, Any]:
    """Measure a run at its moments; recorded: also save the Records of the page's sentences."""
    task: Any = run.task
    held_out, shown = Sentences.take(task, "valid"), Sentences.take(task, "valid", choose_shown(task))
    moments = [0, *run.recipe.training.evaluate_at]
    values: dict[str, Any] = {"moments": moments, "at": []}
    for step, model in _load_models(run, moments):
        values["at"].append(measure_moment(model, held_out))
        if recorded:
            probed = record_probes(model, shown.batch.inputs, shown.batch.targets)
            replace(probed, words=shown.words).save(run.folder.path / RECORDS / f"{step}.safetensors")
    values["head"] = _find_best_head(model, Sentences.take(task, "test"))
    return values | {"inside": measure_inside(replace(run, model=model))}


MEASURED = Measure("demo", measure_learner, clean=True)
RECORDED = Measure("demo with records", partial(measure_learner, recorded=True), edition=2, clean=True)


def _load_models(run: Run, moments: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield the model at each step: one object, whose weights change."""
    model = initialize_model(run.recipe.model, run.recipe.training.seed)  # type: ignore[arg-type]
    for step in moments:
        if step:
            load_weights(model, read_checkpoint(run.folder.step_file(step)).part("model/"))
        yield step, model


def measure_moment(model: Any, sentences: Sentences) -> dict[str, Any]:
    """Return accuracy, error rates, weights and agreement of a model on some sentences."""
    inputs, targets = sentences.batch.inputs, sentences.batch.targets
    scored = score_batches(model, [(list(inputs), targets)], padding=PAD)
    layers = record(model, inputs).kind("cross")
    values: dict[str, Any] = {"accuracy": scored.correct / scored.count}
    for by in ("weight", "norm"):
        values[f"aer_{by}"] = [_list_error_rates(layer, sentences, by) for layer in layers]
    weights = [layer.weights for layer in layers]  # (b,h,i,j)
    linked = sentences.right.any(-1)  # (b,i)
    for name, select in (("right", lambda x: x * sentences.right[:, None]), ("below", lambda x: x.clamp_max(0.0))):
        values[name] = [select(x).sum(-1).transpose(1, 2)[linked].mean(0).tolist() for x in weights]
    return values | _compute_agreement(weights[-1].mean(1), beta(model, inputs, targets))


def _list_error_rates(layer: Layer, sentences: Sentences, by: str) -> list[float] | None:
    """Return the AER of each head; None if the attention has no norms."""
    try:
        maps = layer.weights if by == "weight" else norms(layer).head
    except ValueError:
        return None
    return [compute_error_rate(maps[:, head], sentences) for head in range(maps.shape[1])]


def compute_error_rate(links: Tensor, sentences: Sentences) -> float:
    """Return the AER of one map (b,i,j). All true links are sure."""
    chosen, _ = choose_words(links, sentences.rows, sentences.keys, sentences.special)  # (b,I)
    right = sentences.right[:, : chosen.shape[1]]
    hit = right.gather(2, chosen.clamp_min(0).unsqueeze(2))[..., 0] & (chosen != NOWHERE)
    counts = [int((chosen != NOWHERE).sum()), int(sentences.right.sum()), int(hit.sum()), int(hit.sum())]
    return compute_rate("aer", np.array([counts]))


def _compute_agreement(weights: Tensor, probe: Tensor) -> dict[str, float]:
    """Return A(α, β) over all rows of maps (b,i,j), and by chance. β is −∞ at padding."""
    visible = probe.isfinite()
    rows = visible.any(-1)
    agreed = agreement(weights[rows], probe[rows], mask=visible[rows])
    return {"agreement": float(agreed.double().mean()), "chance": float(random_baseline(visible[rows].sum(-1)))}


def _find_best_head(model: Any, sentences: Sentences) -> tuple[int, int]:
    """Return layer and head of the cross attention with the lowest AER by weight; of equal ones the first."""
    layers = record(model, sentences.batch.inputs).kind("cross")
    rates = [_list_error_rates(layer, sentences, "weight") or [] for layer in layers]
    places = [(layer, head) for layer, by_head in enumerate(rates) for head in range(len(by_head))]
    return min(places, key=lambda place: rates[place[0]][place[1]])
