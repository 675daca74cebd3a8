"""Intervals over seeds, and tests of differences.

    interval = mean ± t₀.₉₇₅,ᵥ · e          t = mean / e, two-sided, v degrees of freedom
    values        e = sd/√n                                  v = n − 1; of differences d_s = x_s − y_s: the paired test
    two groups    e = √(a + b), a = sd(x)²/n_x, b = …        v = (a + b)² / (a²/(n_x − 1) + b²/(n_y − 1)): Welch's test

The t-test asks whether other seeds would show the same. sacrebleu's paired bootstrap resamples the test sentences of
one pair of trained models: it asks whether other sentences would. Intervals and tests need 3 seeds. Holm's method
corrects the p of several rows, so that the chance of any false alarm among them stays below the level.
"""

import logging
import math
import os
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from scipy.special import betaincinv, stdtr, stdtrit

from attnlab.experiments.power import FEWEST_SEEDS, LEVEL, find_noncentrality

RESAMPLINGS = 1000
ROUNDING = 1e-9  # differences whose spread is below this part of their size are equal but for rounding

Interval = tuple[float, float]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of two means, with its standard error."""

    mean: float
    error: float
    freedom: float  # degrees of freedom
    size: float  # the largest of the values, by which rounding is judged

    @property
    def is_constant(self) -> bool:
        """Whether the values do not vary, but for rounding; then t is not defined."""
        return self.error <= ROUNDING * self.size

    @property
    def interval(self) -> Interval:
        half = float(stdtrit(self.freedom, 1 - LEVEL / 2)) * self.error
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float | None:
        """The two-sided p of the t-test that the mean is 0; None for a constant other than 0."""
        if self.is_constant:
            return 1.0 if self.mean == 0 else None
        return 2 * float(stdtr(self.freedom, -abs(self.mean) / self.error))

    @property
    def detectable(self) -> float | None:
        """The smallest true mean that this test finds with power 0.8, if the spread stays; None for a constant."""
        return None if self.is_constant else find_noncentrality(self.freedom) * self.error


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """Return the mean of values; None for fewer than 3, or if one is not finite."""
    if len(values) < FEWEST_SEEDS or not all(map(math.isfinite, values)):
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(statistics.fmean(values), error, len(values) - 1, max(map(abs, values)))


def estimate_difference(row: Sequence[float], first: Sequence[float]) -> Estimate | None:
    """Return the mean of one group minus that of another, with Welch's degrees of freedom; None as for a mean."""
    if (ours := estimate_mean(row)) is None or (theirs := estimate_mean(first)) is None:
        return None
    error, size = math.hypot(ours.error, theirs.error), max(ours.size, theirs.size)
    shares = [(each.error / error) ** 4 / each.freedom if error else 1 / each.freedom for each in (ours, theirs)]
    return Estimate(ours.mean - theirs.mean, error, 1 / sum(shares), size)


def compute_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % t-interval of the mean; None for fewer than 3 values, or if one is not finite."""
    estimate = estimate_mean(values)
    return estimate.interval if estimate else None


def compute_share_interval(successes: int, count: int) -> Interval:
    """Return Clopper and Pearson's 95 % interval of a probability with these `successes` in `count` trials."""
    low = float(betaincinv(successes, count - successes + 1, LEVEL / 2)) if successes else 0.0
    high = float(betaincinv(successes + 1, count - successes, 1 - LEVEL / 2)) if successes < count else 1.0
    return low, high


@dataclass(frozen=True)
class Contrast:
    """A row minus the first row."""

    differences: Mapping[int, float]  # by seed
    mean: float
    interval: Interval | None
    p: float | None  # of the t-test
    test: Literal["paired", "unpaired"]
    detectable: float | None  # the smallest true difference that the test finds with power 0.8, before Holm's method
    holm: float | None = None  # p corrected by Holm's method for the number of rows


def contrast_seeds(row: Mapping[int, float], first: Mapping[int, float], *, paired: bool) -> Contrast | None:
    """Return the difference of two rows; None if they share no seed, or if a value is not finite.

    The paired test reads the seeds that both rows have, the unpaired one all seeds of each.
    """
    differences = {seed: row[seed] - first[seed] for seed in row if seed in first}
    used = differences.values() if paired else (*row.values(), *first.values())
    if not differences or not all(map(math.isfinite, used)):
        return None
    values, groups = list(differences.values()), [list(each.values()) for each in (row, first)]
    found = estimate_mean(values) if paired else estimate_difference(*groups)
    mean = statistics.fmean(values) if paired else statistics.fmean(groups[0]) - statistics.fmean(groups[1])
    test: Literal["paired", "unpaired"] = "paired" if paired else "unpaired"
    if found is None:
        return Contrast(differences, mean, None, None, test, None)
    return Contrast(differences, mean, found.interval, found.p, test, found.detectable)


def compute_p(values: Sequence[float]) -> float | None:
    """Return the two-sided p of the t-test that the mean is 0; None for fewer than 3 values or a constant."""
    estimate = estimate_mean(values)
    return estimate.p if estimate else None


def correct_by_holm(ps: Mapping[Key, float | None]) -> dict[Key, float | None]:
    """Return each p corrected by Holm's method: the k-th smallest of m times m − k + 1, at most 1, never decreasing."""
    known = sorted(((p, name) for name, p in ps.items() if p is not None), key=lambda pair: pair[0])
    corrected: dict[Key, float | None] = dict.fromkeys(ps)
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
