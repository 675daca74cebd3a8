"""Verdicts on single cells, by hand."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp

from attnlab.experiments.cell_text import format_number
from attnlab.experiments.power import compute_power
from attnlab.experiments.study_page import drop_constant_column, tabulate_result
from attnlab.experiments.verdicts import (
    STAND_INS,
    VERDICTS,
    Cell,
    correct_claims,
    count_verdicts,
    list_numbers,
    make_contrast,
)
from attnlab.report.page import MARKS, Table


def cell(*values, **about):
    return Cell(**{"item": "a", "row": "r", "column": "c", "published": 2.0, "values": values} | about)


def test_the_interval_of_correlations_is_fishers_and_stays_between_minus_one_and_one():
    found = cell(-0.98, -0.2, 0.01, correlation=True)
    z = [math.atanh(r) for r in (-0.98, -0.2, 0.01)]
    mean = sum(z) / 3
    spread = math.sqrt(sum((x - mean) ** 2 for x in z) / 2 / 3) * 4.303
    assert found.interval == pytest.approx((math.tanh(mean - spread), math.tanh(mean + spread)), abs=1e-3)
    assert cell(1.0, 1.0, 1.0, correlation=True).interval == pytest.approx((1.0, 1.0))
    assert Cell.from_json(asdict(found)) == found
    stored = asdict(found)
    del stored["correlation"], stored["share"]  # as written before there were any
    assert not Cell.from_json(stored).correlation
    with pytest.raises(ValueError, match="correlations"):
        cell(1.5, correlation=True)


@pytest.mark.parametrize(("did", "count"), [(0, 20), (1, 20), (13, 20), (20, 20), (3, 3)])
def test_the_interval_of_a_share_of_seeds_is_the_exact_one_of_scipy(did, count):
    found = cell(*[1.0] * did, *[0.0] * (count - did), share=True)
    expected = binomtest(did, count).proportion_ci(0.95, method="exact")
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert Cell.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_a_share_is_of_seeds_that_did_it_or_did_not():
    assert cell(1.0, 1.0, 1.0, share=True, published=1.0).verdict == "open"  # from 0.29 to 1
    assert cell(*[1.0] * 80, share=True, published=1.0).verdict == "reproduced"
    assert cell(*[0.0] * 20, share=True, published=1.0).verdict == "different"
    with pytest.raises(ValueError, match="contrast"):
        cell(1.0, share=True, sign=1)
    assert cell(1.0, 0.0, share=True).interval is None
    with pytest.raises(ValueError, match="share"):
        cell(0.5, share=True)
    with pytest.raises(ValueError, match="one of"):
        cell(1.0, share=True, exact=True)
    with pytest.raises(ValueError, match="interval"):
        make_contrast(cell(1.0, share=True), cell(0.0, share=True, published=1.0))


def test_what_differs_alike_in_every_row_is_said_once_above_them():
    alike = [cell(1.0, row=row, tags=("other data", "other model")) for row in "ab"]
    title, table = drop_constant_column("Table", tabulate_result(alike))
    assert title == "Table (other data, other model)"
    assert "what differs" not in table.columns
    assert all(len(row) == len(table.columns) for row in table.rows)
    for some in ([*alike, cell(1.0)], alike[:1]):
        assert drop_constant_column("Table", tabulate_result(some)) == ("Table", tabulate_result(some))
    assert drop_constant_column("Table", tabulate_result([cell(1.0), cell(2.0)]))[0] == "Table"


@pytest.mark.parametrize(
    ("values", "t"),  # two-sided 95 % points of Student's t, as printed in tables
    [
        ((1.0, 2.0, 4.0), 4.303),
        ((1.0, 2.0, 4.0, 3.0), 3.182),
        ((1.0, 2.0, 4.0, 3.0, 7.0), 2.776),
        (tuple(range(20)), 2.093),
    ],
)
def test_the_interval_is_students(values, t):
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
    low, high = cell(*values).interval
    assert high - mean == pytest.approx(t * deviation / math.sqrt(len(values)), rel=2e-4)
    assert mean - low == pytest.approx(high - mean)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (cell(1.99, 2.0, 2.01), "reproduced"),  # 2 ± 0.025, margin 0.1
        (cell(1.0, 2.0, 3.0), "open"),  # 2 ± 2.48: too wide, though it contains the published number
        (cell(2.061, 2.06, 2.062), "reproduced"),  # narrow, beside the published number and within 5 % of it
        (cell(2.09, 2.1, 2.11), "open"),  # 2.1 ± 0.025 contains the edge
        (cell(5.0, 5.1, 4.9), "different"),  # 5 ± 0.25
        (cell(5.0, 5.1), "no verdict"),  # two seeds
        (cell(2.0), "no verdict"),
        (cell(2.0, 2.1, 2.2, margin=0.5), "reproduced"),  # 2.1 ± 0.25, the paper's own spread
        (cell(2.0, 2.1, 2.2, margin=0.3), "open"),
        (cell(2.0, exact=True), "reproduced"),
        (cell(2.04, exact=True), "reproduced"),  # printed as 2.0
        (cell(2.06, exact=True), "different"),  # 3 % away
        (cell(24_999.0, published=25_000, exact=True), "different"),
        (cell(0.001, -0.001, 0.0, published=0.0), "reproduced"),  # printed as 0.0: margin 0.05, the rounding
        (cell(0.1, 0.11, 0.12, published=0.0), "different"),
        (cell(5.0, 5.1, 4.9, published_interval=(4.0, 6.0)), "reproduced"),
        (cell(5.0, 5.1, 4.9, published=None, published_interval=(4.0, 5.1)), "open"),
        (cell(5.0, 5.1, 4.9, published=None, published_interval=(4.0, 4.5)), "different"),
        (cell(5.0, 5.1, published_interval=(4.0, 6.0)), "no verdict"),
        (cell(5.0, 5.1, 4.9, sign=1), "same direction"),
        (cell(5.0, 5.1, 4.9, sign=1, published=None), "same direction"),
        (cell(5.0, 5.1, 4.9, sign=1, published=5.0), "reproduced"),
        (cell(5.0, 5.1, 4.9, sign=-1, published=-2.0), "opposite"),
        (cell(-5.0, -5.1, -4.9, sign=-1, published=-2.0), "same direction"),
        (cell(0.0, 5.0, -4.0, sign=1, published=90.0), "open"),  # the interval holds 0
        (cell(1.0, 2.0, 3.0, sign=1), "open"),
        (cell(0.02, 0.0, 0.03, sign=1, published=0.01), "open"),  # within a rounded margin, but not told from 0
        (cell(2.0, 2.0, 2.0, sign=1, published=None), "same direction"),  # no seed changes it
        (cell(2.0, exact=True, sign=-1, published=None), "opposite"),
        (cell(0.0, exact=True, sign=1, published=None), "different"),
        (cell(1.99, 2.0, 2.01, tags=("one model",)), "no verdict"),
        (cell(5.0, 5.1, 4.9, sign=1, tags=("one model",)), "no verdict"),
        (cell(1.0, 2.0, 3.0, published=None), "no verdict"),
        (cell(not_run="no data"), "not run"),
    ],
)
def test_verdicts(made, verdict):
    assert made.verdict == verdict
    assert Cell.from_json(json.loads(json.dumps(asdict(made)))) == made


def test_the_margin_is_five_per_cent_or_the_rounding_or_the_papers_own_spread():
    assert cell(1.0, published=34.53).bounds == pytest.approx((34.53 * 0.95, 34.53 * 1.05))
    assert cell(1.0, published=0.06).bounds == pytest.approx((0.055, 0.065))
    assert cell(1.0, published=29.8, margin=3.7).bounds == pytest.approx((26.1, 33.5))
    assert cell(1.0, published=39.47, exact=True).bounds == pytest.approx((39.465, 39.475))
    assert cell(1.0, published=60338, exact=True).bounds == (60337.5, 60338.5)
    assert cell(1.0, published=0.1, sign=1).bounds == pytest.approx((0.0, 0.2))  # of two rounded numbers
    assert cell(1.0, published=None, sign=1).bounds is None


def test_holms_correction_over_the_claims_of_a_paper_decides_the_direction():
    """Holm's own example: of p = 0.01, 0.02, 0.03, 0.04 the corrected ones are 0.04, 0.06, 0.06, 0.06.

    With three seeds −t, 0 and t around a mean of 1 the p of the t-test is 1 − 1/√(1 + 2t²/3), solved here for t.
    """
    wanted = (0.04, 0.01, 0.03, 0.02)
    spreads = [math.sqrt(1.5 * (1 / (1 - p) ** 2 - 1)) for p in wanted]
    claims = [cell(1 - t, 1.0, 1 + t, sign=1, row=str(k)) for k, t in enumerate(spreads)]
    level = [cell(1.9, 2.0, 2.1), cell(5.0, 5.1, 4.9, sign=1, tags=("one model",)), cell(not_run="no data", sign=1)]
    again = replace(claims[0], item="b")  # the same differences: the same test
    assert [claim.p for claim in claims] == pytest.approx(wanted)
    corrected = correct_claims([*claims, *level, again])
    assert [each.holm for each in corrected] == pytest.approx([0.06, 0.04, 0.06, 0.06, None, None, None, 0.06])
    assert [each.verdict for each in corrected[:4]] == ["open", "same direction", "open", "open"]
    assert [claim.verdict for claim in claims] == ["same direction"] * 4  # each by itself
    assert correct_claims(corrected) == corrected


def test_a_correlation_is_tested_by_fishers_z():
    found = cell(0.9, 0.95, 0.97, correlation=True, sign=1, published=None)
    assert found.p == pytest.approx(ttest_1samp(np.arctanh(found.values), 0).pvalue)
    assert found.verdict == "same direction"
    assert cell(-0.98, 0.2, 0.1, correlation=True, sign=-1, published=None).verdict == "open"


def test_an_open_cell_says_how_many_seeds_it_needs():
    """By hand: d = mean/sd = 1 needs 10 pairs for power 0.8 at 0.05 (Cohen's tables), d = 0.5 needs 34."""
    contrast = cell(0.0, 1.0, 2.0, sign=1, published=None)
    assert (contrast.seeds_needed, contrast.outcome) == (10, "open: 10 seeds")
    assert cell(-0.5, 0.5, 1.5, sign=1, published=None).seeds_needed == 34
    assert replace(contrast, family=(contrast.p,) * 27).seeds_needed == 21  # at the level 0.05/27, by simulation
    assert cell(1.0, 2.0, 3.0, margin=1.0).seeds_needed == 13  # both ends at 1 sd, by simulation
    assert cell(0.3, 1.3, 2.3, published=0.0, margin=0.7).seeds_needed == 24  # the nearer end at 0.6 sd
    assert cell(*[1.0] * 20, share=True, published=1.0).seeds_needed == 72  # 0.025^(1/72) = 0.950
    never = cell(-1.0, 0.0, 1.0, sign=1, published=None)
    assert (never.seeds_needed, never.outcome) == (None, "open: over 10,000 seeds")
    assert (cell(5.0, 5.1, 4.9).seeds_needed, cell(5.0, 5.1, 4.9).outcome) == (None, "different")


@pytest.mark.parametrize("distances", [(0.7,), (0.7, 1.3), (40.0, 0.9)])
def test_the_power_is_that_of_simulated_intervals(distances):
    draws = np.random.default_rng(0).normal(size=(20_000, 12))
    half = 2.201 * draws.std(1, ddof=1) / math.sqrt(12)
    decided = draws.mean(1) - half > -distances[0]
    if len(distances) == 2:
        decided &= draws.mean(1) + half < distances[1]
    assert compute_power(distances, 1.0, 12) == pytest.approx(decided.mean(), abs=0.015)


def test_a_published_number_counts_once_for_all_cells_that_are_compared_with_it():
    cells = [cell(1.0), cell(1.0, column="as corrected", number="a, r, c"), cell(1.0, published=None, sign=1, row="d")]
    cells.append(make_contrast(cells[0], cell(2.0, row="b", published=3.0)))
    assert list_numbers(cells) == {"a, r, c"}
    assert list_numbers([cell(1.0, published=None, published_interval=(0.0, 1.0), row="e")]) == {"a, e, c"}


def test_what_the_paper_says_is_of_this_version_and_the_values_are_of_their_time():
    stored = cell(1.0, 2.0, note="as it was run", published=9.0)
    known = cell(not_run="no runs", published=None, tags=("one model",), sign=-1, number="x")
    found = stored.restate(known)
    assert (found.values, found.note, found.not_run) == ((1.0, 2.0), "as it was run", "")
    assert (found.published, found.tags, found.sign, found.number) == (None, ("one model",), -1, "x")


def test_a_contrast_is_within_each_seed():
    a, b = (
        cell(5.0, 6.0, 9.0, published=7.0, column="x"),
        cell(4.0, 5.0, 7.0, published=4.0, column="y", tags=("other data",)),
    )
    made = make_contrast(a, b)
    assert made.values == (1.0, 1.0, 2.0)
    assert (made.published, made.sign, made.column, made.tags) == (3.0, 1, "x − y", ("other data",))
    assert make_contrast(b, a).sign == -1
    assert make_contrast(a, cell(not_run="why", published=1.0)).not_run == "why"
    with pytest.raises(ValueError, match="same seeds"):
        make_contrast(a, cell(1.0, published=1.0))
    with pytest.raises(ValueError, match="no contrast"):
        make_contrast(a, replace(b, published=7.0))


def test_groups_are_counted_apart():
    cells = [
        cell(1.0, 2.0, 3.0),
        cell(1.0, 2.0, 3.0, tags=("erratum",)),
        cell(9.0),
        cell(not_run="x", tags=("other data",)),
    ]
    cells += [cell(9.0, exact=True, tags=(tag,)) for tag in STAND_INS]
    counted = count_verdicts(cells)
    assert counted["official"] == dict.fromkeys(VERDICTS, 0) | {"open": 2, "no verdict": 1}
    assert counted["stand-in"]["different"] == 4
    assert counted["not run"]["not run"] == 1


def test_every_verdict_has_a_mark_of_its_own_and_what_is_not_judged_has_none():
    assert set(MARKS) == set(VERDICTS)
    judged = [MARKS[verdict] for verdict in VERDICTS[:-2]]
    assert len(set(judged)) == len(judged)
    assert "none" not in judged
    page = Table(["v"], [["open: 7 seeds"], ["opposite"]], verdicts="v").html()
    assert "<span class='verdict open'>open: 7 seeds</span>" in page
    assert "<span class='verdict against'>opposite</span>" in page


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"values": ()}, "a, r, c must have either"),
        ({"values": (1.0,), "not_run": "no"}, "either"),
        ({"values": (math.nan,)}, "finite"),
        ({"values": (1.0,), "tags": ("other dat",)}, r"unknown tag 'other dat' \(did you mean 'other data'\?\)"),
        ({"values": (1.0, 2.0), "exact": True}, "exact.* got 2"),
        ({"values": (1.0,), "published_interval": (2.0, 1.0)}, "lower end"),
    ],
)
def test_a_cell_that_says_nothing_clear_is_refused(about, message):
    with pytest.raises(ValueError, match=message):
        cell(**about)


def test_numbers_are_read_as_they_are():
    assert [format_number(x) for x in (60338.0, 0.04344, 12611.4, -0.5, 0.0, 1e13)] == [
        "60,338", "0.04344", "12,611", "-0.5", "0", "10,000,000,000,000",
    ]  # fmt: skip
