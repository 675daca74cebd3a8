"""Means with intervals over seeds, and tests of the differences from a first row.

    d_s = x_s − y_s for each seed s of both rows        t = mean(d) · √n / sd(d), two-sided, n − 1 degrees of freedom

The t-test asks whether other seeds would show the same. sacrebleu's paired bootstrap resamples the test sentences of
one pair of trained models: it asks whether other sentences would. Intervals and tests need 3 seeds. Holm's method
corrects the p of several rows, so that the chance of any false alarm among them stays below the level.
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
ROUNDING = 1e-9  # differences whose spread is below this part of their size are equal but for rounding


def compute_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % t-interval of the mean; None for fewer than 3 values, or if one is not finite."""
    if not values or not all(map(math.isfinite, values)):
        return None
    return Cell(item="", row="", column="", values=tuple(values)).interval


@dataclass(frozen=True)
class Contrast:
    """A row minus the first row, seed by seed."""

    differences: Mapping[int, float]  # by seed
    mean: float
    interval: Interval | None
    p: float | None  # of the paired t-test
    holm: float | None = None  # p corrected by Holm's method for the number of rows


def contrast_seeds(row: Mapping[int, float], first: Mapping[int, float]) -> Contrast | None:
    """Return the difference of two rows; None if they share no seed, or if a value is not finite."""
    differences = {seed: row[seed] - first[seed] for seed in row if seed in first}
    if not differences or not all(map(math.isfinite, differences.values())):
        return None
    values = list(differences.values())
    return Contrast(differences, statistics.fmean(values), compute_interval(values), _test_mean(values))


def _test_mean(values: Sequence[float]) -> float | None:
    if len(values) < FEWEST_SEEDS:
        return None
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    if spread <= ROUNDING * max(map(abs, values)):
        return 1.0 if mean == 0 else None  # t is not defined for a constant difference
    return 2 * float(stdtr(len(values) - 1, -abs(mean) * math.sqrt(len(values)) / spread))


def correct_by_holm(ps: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return each p corrected by Holm's method: the k-th smallest of m times m − k + 1, at most 1, never decreasing."""
    known = sorted((p, name) for name, p in ps.items() if p is not None)
    corrected: dict[str, float | None] = dict.fromkeys(ps)
    least = 0.0
    for place, (p, name) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - place)))
        corrected[name] = least
    return corrected


def compute_bootstrap_p(texts: Sequence[str], first: Sequence[str], references: Sequence[str]) -> float:
    """Return p of the BLEU difference between two translations of one text, by sacrebleu's paired bootstrap.

    Equal translations give 1. sacrebleu would give 1/1001, because it counts only resamplings that differ *more*.
    """
    if list(texts) == list(first):
        return 1.0
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.significance import PairedTest

    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    os.environ.setdefault("SACREBLEU_SEED", "12345")  # sacrebleu's default, fixed here so that p never changes
    metrics: dict[str, Any] = {"BLEU": BLEU(references=[list(references)])}
    systems: list[tuple[str, Sequence[str]]] = [("first", list(first)), ("row", list(texts))]
    _, scores = PairedTest(systems, metrics, references=None, test_type="bs", n_samples=RESAMPLINGS)()
    result: Any = scores["BLEU"][1]
    return float(result.p_value)
