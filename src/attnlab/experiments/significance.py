"""Intervals over seeds, tests of differences, and how many seeds a test needs.

    d_s = x_s − y_s for each seed s of both rows        t = mean(d) · √n / sd(d), two-sided, n − 1 degrees of freedom
    interval = mean ± t₀.₉₇₅,ₙ₋₁ · sd/√n                power(n) = P(T > t₁₋ₗ/₂,ₙ₋₁), T noncentral with δ√n/sd, level l

The t-test asks whether other seeds would show the same. sacrebleu's paired bootstrap resamples the test sentences of
one pair of trained models: it asks whether other sentences would. Intervals and tests need 3 seeds. Holm's method
corrects the p of several rows, so that the chance of any false alarm among them stays below the level. The seeds needed
are the smallest n with power 0.8 at a distance δ, if mean and spread stay as they are.
"""

import logging
import math
import os
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from scipy.special import betaincinv, nctdtr, stdtr, stdtrit

FEWEST_SEEDS = 3
MOST_SEEDS = 10_000  # a search for the seeds needed ends here
LEVEL, POWER = 0.05, 0.8
RESAMPLINGS = 1000
ROUNDING = 1e-9  # differences whose spread is below this part of their size are equal but for rounding

Interval = tuple[float, float]
Key = TypeVar("Key", bound=Hashable)


def compute_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % t-interval of the mean; None for fewer than 3 values, or if one is not finite."""
    if len(values) < FEWEST_SEEDS or not all(map(math.isfinite, values)):
        return None
    mean = statistics.fmean(values)
    half = float(stdtrit(len(values) - 1, 1 - LEVEL / 2)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def compute_share_interval(successes: int, count: int) -> Interval:
    """Return Clopper and Pearson's 95 % interval of a probability with these `successes` in `count` trials."""
    low = float(betaincinv(successes, count - successes + 1, LEVEL / 2)) if successes else 0.0
    high = float(betaincinv(successes + 1, count - successes, 1 - LEVEL / 2)) if successes < count else 1.0
    return low, high


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
    return Contrast(differences, statistics.fmean(values), compute_interval(values), compute_p(values))


def compute_p(values: Sequence[float]) -> float | None:
    """Return the two-sided p of the t-test that the mean is 0; None for fewer than 3 values or a constant."""
    if len(values) < FEWEST_SEEDS:
        return None
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    if spread <= ROUNDING * max(map(abs, values)):
        return 1.0 if mean == 0 else None  # t is not defined for a constant difference
    return 2 * float(stdtr(len(values) - 1, -abs(mean) * math.sqrt(len(values)) / spread))


def correct_by_holm(ps: Mapping[Key, float | None]) -> dict[Key, float | None]:
    """Return each p corrected by Holm's method: the k-th smallest of m times m − k + 1, at most 1, never decreasing."""
    known = sorted(((p, name) for name, p in ps.items() if p is not None), key=lambda pair: pair[0])
    corrected: dict[Key, float | None] = dict.fromkeys(ps)
    least = 0.0
    for place, (p, name) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - place)))
        corrected[name] = least
    return corrected


def compute_power(distances: Sequence[float], spread: float, count: int, level: float = LEVEL) -> float:
    """Return the chance that an interval of `count` seeds excludes every point at these distances from the mean.

    With two distances, one to each side, it is at least P₁ + P₂ − 1.
    """
    if spread == 0:
        return 1.0 if min(distances) > 0 else 0.0
    bound = float(stdtrit(count - 1, 1 - level / 2))
    missed = (float(nctdtr(count - 1, distance * math.sqrt(count) / spread, bound)) for distance in distances)
    return max(0.0, 1.0 - sum(0.0 if math.isnan(chance) else chance for chance in missed))  # nan: below 1e-150


def count_seeds_needed(distances: Sequence[float], spread: float, level: float = LEVEL) -> int | None:
    """Return the fewest seeds with power 0.8; None if MOST_SEEDS are too few."""
    if compute_power(distances, spread, MOST_SEEDS, level) < POWER:
        return None
    low, high = FEWEST_SEEDS - 1, MOST_SEEDS  # power rises with the number of seeds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_power(distances, spread, middle, level) >= POWER else (middle, high)
    return high


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
