"""The sentences, tables and figures of a comparison follow from its numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from attnlab.commands.compare.comparison_page import list_remarks, tabulate, tabulate_differences, write_comparison
from attnlab.commands.compare.figures import draw_figures
from attnlab.commands.compare.plan import ComparisonRow, Plan
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.commands.compare.summary import list_findings, summarise_comparison

LAYERS = [
    {"kind": "encoder-self", "layer": layer, "jsd": 1.0, "residual": 0.5, "cosine": 0.1, "gradient": 2.0, "of": "state"}
    for layer in range(2)
]


def results(**log_perplexities):
    """Rows of a language model with a log-perplexity for each seed."""
    rows = tuple(ComparisonRow(name, {"attention": name}) for name in log_perplexities)
    made = []
    for row, values in zip(rows, log_perplexities.values(), strict=True):
        inside = {"jsd": 1.0, "residual": 0.5, "cosine": 0.1, "gradient": 2.0, "examples": 7, "of": "state"}
        known = {"inside": inside | {"layers": LAYERS}}
        measured = {seed: {"perplexity": math.exp(x), "curve": [(30, x)], **known} for seed, x in enumerate(values)}
        made.append(RowResult(row, measured=measured))
    plan = Plan("language", rows, ({},), tuple(range(len(values))))
    return ComparisonResults(plan, "perplexity", "test", tuple(made))


SOFTMAX = (10.0, 10.1, 9.9)  # of two rows with this spread: e = 0.1·√(2/3) = 0.0816, 4 degrees of freedom, t = 2.776


def shift(by):
    return tuple(x + by for x in SOFTMAX)


def test_a_difference_is_told_with_its_side_and_size_where_the_test_tells_it():
    found = list_findings(results(softmax=SOFTMAX, coda=shift(-5), dagpam=shift(0.1)))
    assert found[0].startswith(
        "coda: log-perplexity (nats) is 5 lower than softmax's, which is better (95 % interval −5.23 to −4.77"
    )
    assert found[1].startswith(
        "dagpam: no significant difference in log-perplexity (nats) from softmax (95 % interval −0.127 to +0.327"
    )
    assert all("3 seeds; detectable: 0.31)" in sentence for sentence in found)  # 3.761 · 0.0816
    (worse,) = list_findings(results(softmax=SOFTMAX, coda=shift(5)))
    assert "5 higher than softmax's, which is worse" in worse


def test_a_difference_that_the_number_of_rows_may_explain_is_said_to_be_one():
    """t = −0.3/0.0816 = −3.67 with 4 degrees of freedom gives p = 0.0213, three times that by Holm's method."""
    told = list_findings(results(softmax=SOFTMAX, coda=shift(-0.3), dagpam=shift(0.1), nap=shift(0.01)))[0]
    assert told.startswith("coda: the difference in log-perplexity (nats) from softmax is not significant after Holm's")
    assert "(95 % interval without correction −0.527 to −0.0733, Holm's p 0.064" in told


def test_few_seeds_and_constants_have_no_test_and_the_sentence_says_so():
    (few,) = list_findings(results(**{"softmax": (10.0, 20.0), "coda-cs": (9.0, 18.0)}))
    assert few == (
        "coda-cs: log-perplexity (nats) differs from softmax's by −1.5 over 2 seeds (a test needs at least 3)."
    )
    (one,) = list_findings(results(softmax=(10.0,), coda=(9.0,)))
    assert "over 1 seed (a test needs" in one
    (constant,) = list_findings(results(softmax=(10.0,) * 3, coda=(9.0,) * 3))
    assert "every seed has the same" in constant
    assert list_findings(results(softmax=(1.0, 2.0, 3.0))) == []


