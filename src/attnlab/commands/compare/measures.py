"""What is measured of a finished run: one column of the table each."""

from collections.abc import Iterable

from attnlab.experiments.seed_values import SeedMeasure, Values, read_path

BLEU = SeedMeasure("BLEU", read_path("scores", "BLEU"), "higher")
PERPLEXITY = SeedMeasure("perplexity", read_path("perplexity"), "lower")
ACCURACY = SeedMeasure("accuracy", read_path("accuracy"), "higher")
BITS = SeedMeasure("bits per character", read_path("bits_per_character"), "lower")
BYTES = SeedMeasure("bits per byte", read_path("bits_per_byte"), "lower")
VALIDATION = SeedMeasure("validation loss (nats)", read_path("valid_loss"), "lower")
QUALITY = {  # by architecture; the first measure judges the rows
    "translation": (BLEU, PERPLEXITY, ACCURACY),
    "language": (PERPLEXITY, ACCURACY, BITS, BYTES),
    "classification": (ACCURACY, PERPLEXITY),
}
INSIDE = (
    SeedMeasure("head JSD (nats a sentence)", read_path("inside", "jsd")),
    SeedMeasure("relative residual", read_path("inside", "residual")),
    SeedMeasure("mean cosine", read_path("inside", "cosine")),
    SeedMeasure("query gradient", read_path("inside", "gradient")),
    SeedMeasure("query gradient at the start", read_path("inside", "initial_gradient")),
)


def list_measures(architecture: str, runs: Iterable[Values]) -> list[SeedMeasure]:
    """Return the measures that at least one run has, quality first."""
    runs = list(runs)
    every = (*QUALITY[architecture], VALIDATION, *INSIDE)
    return [measure for measure in every if any(measure.read(values) is not None for values in runs)]
