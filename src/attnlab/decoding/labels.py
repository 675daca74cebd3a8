"""Predict the label of a text, with the words that the label rests on.

    logit(y | text)         log p(y | text) − log (1 − p(y | text))                        y: the predicted label
    contribution of w_l     logit(y | w_1 … w_n) − logit(y | w_1 … w_n without w_l)

A word with a contribution c above 0 supports the label: it multiplies the odds of the label by exp(c). A word below 0
speaks against it. A text without one word is predicted as any other text, so the numbers mean the same in every model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.tasks.batching import Sequences, split_chunks
from attnlab.tasks.task import BOS, UNK
from attnlab.tasks.vocabulary import describe_unknown
from attnlab.training.runs import Run

LINES = 1024  # lines that are sorted by length together
TOKENS = 8192  # tokens in a batch
PAIRS = 1 << 24  # pairs of tokens in a batch
CHARACTERS = 1 << 20  # maximum number of characters of a text that are read
MOST_WORDS = 4096  # maximum number of words of a text that are read
MOST_EXPLAINED = 500  # maximum number of words of a text whose contributions are computed
LONGEST = 40  # maximum number of characters of a word that is shown
CLASSIFIES = ("classes", "encode", "split")  # attributes of a task that predictions need


@dataclass(frozen=True)
class WordContribution:
    """What one word of a text contributes to its label."""

    word: str
    position: int  # from 1, among the words
    contribution: float  # of the log-odds of the label


@dataclass(frozen=True)
class LabelPrediction:
    """The label of one text."""

    label: str | None  # None: the text has no words
    probability: float | None
    probabilities: dict[str, float]
    words: list[WordContribution] = field(default_factory=list)  # the strongest, by size
    notes: list[str] = field(default_factory=list)  # what was left out


def predict_labels(run: Run, texts: Iterable[str], *, words: int = 3) -> Iterator[LabelPrediction]:
    """Yield the label of each text, in order, with the `words` that contribute most.

    A text is read up to MOST_WORDS words, and explained up to MOST_EXPLAINED words; the notes of a prediction name
    what was left out. A text without words has no label.
    """
    check_classifier(run)
    if words < 0:
        raise ValueError(f"the number of words must be at least 0, got {words}")
    limit = _count_positions(run)
    for chunk in split_chunks(texts, LINES):
        encoded = [_encode(run, text, limit) for text in chunk]
        log_prob = iter(_compute_log_prob(run, [each.ids for each in encoded if each.words]))
        for each in encoded:
            yield _explain(run, each, next(log_prob), words) if each.words else LabelPrediction(None, None, {})


def check_classifier(run: Run) -> None:
    """Raise ValueError if the run does not classify texts."""
    verbs = {"translation": "attnlab translate translates", "language": "attnlab generate continues a text"}
    kind = run.task.architecture
    if kind != "classification":
        raise ValueError(f"{run.folder.path} is a {kind} run and has no labels; {verbs[kind]}")
    if missing := [name for name in CLASSIFIES if not hasattr(run.task, name)]:
        raise ValueError(f"{run.folder.path}: its task cannot read text; it lacks {', '.join(missing)}")


@dataclass(frozen=True, eq=False)
class _EncodedText:
    """The words of a text that the model reads, and their tokens with special ones."""

    words: list[str]
    ids: np.ndarray
    notes: list[str]

    @property
    def first(self) -> int:
        """The place of the first word among the tokens."""
        return int(len(self.ids) > 0 and self.ids[0] == BOS)


def _encode(run: Run, text: str, limit: int) -> _EncodedText:
    task: Any = run.task
    cut = text[:CHARACTERS]
    whole = _EncodedText(task.split(cut), task.encode([cut])[0], [])
    words = whole.words[:limit]
    unknown = describe_unknown(task, words) if UNK in whole.ids else ""
    notes = [unknown] if unknown else []
    if len(words) == len(whole.words):
        notes += [f"only the first {CHARACTERS:,} characters are read"] if len(cut) < len(text) else []
        return replace(whole, notes=notes)
    ids = np.concatenate([whole.ids[: whole.first + len(words)], whole.ids[whole.first + len(whole.words) :]])
    return _EncodedText(words, ids, [*notes, f"only the first {len(words):,} words are read"])


def _explain(run: Run, text: _EncodedText, log_prob: Tensor, words: int) -> LabelPrediction:
    """Return the prediction of one text, given the log-probabilities of the classes."""
    task: Any = run.task
    best, notes = int(log_prob.argmax()), text.notes
    probabilities = dict(zip(task.classes, log_prob.exp().tolist(), strict=True))
    found: list[WordContribution] = []
    if words and len(text.words) > MOST_EXPLAINED:
        notes = [*notes, f"contributions are computed for texts of at most {MOST_EXPLAINED} words"]
    elif words and len(text.ids) > 1:
        without = [np.delete(text.ids, text.first + place) for place in range(len(text.words))]
        gains = [_compute_logit(log_prob, best) - _compute_logit(x, best) for x in _compute_log_prob(run, without)]
        found = [
            WordContribution(_shorten(word), n, gain)
            for n, (word, gain) in enumerate(zip(text.words, gains, strict=True), 1)
        ]
        found = sorted(found, key=lambda each: -abs(each.contribution))[:words]
    return LabelPrediction(task.classes[best], probabilities[task.classes[best]], probabilities, found, notes)


@torch.no_grad()
def _compute_log_prob(run: Run, rows: Sequence[Any]) -> list[Tensor]:
    """Return log p of each class for each sequence of tokens, (classes,) each, computed in batches of like lengths."""
    model: Any = run.model
    device = next(model.parameters()).device
    result: dict[int, Tensor] = {}
    todo = sorted(range(len(rows)), key=lambda k: -len(rows[k]))
    while todo:
        longest = len(rows[todo[0]])
        count = max(1, min(TOKENS // longest, PAIRS // longest**2))
        batch, todo = todo[:count], todo[count:]
        tokens = Sequences.from_ids([rows[k] for k in batch]).pad(range(len(batch))).to(device)
        log_prob = model.readout.log_prob(model.hidden(tokens)).cpu()
        result |= dict(zip(batch, log_prob, strict=True))
    return [result[k] for k in range(len(rows))]


def _shorten(word: str) -> str:
    return word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"


def _compute_logit(log_prob: Tensor, label: int) -> float:
    """Return log p − log (1 − p) of a class, given log p (classes,) of all."""
    others = torch.cat([log_prob[:label], log_prob[label + 1 :]])
    return float(log_prob[label] - others.logsumexp(0))


def _count_positions(run: Run) -> int:
    """Return the maximum number of words that the model reads."""
    model: Any = run.model
    positions = model.encoder.embedding.limit
    return MOST_WORDS if positions is None else min(MOST_WORDS, positions - 2)
