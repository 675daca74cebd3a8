"""When a converted model is back: tokens until it predicts as well as the original, to one per cent of log-perplexity.

    L(t)    log-perplexity on the validation text, nats per token, after training on t tokens
    L₀(t)   that of the original model with its own attention, trained by the same recipe with the same seed

    back at t            L(t′) ≤ 1.01 · L₀(t′)      at the evaluation t and at all later ones
    as untouched at t    L(t′) ≤ 1.01 · L₀(0)       at the evaluation t and at all later ones

99 % of the original's log-perplexity is back where L₀ / L ≥ 0.99; 1.01 is 1 / 0.99, rounded. The first
criterion gives the original the same training, so it asks what the other attention costs. The second compares with the
model as it was downloaded. Evaluations are at the same t for all models, so t is known up to the distance of two of
them. A model that is not back at the last evaluation is censored: its number of tokens is at least the budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE = 1.01  # of the original's log-perplexity


@dataclass(frozen=True)
class Recovery:
    """One seed of a mechanism beside the original with the same seed."""

    tokens: tuple[int, ...]  # trained on at each evaluation
    losses: tuple[float, ...]  # L(t)
    original: tuple[float, ...]  # L₀(t)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], original: Mapping[str, Any]) -> "Recovery":
        """Read two measured runs. Raises ValueError if they were evaluated at different numbers of tokens."""
        if values["tokens"] != original["tokens"]:
            raise ValueError(f"evaluated after {values['tokens']} tokens, the original after {original['tokens']}")
        return cls(tuple(values["tokens"]), tuple(values["loss"]), tuple(original["loss"]))

    @property
    def budget(self) -> int:
        return self.tokens[-1]

    @property
    def ratio(self) -> float:
        """L / L₀ at the end."""
        return self.losses[-1] / self.original[-1]

    @property
    def back(self) -> int | None:
        """Tokens until it is back; None: not within the budget."""
        return self._find_first([TOLERANCE * loss for loss in self.original])

    @property
    def as_untouched(self) -> int | None:
        """Tokens until it predicts as the untouched original; None: not within the budget."""
        return self._find_first([TOLERANCE * self.original[0]] * len(self.tokens))

    def _find_first(self, bounds: Sequence[float]) -> int | None:
        """Return the tokens at the first evaluation from which on no loss is above its bound."""
        first = None
        for tokens, loss, bound in zip(self.tokens, self.losses, bounds, strict=True):
            if not loss <= bound:
                first = None
            elif first is None:
                first = tokens
        return first
