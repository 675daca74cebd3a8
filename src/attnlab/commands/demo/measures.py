"""What is measured of a run, at each of its moments and at its end, on held-out sentences.

accuracy           of the next word
aer                of every cross-attention head, linking each target word to the source word of its largest weight,
                   and of its largest norm ‖αf(x)‖ (attnlab.analysis.alignment and contribution)
head               layer and number of the one with the lowest aer by weight on other sentences, those of the test part
right, below       the weight of every such head on the source of the word to write, and its negative weight; the
                   mean over words
agreement          how often the largest weight of the last cross attention is on the word from which alone the
                   probe β predicts best, A(α, β) (attnlab.analysis.agreement); chance: were they unrelated
inside             diversity of heads, rank and gradients (attnlab.experiments.inside)
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.analysis.agreement import agreement, random_baseline
from attnlab.analysis.alignment import NOWHERE, choose_words, compute_rate
from attnlab.analysis.contribution import norms
from attnlab.commands.demo.sentences import Sentences, on_page
from attnlab.experiments.inside import measure_inside
from attnlab.models.presets import build
from attnlab.recording.probe import beta, record_probes
from attnlab.recording.watch import record
from attnlab.records.record import Layer
from attnlab.tasks.task import PAD
from attnlab.training.checkpoints import load_weights
from attnlab.training.run_folder import read_checkpoint
from attnlab.training.runs import Run
from attnlab.training.scoring import score_batches


def measure_learner(run: Run, moments: Sequence[int], records: Path | None) -> dict[str, Any]:
    """Measure a run at its moments; records of the page's sentences go to a folder, one per moment."""
    task: Any = run.task
    held_out = Sentences.of(task, "valid", range(task.count_examples("valid")))
    page = Sentences.of(task, "valid", on_page(task))
    found: dict[str, Any] = {"moments": list(moments), "at": []}
    for step, model in _models(run, moments):
        found["at"].append(_looked_at(model, held_out))
        if records is not None:
            seen = record_probes(model, page.batch.inputs, page.batch.targets)
            replace(seen, words=page.words).save(records / f"{step}.safetensors")
    found["head"] = _best_head(model, Sentences.of(task, "test", range(task.count_examples("test"))))
    try:
        found["inside"] = measure_inside(replace(run, model=model))
    except ValueError as error:  # an attention that an analysis does not cover: the rest is still worth knowing
        found["inside"] = {"failed": " ".join(str(error).split())}
    return found


def _models(run: Run, moments: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """The model after so many steps: one object, whose weights change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.recipe.training.seed)
        model = build(run.recipe.model).eval()  # type: ignore[arg-type]
    for step in moments:
        if step:
            load_weights(model, read_checkpoint(run.folder.step_file(step)).part("model/"))
        yield step, model


def _looked_at(model: Any, sentences: Sentences) -> dict[str, Any]:
    inputs, targets = sentences.batch.inputs, sentences.batch.targets
    scored = score_batches(model, [(list(inputs), targets)], padding=PAD)
    layers = record(model, inputs).kind("cross")
    found: dict[str, Any] = {"accuracy": scored.correct / scored.count}
    for by in ("weight", "norm"):
        found[f"aer_{by}"] = [_error_rates(layer, sentences, by) for layer in layers]
    weights = [layer.weights for layer in layers]  # (b,h,i,j)
    linked = sentences.right.any(-1)  # (b,i)
    for name, mapped in (("right", lambda x: x * sentences.right[:, None]), ("below", lambda x: x.clamp_max(0.0))):
        found[name] = [mapped(x).sum(-1).transpose(1, 2)[linked].mean(0).tolist() for x in weights]
    return found | _agreement(weights[-1].mean(1), beta(model, inputs, targets))


def _error_rates(layer: Layer, sentences: Sentences, by: str) -> list[float] | None:
    """The AER of each head; None where there are no norms."""
    try:
        maps = layer.weights if by == "weight" else norms(layer).head
    except ValueError:
        return None
    return [_error_rate(maps[:, head], sentences) for head in range(maps.shape[1])]


def _error_rate(links: Tensor, sentences: Sentences) -> float:
    """The AER of one map (b,i,j), in which all that is right is also sure."""
    chosen, _ = choose_words(links, sentences.rows, sentences.keys, sentences.special)  # (b,I)
    right = sentences.right[:, : chosen.shape[1]]
    hit = right.gather(2, chosen.clamp_min(0).unsqueeze(2))[..., 0] & (chosen != NOWHERE)
    counts = [int((chosen != NOWHERE).sum()), int(sentences.right.sum()), int(hit.sum()), int(hit.sum())]
    return compute_rate("aer", np.array([counts]))


def _agreement(weights: Tensor, probe: Tensor) -> dict[str, float]:
    """A(α, β) over all rows, of maps (b,i,j); β is −∞ at padding."""
    seen = probe.isfinite()
    kept = seen.any(-1)
    agreed = agreement(weights[kept], probe[kept], mask=seen[kept])
    chance = random_baseline(seen[kept].sum(-1))
    return {"agreement": float(agreed.double().mean()), "chance": float(chance)}


def _best_head(model: Any, sentences: Sentences) -> tuple[int, int]:
    """Layer and head of the cross attention with the lowest AER by weight, the first of them."""
    layers = record(model, sentences.batch.inputs).kind("cross")
    rates = [_error_rates(layer, sentences, "weight") or [] for layer in layers]
    places = [(layer, head) for layer, of_heads in enumerate(rates) for head in range(len(of_heads))]
    return min(places, key=lambda place: rates[place[0]][place[1]])
