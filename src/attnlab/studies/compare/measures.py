"""What is measured of a finished run, and how it is called: a column of the table each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Measure:
    """A number of compared.json, by its path there."""

    name: str  # with its unit
    path: tuple[str, ...]
    better: Literal["higher", "lower", ""] = ""

    def of(self, found: Mapping[str, Any]) -> float | None:
        """None where this run has none."""
        for key in self.path:
            if key not in found:
                return None
            found = found[key]
        value: Any = found
        return float(value) if isinstance(value, int | float) and not math.isnan(value) else None


QUALITY: dict[str, tuple[Measure, ...]] = {  # the first is the one that rows are judged by
    "translation": (
        Measure("BLEU", ("scores", "BLEU"), "higher"),
        Measure("perplexity", ("perplexity",), "lower"),
        Measure("accuracy", ("accuracy",), "higher"),
    ),
    "language": (
        Measure("perplexity", ("perplexity",), "lower"),
        Measure("accuracy", ("accuracy",), "higher"),
        Measure("bits a character", ("bits_per_character",), "lower"),
    ),
    "classification": (
        Measure("accuracy", ("accuracy",), "higher"),
        Measure("perplexity", ("perplexity",), "lower"),
    ),
}
BLEU = QUALITY["translation"][0]
VALIDATION = Measure("validation loss (nats)", ("valid_loss",), "lower")
INSIDE = (
    Measure("head JSD (nats a sentence)", ("inside", "jsd")),
    Measure("relative residual", ("inside", "residual")),
    Measure("mean cosine", ("inside", "cosine")),
    Measure("query gradient", ("inside", "gradient")),
    Measure("query gradient at the start", ("inside", "initial_gradient")),
)


def measures(architecture: str, found: Sequence[Mapping[str, Any]]) -> list[Measure]:
    """The measures that some run has, quality first."""
    every = (*QUALITY[architecture], VALIDATION, *INSIDE)
    return [measure for measure in every if any(measure.of(one) is not None for one in found)]
