"""What the seeds say: means with intervals, and differences from the first row, seed by seed.

    d_s = x_s − y_s over the seeds s that both have        t = mean(d) · √n / sd(d), two-sided, n − 1 degrees of freedom

The seeds are a sample of all seeds, so the test says whether other seeds would show the same. sacrebleu's paired
bootstrap resamples the sentences of the test set instead, for one pair of trained models: whether other sentences
would. From 3 seeds on there are intervals and tests. Of several rows the p of the t-test is also given by Holm's
method, which keeps the chance of any false alarm among them below the level.
"""

import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr

from attnlab.experiments.verdicts import FEWEST_SEEDS, Cell, Interval

RESAMPLINGS = 1000
ROUNDING = 1e-9  # differences that differ by less, of their size, are one constant


def interval(values: Sequence[float]) -> Interval | None:
    """95 % t-interval of the mean; None of fewer than 3 values, or where one is not finite."""
    if not values or not all(map(math.isfinite, values)):
        return None
    return Cell(item="", row="", column="", values=tuple(values)).interval


@dataclass(frozen=True)
class Contrast:
    """A row minus the first, seed by seed."""

    differences: Mapping[int, float]  # by seed
    mean: float
    interval: Interval | None
    p: float | None  # of the paired t-test
    holm: float | None = None  # the same, among all rows


def paired(row: Mapping[int, float], first: Mapping[int, float]) -> Contrast | None:
    """None where they have no seed in common, or a value is not finite."""
    found = {seed: row[seed] - first[seed] for seed in row if seed in first}
    if not found or not all(map(math.isfinite, found.values())):
        return None
    values = list(found.values())
    return Contrast(found, statistics.fmean(values), interval(values), _p(values))


def _p(values: Sequence[float]) -> float | None:
    if len(values) < FEWEST_SEEDS:
        return None
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    if spread <= ROUNDING * max(map(abs, values)):
        return 1.0 if mean == 0 else None  # equal in every seed; or a constant, of which t says nothing
    return 2 * float(stdtr(len(values) - 1, -abs(mean) * math.sqrt(len(values)) / spread))


def holm(ps: Mapping[str, float | None]) -> dict[str, float | None]:
    """The p of each, by Holm's method: the k-th smallest of m times m − k + 1, at most 1 and never falling."""
    known = sorted((p, name) for name, p in ps.items() if p is not None)
    found: dict[str, float | None] = dict.fromkeys(ps)
    least = 0.0
    for place, (p, name) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - place)))
        found[name] = least
    return found


def bootstrap_p(texts: Sequence[str], first: Sequence[str], references: Sequence[str]) -> float:
    """sacrebleu's paired bootstrap: p of the difference in BLEU between two translations of one text.

    1 for two that are the same, of which sacrebleu, asking how often a resampling differs *more*, says 1/1001.
    """
    if list(texts) == list(first):
        return 1.0
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    os.environ.setdefault("SACREBLEU_SEED", "12345")  # sacrebleu's own default, said so that it is the same each time
    metrics: dict[str, Any] = {"BLEU": BLEU(references=[list(references)])}
    systems: list[tuple[str, Sequence[str]]] = [("first", list(first)), ("row", list(texts))]
    _, scores = PairedTest(systems, metrics, references=None, test_type="bs", n_samples=RESAMPLINGS)()
    found: Any = scores["BLEU"][1]
    return float(found.p_value)
