"""The sentences, tables and figures of a comparison follow from its numbers."""

import pytest

from attnlab.commands.compare.comparison_page import tabulate, write_comparison
from attnlab.commands.compare.figures import draw_figures
from attnlab.commands.compare.plan import ComparisonRow, Plan
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.commands.compare.summary import list_findings, summarise_comparison

LAYERS = [
    {"kind": "encoder-self", "layer": layer, "jsd": 1.0, "residual": 0.5, "cosine": 0.1, "gradient": 2.0, "of": "state"}
    for layer in range(2)
]


def results(**perplexities):
    """Rows of a language model with a perplexity for each seed."""
    rows = tuple(ComparisonRow(name, {"attention": name}) for name in perplexities)
    made = []
    for row, values in zip(rows, perplexities.values(), strict=True):
        inside = {"jsd": 1.0, "residual": 0.5, "cosine": 0.1, "gradient": 2.0, "examples": 7, "of": "state"}
        known = {"inside": inside | {"layers": LAYERS}}
        measured = {seed: {"perplexity": x, "curve": [(30, x)], **known} for seed, x in enumerate(values)}
        made.append(RowResult(row, measured=measured))
    plan = Plan("language", rows, ({},), tuple(range(len(values))))
    return ComparisonResults(plan, "language", "test", tuple(made))


def test_a_difference_is_told_with_its_side_and_size_where_the_test_tells_it():
    """coda is 5.1, 4.9 and 5 lower: t is large. dagpam differs by −1, 1 and 3: it could be nothing."""
    found = list_findings(results(softmax=(10.0, 20.0, 30.0), coda=(4.9, 15.1, 25.0), dagpam=(9.0, 21.0, 33.0)))
    assert found[0].startswith(
        "coda: perplexity is 5 lower than softmax's, which is better (95 % interval −5.25 to −4.75"
    )
    assert found[1].startswith(
        "dagpam: no significant difference in perplexity from softmax (95 % interval −3.97 to +5.97"
    )
    assert all("3 seeds" in sentence for sentence in found)
    (worse,) = list_findings(results(softmax=(10.0, 20.0, 30.0), coda=(15.1, 24.9, 35.0)))
    assert "5 higher than softmax's, which is worse" in worse


def test_a_difference_that_the_number_of_rows_may_explain_is_said_to_be_one():
    """t = −7.5 gives p = 0.017, three times that by Holm's method."""
    rows = {
        "softmax": (10.0, 20.0, 30.0),
        "coda": (9.0, 18.4, 28.7),
        "dagpam": (9.0, 21.0, 33.0),
        "nap": (9.0, 22.0, 31.0),
    }
    told = list_findings(results(**rows))[0]
    assert told.startswith("coda: the difference in perplexity from softmax is not significant after Holm's correction")
    assert "(95 % interval without correction −2.05 to −0.555, Holm's p 0.052" in told


def test_few_seeds_and_constants_have_no_test_and_the_sentence_says_so():
    (few,) = list_findings(results(**{"softmax": (10.0, 20.0), "coda-cs": (9.0, 18.0)}))
    assert few == "coda-cs: perplexity differs from softmax's by −1.5 over 2 seeds (a test needs at least 3)."
    (one,) = list_findings(results(softmax=(10.0,), coda=(9.0,)))
    assert "over 1 seed (a test needs" in one
    (constant,) = list_findings(results(softmax=(10.0, 20.0, 30.0), coda=(9.0, 19.0, 29.0)))
    assert "every seed has the same" in constant
    assert list_findings(results(softmax=(1.0, 2.0, 3.0))) == []


def test_the_page_begins_with_what_was_found_and_has_a_table_a_group(tmp_path):
    made = results(softmax=(10.0, 20.0, 30.0), coda=(4.9, 15.1, 25.0))
    text = write_comparison(made, tmp_path, {"command": "attnlab compare"}).read_text()
    top = text.split("class='findings'")[1].split("</section>")[0]
    assert "On the test part, coda has the lowest perplexity of 2 rows, 15 ± 25; softmax, the first row, has 20" in top
    assert "coda (−5) (paired t-test" in top
    short = text.split("Quality</h2>")[1].split("</section>")[0]
    assert short.count("<table>") == short.count("<img") == 1
    assert "parameters" not in short
    folded = text.split("<details>", 1)[1]
    assert "coda: perplexity is 5 lower" in folded
    whole = tabulate(made).columns
    groups = [column for group in ("quality", "inside", "cost") for column in tabulate(made, group).columns[1:]]
    assert sorted(whole[1:]) == sorted(groups)


def test_layers_are_whole_numbers_and_one_evaluation_is_a_mark():
    drawn = draw_figures(results(softmax=(10.0, 20.0, 30.0), coda=(4.9, 15.1, 25.0)))
    for axis in drawn["inside"][0].axes:
        assert list(axis.get_xticks()) == [0, 1]
    for line in drawn["learning"][0].axes[0].lines:
        assert list(line.get_xdata()) == [30]
        assert line.get_marker() != "None"
        assert line.get_markersize() >= 6
    assert all(float(tick).is_integer() for tick in drawn["learning"][0].axes[0].get_xticks())


@pytest.mark.parametrize("name", ["quality", "differences", "learning", "inside"])
def test_every_figure_says_what_one_sees(name):
    _, caption = draw_figures(results(softmax=(10.0, 20.0, 30.0), coda=(4.9, 15.1, 25.0)))[name]
    assert caption.endswith(".")


def test_the_summary_says_what_can_be_said():
    one, two = summarise_comparison(results(softmax=(10.0, 20.0), coda=(9.0, 18.0)))
    assert "coda has the lowest perplexity" in one
    assert "3 seeds" in two
    same = summarise_comparison(results(softmax=(10.0, 20.0, 30.0), dagpam=(9.0, 21.0, 33.0)))
    assert "it is the first row" in same[0]
    assert "No row differs significantly from softmax" in same[1]
    assert len(summarise_comparison(results(softmax=(10.0, 20.0, 30.0)))) == 1
