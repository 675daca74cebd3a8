"""What a model predicts for a text: the next token at each position, a masked token, or the label of the whole text.

p = softmax(logits) of the model's own forward pass. A position that reads token t_i predicts t_{i+1}.
Tokens are named in the notation of `attnlab.records.pieces`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

CHOICES = 3  # most probable outputs that are kept


@dataclass(frozen=True)
class Prediction:
    """The most probable outputs at one position, or for the whole text."""

    what: Literal["next", "masked", "label"]
    choices: tuple[tuple[str, float], ...]  # text and probability, the most probable first
    read: str = ""  # the token at this position
    actual: str | None = None  # the token that the text has next
    share: float | None = None  # the probability of the actual token
    is_right: bool = False  # whether the actual token is the most probable one


def predict_label(log_prob: Tensor, names: Sequence[str]) -> Prediction:
    """Return the prediction of a classifier from log p (classes,)."""
    return Prediction("label", _choose(log_prob, names))


def predict_next(log_prob: Tensor, tokens: Sequence[int], names: Sequence[str]) -> list[Prediction]:
    """Return the prediction after each token, from log p (n,vocabulary). The last one has no actual token."""
    predictions = []
    for row, token, after in zip(log_prob, tokens, (*tokens[1:], None), strict=True):
        known = () if after is None else (names[after], float(row[after].exp()), int(row.argmax()) == after)
        predictions.append(Prediction("next", _choose(row, names), names[token], *known))
    return predictions


def predict_masked(log_prob: Tensor, tokens: Sequence[int], names: Sequence[str], mask: int) -> list[Prediction]:
    """Return the prediction at each masked token, from log p (n,vocabulary)."""
    places = [place for place, token in enumerate(tokens) if token == mask]
    return [Prediction("masked", _choose(log_prob[place], names), names[mask]) for place in places]


def _choose(log_prob: Tensor, names: Sequence[str]) -> tuple[tuple[str, float], ...]:
    top = log_prob.exp().topk(min(CHOICES, len(log_prob)))
    return tuple((names[k], p) for p, k in zip(top.values.tolist(), top.indices.tolist(), strict=True))