def test_the_page_begins_with_what_was_found_and_has_a_table_a_group(tmp_path):
    made = results(softmax=SOFTMAX, coda=shift(-5))
    text = write_comparison(made, tmp_path, {"command": "attnlab compare"}).read_text()
    top = text.split("class='findings'")[1].split("</section>")[0]
    assert "On the test part, coda has the lowest log-perplexity (nats) of 2 rows, 5 ± 0.25; softmax, the first" in top
    assert "coda (−5) (unpaired t-test" in top
    short = text.split("Quality</h2>")[1].split("</section>")[0]
    assert short.count("<table>") == short.count("<img") == 1
    assert "parameters" not in short
    folded = text.split("<details>", 1)[1]
    assert "coda: log-perplexity (nats) is 5 lower" in folded
    whole = tabulate(made).columns
    groups = [column for group in ("quality", "inside", "cost") for column in tabulate(made, group).columns[1:]]
    assert sorted(whole[1:]) == sorted(groups)


def test_every_measure_says_beside_its_difference_what_could_be_detected_and_by_which_test(tmp_path):
    made = results(softmax=SOFTMAX, coda=shift(-5), dagpam=shift(0.1))
    table = tabulate_differences(made)
    lines = [dict(zip(table.columns, line, strict=True)) for line in table.rows]
    assert [(line["measure"], line["attention"]) for line in lines[:3]] == [
        ("log-perplexity (nats)", "coda"), ("log-perplexity (nats)", "dagpam"), ("perplexity", "coda"),
    ]  # fmt: skip
    assert {line["measure"] for line in lines} == {measure.name for measure in made.measures}
    shown = [lines[0][key] for key in ("difference", "detectable", "t-test", "correlation over seeds")]
    assert shown == ["-5 ± 0.23", "0.31", "unpaired", "1.00"]
    wide = dict(zip(tabulate(made).columns, tabulate(made).rows[1], strict=True))
    assert wide["detectable"] == "0.31"
    stored = made.as_json()
    assert stored["correlation_over_seeds"]["log-perplexity (nats)"] == pytest.approx(1.0)
    against = stored["rows"][1]["measures"]["log-perplexity (nats)"]["against_first"]
    assert against["test"] == "unpaired"
    assert against["detectable"] == pytest.approx(3.761 * 0.1 * (2 / 3) ** 0.5, rel=1e-4)
    page = write_comparison(made, tmp_path, {"command": "attnlab compare"}).read_text()
    assert "correlation over seeds" in page
    assert "unpaired (Welch" in page
    assert "0.56" in page  # where pairing would pay


def test_many_seeds_are_paired_and_the_page_says_so():
    """From 34 seeds on pairing costs less than a correlation of 0.03 gains; the values have no say in it."""
    rng = np.random.default_rng(0)
    for count, paired in ((33, False), (34, True)):
        made = results(softmax=tuple(rng.normal(size=count)), coda=tuple(rng.normal(size=count)))
        assert made.is_paired == paired
        (contrast,) = made.contrast_rows(made.main_measure).values()
        assert contrast.test == ("paired" if paired else "unpaired")
        assert any(line.startswith(f"The t-test against softmax is {contrast.test}") for line in list_remarks(made))


def test_a_translator_is_judged_by_its_log_perplexity_and_then_by_bleu():
    made = results(softmax=SOFTMAX, coda=shift(-5))
    rows = [
        replace(row, measured={seed: values | {"scores": {"BLEU": 40.0 + seed}, "valid_loss": 1.0 + seed}
                               for seed, values in row.measured.items()})
        for row in made.rows
    ]  # fmt: skip
    made = replace(made, rows=tuple(rows))
    assert [measure.name for measure in made.measures][:3] == [
        "log-perplexity (nats)", "validation log-perplexity (nats)", "BLEU",
    ]  # fmt: skip
    first, second = list_findings(made)
    assert first.startswith("coda: log-perplexity (nats) is 5 lower")
    assert second.startswith("coda: no significant difference in BLEU")


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
    assert "coda has the lowest log-perplexity" in one
    assert "3 seeds" in two
    same = summarise_comparison(results(softmax=(10.0, 20.0, 30.0), dagpam=(9.0, 21.0, 33.0)))
    assert "it is the first row" in same[0]
    assert "No row differs significantly from softmax" in same[1]
    assert len(summarise_comparison(results(softmax=(10.0, 20.0, 30.0)))) == 1
