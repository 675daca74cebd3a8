"""Evaluate a trained run: score a part of its data or user files, and translate lines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.decoding.decode import BeamSearch
from attnlab.decoding.scores import TextScore, compute_bleu, compute_chrf, compute_split_bleu
from attnlab.tasks.task import Task
from attnlab.tasks.text import read_parallel
from attnlab.training.runs import Run
from attnlab.training.scoring import Scored, bits_per_character, score_batches

TOKENS = 8192  # source tokens in a batch to translate, times the beam
Tick = Callable[[int, int], None]  # receives the number of finished sentences and their total


def score_targets(run: Run, part: str, *, samples: int = 0, seed: int = 0, tokens: int = 4096) -> Scored:
    """Measure perplexity and accuracy on a part; with samples, average that many noisy passes, not the mean logits."""
    device = next(run.model.parameters()).device
    longest = int(np.maximum.reduce(run.task.get_lengths(part)).max())
    plan = run.task.plan_batches(part, tokens=max(tokens, longest), shuffle=False)
    on_cpu = (run.task.make_batch(part, indices) for indices in plan)
    batches = (([x.to(device) for x in batch.inputs], batch.targets.to(device)) for batch in on_cpu)
    padding = None if run.task.architecture == "classification" else 0
    return score_batches(run.model, batches, padding=padding, samples=samples, seed=seed)


@dataclass(frozen=True)
class DecodedText:
    """One translation of a line."""

    text: str
    score: float  # log p / length^length_penalty


def translate_lines(run: Run, lines: Sequence[str], **rules: Any) -> Iterator[tuple[int, str]]:
    """Yield (line number, translation) of every line as it is done, in batches of similar lengths."""
    yield from ((number, best[0].text) for number, best in translate_nbest(run, lines, **rules))


def translate_nbest(run: Run, lines: Sequence[str], **rules: Any) -> Iterator[tuple[int, list[DecodedText]]]:
    """Yield (line number, n_best translations with scores) of every line; a blank line has one empty translation."""
    settings = {"beam": run.recipe.decoding.beam, "length_penalty": run.recipe.decoding.length_penalty} | rules
    yield from _search_batches(BeamSearch(run.model, **settings), run.task, lines)  # type: ignore[arg-type]


def search_lines(search: BeamSearch, task: Task, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Translate as `translate_lines` does, with a search that can be reused for more lines or new weights."""
    yield from ((number, best[0].text) for number, best in _search_batches(search, task, lines))


def _search_batches(search: BeamSearch, task: Any, lines: Sequence[str]) -> Iterator[tuple[int, list[DecodedText]]]:
    check_translator(task)
    encoded, device = task.encode(lines), next(search.model.parameters()).device
    blank = [number for number, line in enumerate(lines) if not line.strip()]
    yield from ((number, [DecodedText("", 0.0)]) for number in blank)
    order = np.argsort([-n for n in encoded.lengths], kind="stable")
    todo = [int(number) for number in order if lines[number].strip()]
    while todo:
        count = max(1, TOKENS // (int(encoded.lengths[todo[0]]) * search.rules.beam))
        batch, todo = todo[:count], todo[count:]
        decoded = search(encoded.pad(batch).to(device))
        for number, hypotheses in zip(batch, decoded.hypotheses, strict=True):
            yield number, [DecodedText(task.decode(each.tokens), each.score) for each in hypotheses]


def _translate_all(run: Run, lines: Sequence[str], tick: Tick, rules: dict[str, Any]) -> list[str]:
    texts = [""] * len(lines)
    for done, (number, text) in enumerate(translate_lines(run, lines, **rules), start=1):
        texts[number] = text
        tick(done, len(lines))
    return texts


def score_text(hypotheses: Sequence[str], references: Sequence[str], *, bootstrap: int = 1000) -> list[TextScore]:
    scorers = (compute_bleu, compute_chrf, compute_split_bleu)
    return [compute(hypotheses, references, bootstrap=bootstrap) for compute in scorers]


def evaluate_part(
    run: Run,
    part: str,
    *,
    samples: int = 0,
    bootstrap: int = 1000,
    tick: Tick = lambda done, total: None,
    **rules: Any,
) -> dict[str, Any]:
    """Evaluate a run on a part: score the targets, and for a translation run also the translations."""
    scored = score_targets(run, part, samples=samples)
    values: dict[str, Any] = {
        "run": str(run.folder.path), "weights": run.weights, "part": part, "targets": scored.count,
        "loss": scored.nll_sum / scored.count, "perplexity": scored.perplexity, "accuracy": scored.accuracy,
    }  # fmt: skip
    if samples:
        values |= {"samples": samples, "bound_perplexity": scored.bound_perplexity}
    if run.task.architecture == "language" and getattr(run.task, "unit", None) in ("character", "byte"):
        values["bits_per_character"] = bits_per_character(scored.nll_sum, scored.count)
    if run.task.architecture == "translation":
        task: Any = run.task
        texts = _translate_all(run, task.read_sources(part), tick, rules)
        values["text"] = [asdict(score) for score in score_text(texts, task.read_references(part), bootstrap=bootstrap)]
        values["translations"] = texts
    return values


def evaluate_files(
    run: Run, source: Path, target: Path, *, bootstrap: int = 1000, tick: Tick = lambda done, total: None, **rules: Any
) -> dict[str, Any]:
    """Translate a source file and score the translations against the lines of a target file."""
    lines, references = read_parallel(source, target)
    texts = _translate_all(run, lines, tick, rules)
    scores = [asdict(score) for score in score_text(texts, references, bootstrap=bootstrap)]
    about = {"run": str(run.folder.path), "weights": run.weights, "source": str(source), "sentences": len(lines)}
    return about | {"text": scores, "translations": texts}


def check_translator(task: Task) -> None:
    """Raise ValueError if the task is not translation."""
    if task.architecture != "translation":
        raise ValueError(f"only a translation run can translate, got a {task.architecture} run")
