"""What is measured of a finished run, and how it is called: a column of the table each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ComparisonMeasure:
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


QUALITY: dict[str, tuple[ComparisonMeasure, ...]] = {  # the first is the one that rows are judged by
    "translation": (
        ComparisonMeasure("BLEU", ("scores", "BLEU"), "higher"),
        ComparisonMeasure("perplexity", ("perplexity",), "lower"),
        ComparisonMeasure("accuracy", ("accuracy",), "higher"),
    ),
    "language": (
        ComparisonMeasure("perplexity", ("perplexity",), "lower"),
        ComparisonMeasure("accuracy", ("accuracy",), "higher"),
        ComparisonMeasure("bits a character", ("bits_per_character",), "lower"),
    ),
    "classification": (
        ComparisonMeasure("accuracy", ("accuracy",), "higher"),
        ComparisonMeasure("perplexity", ("perplexity",), "lower"),
    ),
}
BLEU = QUALITY["translation"][0]
VALIDATION = ComparisonMeasure("validation loss (nats)", ("valid_loss",), "lower")
INSIDE = (
    ComparisonMeasure("head JSD (nats a sentence)", ("inside", "jsd")),
    ComparisonMeasure("relative residual", ("inside", "residual")),
    ComparisonMeasure("mean cosine", ("inside", "cosine")),
    ComparisonMeasure("query gradient", ("inside", "gradient")),
    ComparisonMeasure("query gradient at the start", ("inside", "initial_gradient")),
)


def measures(architecture: str, found: Sequence[Mapping[str, Any]]) -> list[ComparisonMeasure]:
    """The measures that some run has, quality first."""
    every = (*QUALITY[architecture], VALIDATION, *INSIDE)
    return [measure for measure in every if any(measure.of(one) is not None for one in found)]
