"""What a comparison says in words and draws: made of its numbers, and no more than they tell."""

import pytest

from attnlab.commands.compare import figures
from attnlab.commands.compare.comparison_page import table, write
from attnlab.commands.compare.plan import ComparisonRow, Plan
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.commands.compare.summary import findings

LAYERS = [
    {"kind": "encoder-self", "layer": layer, "jsd": 1.0, "residual": 0.5, "cosine": 0.1, "gradient": 2.0, "of": "state"}
    for layer in range(2)
]


def results(**perplexities):
    """Rows of a language model with a perplexity for each seed."""
    rows = tuple(ComparisonRow(name, {"attention": name}) for name in perplexities)
    outcomes = []
    for row, values in zip(rows, perplexities.values(), strict=True):
        inside = {"jsd": 1.0, "residual": 0.5, "cosine": 0.1, "gradient": 2.0, "examples": 7, "of": "state"}
        found = {seed: {"perplexity": x, "inside": inside | {"layers": LAYERS}} for seed, x in enumerate(values)}
        curves = {seed: [(30, x)] for seed, x in enumerate(values)}
        outcomes.append(RowResult(row, found=found, curves=curves))
    plan = Plan("language", rows, ({},), tuple(range(len(values))))
    return ComparisonResults(plan, "language", "test", tuple(outcomes))


def test_a_difference_is_told_with_its_side_and_size_where_the_test_tells_it():
    """coda is 5.1, 4.9 and 5 lower: t is large. dagpam differs by −1, 1 and 3: it could be nothing."""
    found = findings(results(softmax=(10.0, 20.0, 30.0), coda=(4.9, 15.1, 25.0), dagpam=(9.0, 21.0, 33.0)))
    assert found[0].startswith(
        "coda: perplexity is lower than softmax's by 5, which is better (95 % interval −5.25 to −4.75"
    )
    assert found[1].startswith(
        "dagpam: no difference in perplexity from softmax can be told (95 % interval −3.97 to +5.97"
    )
    assert all("3 seeds" in sentence for sentence in found)
    (worse,) = findings(results(softmax=(10.0, 20.0, 30.0), coda=(15.1, 24.9, 35.0)))
    assert "higher than softmax's by 5, which is worse" in worse


def test_a_difference_that_the_number_of_rows_may_explain_is_said_to_be_one():
    """t = −7.5 gives p = 0.017, three times that by Holm's method."""
    rows = {
        "softmax": (10.0, 20.0, 30.0),
        "coda": (9.0, 18.4, 28.7),
        "dagpam": (9.0, 21.0, 33.0),
        "nap": (9.0, 22.0, 31.0),
    }
    told = findings(results(**rows))[0]
    assert told.startswith(
        "coda: a difference in perplexity from softmax does not outlast Holm's correction for all rows"
    )
    assert "(95 % interval, uncorrected, −2.05 to −0.555, Holm's p 0.052" in told


def test_few_seeds_and_constants_have_no_test_and_the_sentence_says_so():
    (few,) = findings(results(**{"softmax": (10.0, 20.0), "coda-cs": (9.0, 18.0)}))
    assert few == "coda-cs: perplexity −1.5 against softmax, over 2 seeds; too few for a test."
    (one,) = findings(results(softmax=(10.0,), coda=(9.0,)))
    assert "over 1 seed; too few" in one
    (constant,) = findings(results(softmax=(10.0, 20.0, 30.0), coda=(9.0, 19.0, 29.0)))
    assert "the same in each, of which a test says nothing" in constant
    assert findings(results(softmax=(1.0, 2.0, 3.0))) == []


def test_the_page_begins_with_what_was_found_and_has_a_table_a_group(tmp_path):
    made = results(softmax=(10.0, 20.0, 30.0), coda=(4.9, 15.1, 25.0))
    text = write(made, tmp_path, {"command": "attnlab compare"}).read_text()
    short = text.split("In short</h2>")[1].split("</section>")[0]
    assert short.startswith("<p>coda: perplexity is lower")
    assert short.count("<table>") == 1
    assert "parameters" not in short
    whole = table(made).columns
    groups = [column for group in ("quality", "inside", "cost") for column in table(made, group).columns[1:]]
    assert sorted(whole[1:]) == sorted(groups)


def test_layers_are_whole_numbers_and_one_evaluation_is_a_mark():
    drawn = figures.all_of(results(softmax=(10.0, 20.0, 30.0), coda=(4.9, 15.1, 25.0)))
    for axis in drawn["inside"][0].axes:
        assert list(axis.get_xticks()) == [0, 1]
    for line in drawn["learning"][0].axes[0].lines:
        assert list(line.get_xdata()) == [30]
        assert line.get_marker() != "None"
        assert line.get_markersize() >= 6
    assert all(float(tick).is_integer() for tick in drawn["learning"][0].axes[0].get_xticks())


@pytest.mark.parametrize("name", ["quality", "differences", "learning", "inside"])
def test_every_figure_says_what_one_sees(name):
    _, says = figures.all_of(results(softmax=(10.0, 20.0, 30.0), coda=(4.9, 15.1, 25.0)))[name]
    assert says.endswith(".")
