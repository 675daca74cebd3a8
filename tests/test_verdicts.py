"""Verdicts on single cells, by hand."""

import json
import math
from dataclasses import asdict, replace

import pytest
from scipy.stats import binomtest

from attnlab.experiments.study_page import drop_constant_column, format_number, tabulate_result
from attnlab.experiments.verdicts import TAGS, Cell, count_verdicts, make_contrast


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
    assert cell(1.0, 1.0, 1.0, share=True, published=1.0).verdict == "reproduced"
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
        (cell(1.0, 2.0, 3.0), "reproduced"),  # 2 ± 2.48
        (cell(5.0, 5.1, 4.9), "not reproduced"),
        (cell(5.0, 5.1), "no verdict"),  # two seeds
        (cell(2.0), "no verdict"),
        (cell(2.0, exact=True), "reproduced"),
        (cell(2.5, exact=True), "not reproduced"),
        (cell(5.0, 5.1, 4.9, published_interval=(4.0, 6.0)), "reproduced"),
        (cell(5.0, 5.1, 4.9, published=None, published_interval=(4.0, 4.5)), "not reproduced"),
        (cell(5.0, 5.1, published_interval=(4.0, 6.0)), "no verdict"),
        (cell(5.0, 5.1, 4.9, sign=1), "same direction"),
        (cell(5.0, 5.1, 4.9, sign=1, published=None), "same direction"),
        (cell(5.0, 5.1, 4.9, sign=-1, published=-2.0), "not reproduced"),
        (cell(-5.0, -5.1, -4.9, sign=-1, published=-2.0), "same direction"),
        (cell(0.0, 5.0, -4.0, sign=1, published=90.0), "not reproduced"),  # the interval holds 0
        (cell(1.0, 2.0, 3.0, sign=1), "reproduced"),
        (cell(1.0, 2.0, 3.0, published=None), "no verdict"),
        (cell(not_run="no data"), "not run"),
    ],
)
def test_verdicts(made, verdict):
    assert made.verdict == verdict
    assert Cell.from_json(json.loads(json.dumps(asdict(made)))) == made


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
    cells += [cell(9.0, exact=True, tags=(tag,)) for tag in TAGS if tag != "erratum"]
    counted = count_verdicts(cells)
    assert counted["official"] == {
        "reproduced": 2, "same direction": 0, "not reproduced": 0, "no verdict": 1, "not run": 0,
    }  # fmt: skip
    assert counted["stand-in"]["not reproduced"] == 3
    assert counted["not run"]["not run"] == 1


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
