"""How many seeds a comparison needs, and what its seeds can detect: against tables, formulas and simulations."""

import math

import numpy as np
import pytest
from scipy import stats

from attnlab.experiments.power import (
    CORRELATION,
    compute_power,
    count_seeds_needed,
    estimate_correlation,
    find_break_even,
    find_noncentrality,
    is_pairing_better,
    plan_seeds,
)
from attnlab.experiments.significance import contrast_seeds, estimate_difference, estimate_mean


@pytest.mark.parametrize(("d", "seeds"), [(0.2, 394), (0.5, 64), (0.8, 26), (1.0, 17)])
def test_two_groups_need_as_many_as_cohens_table(d, seeds):
    """Cohen (1988), table 2.4.1: n of each group, power 0.8, two-sided 0.05; d = 0.2 as statsmodels has it, 393.4.

    The difference has spread √2.
    """
    assert compute_power([d], math.sqrt(2), seeds, paired=False) >= 0.8
    assert compute_power([d], math.sqrt(2), seeds - 1, paired=False) < 0.8


@pytest.mark.parametrize("freedom", [2, 4, 6.3, 22, 58, 9998])
def test_the_noncentrality_is_that_of_the_two_sided_power(freedom):
    """As statsmodels computes it: P(T > t) + P(T < −t) of a noncentral t is 0.8."""
    bound, shift = stats.t.ppf(0.975, freedom), find_noncentrality(freedom)
    assert stats.nct.sf(bound, freedom, shift) + stats.nct.cdf(-bound, freedom, shift) == pytest.approx(0.8, abs=1e-5)


@pytest.mark.parametrize(("count", "paired"), [(3, True), (3, False), (12, True), (12, False)])
def test_a_detectable_effect_is_found_in_80_of_100_simulations(count, paired):
    """True differences of λ·σ_e, σ_e the true standard error; p as `contrast_seeds` computes it."""
    rng, freedom = np.random.default_rng(count), count - 1 if paired else 2 * (count - 1)
    effect = find_noncentrality(freedom) * math.sqrt(2 / count)
    x, y = rng.normal(effect, 1, (4000, count)), rng.normal(0, 1, (4000, count))
    error = (x - y).std(1, ddof=1) if paired else np.sqrt(x.var(1, ddof=1) + y.var(1, ddof=1))
    found = (x.mean(1) - y.mean(1)) * math.sqrt(count) / error > stats.t.ppf(0.975, freedom)
    assert found.mean() == pytest.approx(0.8, abs=0.02)
    rows = ({seed: float(value) for seed, value in enumerate(each[0])} for each in (x, y))
    contrast = contrast_seeds(*rows, paired=paired)
    same = estimate_mean(x[0] - y[0]) if paired else estimate_difference(x[0], y[0])
    assert contrast.detectable == same.detectable == find_noncentrality(same.freedom) * same.error


def test_the_seeds_that_an_effect_needs_detect_it():
    needed = count_seeds_needed([0.5], 1.0)
    assert needed == 34  # Cohen's tables, paired
    assert find_noncentrality(needed - 1) / math.sqrt(needed) <= 0.5
    assert find_noncentrality(needed - 2) / math.sqrt(needed - 1) > 0.5


# --- paired or unpaired ---


def test_pairing_pays_beyond_the_break_even():
    for count in (3, 5, 12, 20):
        edge = find_break_even(count)
        unpaired = find_noncentrality(2 * count - 2)
        assert find_noncentrality(count - 1) * math.sqrt(1 - edge) == pytest.approx(unpaired)
    assert [round(find_break_even(count), 2) for count in (3, 5, 12, 20)] == [0.56, 0.28, 0.09, 0.05]


def test_the_number_of_seeds_alone_chooses_the_test():
    assert [count for count in range(1, 60) if is_pairing_better(count)] == list(range(34, 60))
    assert find_break_even(34) < CORRELATION < find_break_even(33)


def test_rows_correlate_as_they_were_drawn():
    rng = np.random.default_rng(0)
    shared, own = rng.normal(size=(1, 4000)), rng.normal(size=(3, 4000))
    rows = np.array([[5.0], [-3.0], [0.0]]) + math.sqrt(0.3) * shared + math.sqrt(0.7) * own
    assert estimate_correlation(rows.tolist()) == pytest.approx(0.3, abs=0.03)
    assert estimate_correlation(own.tolist()) == pytest.approx(0.0, abs=0.03)
    two = rows[:2, :7]
    scaled = (two - two.mean(1, keepdims=True)) / two.std(1, keepdims=True)  # equal spreads: Pearson's r
    assert estimate_correlation(scaled.tolist()) == pytest.approx(np.corrcoef(two)[0, 1])


@pytest.mark.parametrize(
    "rows", [[], [[1.0, 2.0, 3.0]], [[1.0, 2.0], [2.0, 1.0]], [[1.0] * 3] * 2, [[math.inf] * 3] * 2]
)
def test_a_correlation_that_cannot_be_told_is_none(rows):
    assert estimate_correlation(rows) is None


# --- a pilot ---


def test_a_pilot_of_three_gives_a_number_and_its_range():
    """Both rows have sd 1: s = √2, 4 degrees of freedom; χ² of 10 and 90 %: 1.064 and 7.779 (printed tables)."""
    need = plan_seeds(1.0, [1.0, 2.0, 3.0], [5.0, 6.0, 7.0])
    assert need.spread == pytest.approx(math.sqrt(2))
    assert need.seeds == 17  # Cohen's table, two groups at d = 1
    low, high = (math.sqrt(2 * 4 / x) for x in (7.779, 1.064))
    assert need.optimistic == next(n for n in range(3, 30) if compute_power([1.0], low, n, paired=False) >= 0.8)
    assert need.pessimistic == count_seeds_needed([1.0], high * math.sqrt(1 - CORRELATION)) > 34  # so it is paired
    assert need.optimistic < need.seeds < need.pessimistic


def test_the_range_of_a_pilot_holds_the_true_number_in_80_of_100_pilots():
    truth, rng = 17, np.random.default_rng(3)
    pilots = [plan_seeds(1.0, *rng.normal(size=(2, 3))) for _ in range(400)]
    held = [need.optimistic <= truth <= need.pessimistic for need in pilots]
    assert np.mean(held) == pytest.approx(0.8, abs=0.06)


def test_a_pilot_without_spread_and_an_effect_that_is_too_small():
    assert plan_seeds(0.1, [1.0] * 3, [2.0] * 3).seeds == 3
    need = plan_seeds(1e-6, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (need.seeds, need.optimistic, need.pessimistic) == (None, None, None)
