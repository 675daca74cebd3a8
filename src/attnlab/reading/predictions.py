"""What a model predicts for a text: the next token at each position, a masked token, or the label of the whole text.

p = softmax(logits) of the model's own forward pass. A position that reads token t_i predicts t_{i+1}.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from attnlab.analysis.words import strip_marks

CHOICES = 3  # most probable outputs that are kept
SYMBOLS = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})


@dataclass(frozen=True)
class Prediction:
    """The most probable outputs at one position, or for the whole text."""

    what: Literal["next", "masked", "label"]
    choices: tuple[tuple[str, float], ...]  # text and probability, the most probable first
    read: str = ""  # the token at this position
    actual: str | None = None  # the token that the text has next
    share: float | None = None  # the probability of the actual token

    @property
    def is_right(self) -> bool:
        return self.actual is not None and self.actual == self.choices[0][0]


def predict_label(log_prob: Tensor, names: Sequence[str]) -> Prediction:
    """Return the prediction of a classifier from log p (classes,)."""
    return Prediction("label", _choose(log_prob, names))


def predict_next(log_prob: Tensor, tokens: Sequence[int], names: Sequence[str]) -> list[Prediction]:
    """Return the prediction after each token, from log p (n,vocabulary). The last one has no actual token."""
    predictions = []
    for row, token, after in zip(log_prob, tokens, (*tokens[1:], None), strict=True):
        known = (None, None) if after is None else (show_piece(names[after]), float(row[after].exp()))
        predictions.append(Prediction("next", _choose(row, names), show_piece(names[token]), *known))
    return predictions


def predict_masked(log_prob: Tensor, tokens: Sequence[int], names: Sequence[str], mask: int) -> list[Prediction]:
    """Return the prediction at each masked token, from log p (n,vocabulary)."""
    places = [place for place, token in enumerate(tokens) if token == mask]
    return [Prediction("masked", _choose(log_prob[place], names), names[mask]) for place in places]


def show_piece(piece: str) -> str:
    """Return a piece without the tokenizer's marks; white space becomes visible."""
    text = strip_marks(piece)
    return text.strip() or (text or piece).translate(SYMBOLS)


def _choose(log_prob: Tensor, names: Sequence[str]) -> tuple[tuple[str, float], ...]:
    top = log_prob.exp().topk(min(CHOICES, len(log_prob)))
    return tuple((show_piece(names[k]), p) for p, k in zip(top.values.tolist(), top.indices.tolist(), strict=True))
