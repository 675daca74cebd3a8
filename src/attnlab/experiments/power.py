"""How many seeds a test needs, and what effect a number of seeds can detect.

    power(n) = P(T > t₁₋ₗ/₂,ᵥ), T noncentral t with v degrees of freedom and noncentrality δ√n/s, level l
    paired       s = sd(x − y)               v = n − 1
    unpaired     s = √(sd(x)² + sd(y)²)      v = 2(n − 1)
    detectable   the δ with power 0.8: λ(v) · s/√n, with P(T > t₀.₉₇₅,ᵥ) = 0.8 at the noncentrality λ(v)

The chance to reject on the wrong side is left out; at power 0.8 it is below 1e-5.

**Paired or unpaired.** Runs of a seed see the same batches. If that makes the values of two rows correlate by ρ over
seeds, pairing shrinks s by √(1 − ρ), but it halves v. So pairing detects smaller effects if

    ρ > 1 − (λ(2n − 2) / λ(n − 1))²        0.56 for 3 seeds, 0.28 for 5, 0.09 for 12, 0.03 for 34

ρ is CORRELATION, estimated once from earlier ledgers (benchmarks/pairing.py), not from the rows that are tested: a test
that is chosen by the spread of its own differences rejects too often. So the number of seeds alone chooses the test.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from scipy.special import chdtri, nctdtr, nctdtrinc, stdtrit

FEWEST_SEEDS = 3  # of intervals and tests
MOST_SEEDS = 10_000  # a search for the seeds needed ends here
LEVEL, POWER = 0.05, 0.8
CORRELATION = 0.03  # of two rows over seeds: 0.03 ± 0.14 in the results of this repository
COVERAGE = 0.8  # of the interval of a pilot's spread


@cache
def find_noncentrality(freedom: float) -> float:
    """Return λ: the true difference in standard errors that a two-sided t-test at 0.05 finds with power 0.8."""
    return float(nctdtrinc(freedom, 1 - POWER, stdtrit(freedom, 1 - LEVEL / 2)))


def find_break_even(count: int) -> float:
    """Return the correlation of two rows over `count` seeds above which pairing detects smaller effects."""
    return 1.0 - (find_noncentrality(2 * count - 2) / find_noncentrality(count - 1)) ** 2


def is_pairing_better(count: int) -> bool:
    """Return whether `count` seeds are compared by the paired test; it depends on their number alone."""
    return count >= FEWEST_SEEDS and find_break_even(count) < CORRELATION


def compute_power(
    distances: Sequence[float], spread: float, count: int, level: float = LEVEL, *, paired: bool = True
) -> float:
    """Return the chance that an interval of `count` seeds excludes every point at these distances from the mean.

    With two distances, one to each side, it is at least P₁ + P₂ − 1.
    """
    if spread == 0:
        return 1.0 if min(distances) > 0 else 0.0
    freedom = count - 1 if paired else 2 * (count - 1)
    bound = float(stdtrit(freedom, 1 - level / 2))
    missed = (float(nctdtr(freedom, distance * math.sqrt(count) / spread, bound)) for distance in distances)
    return max(0.0, 1.0 - sum(0.0 if math.isnan(chance) else chance for chance in missed))  # nan: below 1e-150


def count_seeds_needed(distances: Sequence[float], spread: float, level: float = LEVEL) -> int | None:
    """Return the fewest seeds with power 0.8, of differences with this spread; None if MOST_SEEDS are too few."""
    return _find_fewest(lambda count: compute_power(distances, spread, count, level))


@dataclass(frozen=True)
class SeedNeed:
    """How many seeds an effect needs: as the pilot's spread tells, and at both ends of the interval of that spread.

    None: more than MOST_SEEDS.
    """

    spread: float  # √(sd(x)² + sd(y)²) of the pilot
    seeds: int | None
    optimistic: int | None
    pessimistic: int | None


def plan_seeds(effect: float, row: Sequence[float], first: Sequence[float]) -> SeedNeed:
    """Return the seeds needed to detect an effect between two rows whose pilots have these values, 3 or more each.

    The chosen test may be paired: then s = √(1 − ρ) · √(sd(x)² + sd(y)²). The interval of the spread holds the true
    one in COVERAGE of all pilots: s√(v/χ²), with v = (n_x − 1) + (n_y − 1) degrees of freedom.
    """
    spread, freedom = math.hypot(statistics.stdev(row), statistics.stdev(first)), len(row) + len(first) - 2
    tail = (1 - COVERAGE) / 2
    low, high = (spread * math.sqrt(freedom / float(chdtri(freedom, p))) for p in (tail, 1 - tail))
    return SeedNeed(spread, *(_find_fewest(partial(_plan_power, effect, s)) for s in (spread, low, high)))


def estimate_correlation(rows: Sequence[Sequence[float]]) -> float | None:
    """Return the correlation of rows over seeds: (M − E) / (M + (k − 1)E) for k rows with the same seeds, in order.

    M is the mean square between seeds and E the one within them, once the mean of each row is taken off. None for
    fewer than two rows or three seeds, or if nothing varies.
    """
    count, seeds = len(rows), len(rows[0]) if rows else 0
    if count < 2 or seeds < FEWEST_SEEDS or not all(math.isfinite(x) for row in rows for x in row):
        return None
    centred = [[x - mean for x in row] for row, mean in zip(rows, map(statistics.fmean, rows), strict=True)]
    total = math.fsum(x * x for row in centred for x in row)
    between = math.fsum(math.fsum(column) ** 2 for column in zip(*centred, strict=True)) / count
    seed, error = between / (seeds - 1), (total - between) / ((seeds - 1) * (count - 1))
    return (seed - error) / (seed + (count - 1) * error) if total > 0 else None


def _plan_power(effect: float, spread: float, count: int) -> float:
    if is_pairing_better(count):
        return compute_power([effect], spread * math.sqrt(1 - CORRELATION), count)
    return compute_power([effect], spread, count, paired=False)


def _find_fewest(power: Callable[[int], float]) -> int | None:
    """Return the fewest seeds with power 0.8; power rises with their number."""
    if power(MOST_SEEDS) < POWER:
        return None
    low, high = FEWEST_SEEDS - 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high
