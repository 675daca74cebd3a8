"""What is measured of a finished run: one column of the table each."""

import math
from collections.abc import Iterable

from attnlab.experiments.seed_values import SeedMeasure, Values, read_path
from attnlab.tasks.task import Score


def _read_log_perplexity(values: Values) -> float | None:
    perplexity = read_path("perplexity")(values)
    return math.log(perplexity) if perplexity else None


LOG_PERPLEXITY = SeedMeasure("log-perplexity (nats)", _read_log_perplexity, "lower")
VALIDATION = SeedMeasure("validation log-perplexity (nats)", read_path("valid_loss"), "lower")
BLEU = SeedMeasure("BLEU", read_path("scores", "BLEU"), "higher")
ACCURACY = SeedMeasure("accuracy", read_path("accuracy"), "higher")
PERPLEXITY = SeedMeasure("perplexity", read_path("perplexity"), "lower")
BITS = SeedMeasure("bits per character", read_path("bits_per_character"), "lower")
BYTES = SeedMeasure("bits per byte", read_path("bits_per_byte"), "lower")
QUALITY = (LOG_PERPLEXITY, VALIDATION, BLEU, ACCURACY, PERPLEXITY, BITS, BYTES)  # the first judges the rows
INSIDE = (
    SeedMeasure("head JSD (nats a sentence)", read_path("inside", "jsd")),
    SeedMeasure("relative residual", read_path("inside", "residual")),
    SeedMeasure("mean cosine", read_path("inside", "cosine")),
    SeedMeasure("query gradient", read_path("inside", "gradient")),
    SeedMeasure("query gradient at the start", read_path("inside", "initial_gradient")),
)


def list_measures(main_score: Score, part: str, runs: Iterable[Values]) -> list[SeedMeasure]:
    """Return the measures that at least one run has, quality first; part: where quality is measured.

    Log-perplexity judges before BLEU, because it varies far less from seed to seed. A task whose main score is the
    accuracy is judged by that.
    """
    runs = list(runs)
    quality = [ACCURACY, *(each for each in QUALITY if each != ACCURACY)] if main_score == "accuracy" else QUALITY
    unique = [each for each in quality if part != "valid" or each != VALIDATION]  # there it is the log-perplexity
    return [measure for measure in (*unique, *INSIDE) if any(measure.read(values) is not None for values in runs)]
