"""Evaluate a trained run: score a part of its data or user files, and translate lines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.decoding.decode import BeamSearch
from attnlab.decoding.scores import check_bootstrap, compute_bleu, compute_chrf, compute_split_bleu
from attnlab.tasks.task import Task
from attnlab.tasks.text import read_parallel
from attnlab.training.runs import Run
from attnlab.training.scoring import Scored, bits_per_byte, bits_per_character, perplexity, score_batches

TOKENS = 8192  # source tokens in a batch to translate, times the beam
SCORED_TOKENS = 4096  # tokens in a batch to score
WRITES = ("encode", "decode", "read_sources", "read_references")  # methods of a task whose outputs are texts
Tick = Callable[[int, int], None]  # receives the number of finished sentences and their total


def score_targets(run: Run, part: str, *, samples: int = 0) -> Scored:
    """Measure perplexity and accuracy on a part; with samples, average that many noisy passes, not the mean logits."""
    device = next(run.model.parameters()).device
    longest = int(np.maximum.reduce(run.task.get_lengths(part)).max())
    plan = run.task.plan_batches(part, tokens=max(SCORED_TOKENS, longest), shuffle=False)
    on_cpu = (run.task.make_batch(part, indices) for indices in plan)
    batches = (([x.to(device) for x in batch.inputs], batch.targets.to(device)) for batch in on_cpu)
    padding = None if run.task.architecture == "classification" else 0
    return score_batches(run.model, batches, padding=padding, samples=samples)


@dataclass(frozen=True)
class DecodedText:
    """One translation of a line."""

    text: str
    score: float  # log p / length^length_penalty


def open_search(run: Run, **rules: Any) -> BeamSearch:
    """Return a search with the run's beam and length penalty, or those in `rules`. Raises ValueError for bad rules."""
    check_translator(run.task)
    settings = {"beam": run.recipe.decoding.beam, "length_penalty": run.recipe.decoding.length_penalty} | rules
    return BeamSearch(run.model, **settings)  # type: ignore[arg-type]


def search_lines(search: BeamSearch, task: Any, lines: Sequence[str]) -> Iterator[tuple[int, list[DecodedText]]]:
    """Yield (line number, n_best translations with scores) of every line; a blank line has one empty translation."""
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


def _score_translations(
    search: BeamSearch, task: Task, lines: Sequence[str], references: Sequence[str], bootstrap: int, tick: Tick
) -> dict[str, Any]:
    texts = [""] * len(lines)
    for done, (number, best) in enumerate(search_lines(search, task, lines), start=1):
        texts[number] = best[0].text
        tick(done, len(lines))
    scorers = (compute_bleu, compute_chrf, compute_split_bleu)
    scores = [asdict(compute(texts, references, bootstrap=bootstrap)) for compute in scorers]
    return {"text": scores, "translations": texts}


def evaluate_part(
    run: Run, part: str, *, samples: int = 0, bootstrap: int, tick: Tick = lambda done, total: None, **rules: Any
) -> dict[str, Any]:
    """Evaluate a run on a part: score the targets, and where they are translations also the decoded texts."""
    run.task.check_part(part)
    check_bootstrap(bootstrap)
    search = open_search(run, **rules) if is_translation(run.task) or rules else None
    scored = score_targets(run, part, samples=samples)
    values: dict[str, Any] = {
        "run": str(run.folder.path), "weights": run.weights, "part": part, "targets": scored.count,
        "loss": scored.nll_sum / scored.count, "perplexity": scored.perplexity, "accuracy": scored.accuracy,
    }  # fmt: skip
    if samples:
        values |= {"samples": samples, "bound_perplexity": scored.bound_perplexity}
    if run.task.architecture == "language" and getattr(run.task, "unit", None) in ("character", "byte"):
        values["bits_per_character"] = bits_per_character(scored.nll_sum, scored.count)
    if (size := run.task.count_bytes(part)) is not None:
        per_byte = bits_per_byte(scored.nll_sum, size), perplexity(scored.nll_sum, size)
        values |= dict(zip(("bits_per_byte", "perplexity_per_byte"), per_byte, strict=True))
    if unknown := getattr(run.task, "count_unknown", lambda part: 0)(part):
        values["unknown_targets"] = unknown  # easier to predict than what they stand for
    if search is not None:
        task: Any = run.task
        lines = task.read_sources(part), task.read_references(part)
        values |= _score_translations(search, task, *lines, bootstrap, tick)
    return values


def evaluate_files(run: Run, source: Path, target: Path, *, bootstrap: int, tick: Tick, **rules: Any) -> dict[str, Any]:
    """Translate a source file and score the translations against the lines of a target file."""
    check_bootstrap(bootstrap)
    search, (lines, references) = open_search(run, **rules), read_parallel(source, target)
    about = {"run": str(run.folder.path), "weights": run.weights, "source": str(source), "sentences": len(lines)}
    return about | _score_translations(search, run.task, lines, references, bootstrap, tick)


def is_translation(task: Task) -> bool:
    """Whether a task has sources and references as texts; a user's own task may have token ids alone."""
    return task.architecture == "translation" and all(hasattr(task, name) for name in WRITES)


def check_translator(task: Task) -> None:
    """Raise ValueError if the task is not translation, or has no texts."""
    if task.architecture == "translation" and (missing := [name for name in WRITES if not hasattr(task, name)]):
        raise ValueError(f"the outputs of {type(task).__name__} are no texts: the task does not define {missing[0]}")
    if task.architecture != "translation":
        hints = {"classification": "attnlab predict gives its labels", "language": "attnlab generate continues a text"}
        kind = task.architecture
        hint = hints[kind] if task.has_text else "attnlab evaluate gives its scores"
        raise ValueError(f"only a translation run can translate, got a {kind} run; {hint}")
