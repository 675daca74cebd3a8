"""What a trained run is worth, and what it translates: scores on a part of its data or on text of one's own."""

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

TOKENS = 8192  # source tokens of a batch that is translated, times the beam
Tick = Callable[[int, int], None]  # is told how many sentences are done, of how many


def score_targets(run: Run, part: str, *, samples: int = 0, seed: int = 0, tokens: int = 4096) -> Scored:
    """Perplexity and accuracy on a part; samples: by that many noisy passes instead of the mean logits."""
    device = next(run.model.parameters()).device
    longest = int(np.maximum.reduce(run.task.get_lengths(part)).max())
    plan = run.task.plan_batches(part, tokens=max(tokens, longest), shuffle=False)
    made = (run.task.make_batch(part, indices) for indices in plan)
    batches = (([x.to(device) for x in batch.inputs], batch.targets.to(device)) for batch in made)
    padding = None if run.task.architecture == "classification" else 0
    return score_batches(run.model, batches, padding=padding, samples=samples, seed=seed)


@dataclass(frozen=True)
class DecodedText:
    text: str
    score: float  # log p, divided by its length to the power of the length penalty


def translate_lines(run: Run, lines: Sequence[str], **rules: Any) -> Iterator[tuple[int, str]]:
    """(line number, translation) of every line, in the order they are done: similar lengths together."""
    yield from ((number, found[0].text) for number, found in translate_nbest(run, lines, **rules))


def translate_nbest(run: Run, lines: Sequence[str], **rules: Any) -> Iterator[tuple[int, list[DecodedText]]]:
    """As `translated`, with the n_best of each line and their scores; of a blank line the one empty translation."""
    settings = {"beam": run.recipe.decoding.beam, "length_penalty": run.recipe.decoding.length_penalty} | rules
    yield from _search_batches(BeamSearch(run.model, **settings), run.task, lines)  # type: ignore[arg-type]


def search_lines(search: BeamSearch, of: Task, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """As `translated`, by a search that can be kept for further lines or for other weights of its model."""
    yield from ((number, found[0].text) for number, found in _search_batches(search, of, lines))


def _search_batches(search: BeamSearch, of: Task, lines: Sequence[str]) -> Iterator[tuple[int, list[DecodedText]]]:
    task: Any = check_translator(of)
    model: Any = search.model
    encoded, device = task.encode(lines), next(model.parameters()).device
    blank = [number for number, line in enumerate(lines) if not line.strip()]
    yield from ((number, [DecodedText("", 0.0)]) for number in blank)
    order = np.argsort([-n for n in encoded.lengths], kind="stable")
    todo = [int(number) for number in order if lines[number].strip()]
    while todo:
        count = max(1, TOKENS // (int(encoded.lengths[todo[0]]) * search.rules.beam))
        now, todo = todo[:count], todo[count:]
        found = search(encoded.pad(now).to(device)).hypotheses
        for number, hypotheses in zip(now, found, strict=True):
            yield number, [DecodedText(task.decode(each.tokens), each.score) for each in hypotheses]


def score_text(hypotheses: Sequence[str], references: Sequence[str], *, bootstrap: int = 1000) -> list[TextScore]:
    return [score(hypotheses, references, bootstrap=bootstrap) for score in (compute_bleu, compute_chrf, compute_split_bleu)]


def evaluate_part(
    run: Run,
    part: str,
    *,
    samples: int = 0,
    bootstrap: int = 1000,
    tick: Tick = lambda done, of: None,
    **rules: Any,
) -> dict[str, Any]:
    """Everything that is measured on a part: targets, and for a translator its text."""
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
        sources = task.read_sources(part)
        texts = [""] * len(sources)
        for done, (number, text) in enumerate(translate_lines(run, sources, **rules), start=1):
            texts[number] = text
            tick(done, len(sources))
        values["text"] = [asdict(score) for score in score_text(texts, task.read_references(part), bootstrap=bootstrap)]
        values["translations"] = texts
    return values


def evaluate_files(
    run: Run, source: Path, target: Path, *, bootstrap: int = 1000, tick: Tick = lambda done, of: None, **rules: Any
) -> dict[str, Any]:
    """The translation of a file scored against another, line by line."""
    lines, references = read_parallel(source, target)
    texts = [""] * len(lines)
    for done, (number, text) in enumerate(translate_lines(run, lines, **rules), start=1):
        texts[number] = text
        tick(done, len(lines))
    scores = [asdict(score) for score in score_text(texts, references, bootstrap=bootstrap)]
    about = {"run": str(run.folder.path), "weights": run.weights, "source": str(source), "sentences": len(lines)}
    return about | {"text": scores, "translations": texts}


def check_translator(task: Task) -> Task:
    if task.architecture != "translation":
        raise ValueError(f"this run is a {task.architecture} model: only a translation run translates")
    return task
