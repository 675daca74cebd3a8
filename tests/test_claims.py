"""Verdicts by hand, and a study from the command line: run, interrupted, repeated, written."""

import csv
import json
import math
import os
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from scipy.stats import binomtest
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.experiments.reproduction import ItemResult, StudyTerms, reproduce
from attnlab.experiments.study import Findings, Item, Setting, Study
from attnlab.experiments.study_page import brief, number, outcome_table, write
from attnlab.experiments.verdicts import TAGS, Cell, contrast, tally
from attnlab.studies import STUDIES, open_study
from attnlab.studies.snell2021.datasets import ROWS, table9

CPU = torch.device("cpu")
HOSTILE = "<script>alert(1)</script>"


def cell(*values, **about):
    return Cell(**{"item": "a", "row": "r", "column": "c", "published": 2.0, "values": values} | about)


def test_the_interval_of_correlations_is_fishers_and_stays_between_minus_one_and_one():
    found = cell(-0.98, -0.2, 0.01, correlation=True)
    z = [math.atanh(r) for r in (-0.98, -0.2, 0.01)]
    mean = sum(z) / 3
    spread = math.sqrt(sum((x - mean) ** 2 for x in z) / 2 / 3) * 4.303
    assert found.interval == pytest.approx((math.tanh(mean - spread), math.tanh(mean + spread)), abs=1e-3)
    assert cell(1.0, 1.0, 1.0, correlation=True).interval == pytest.approx((1.0, 1.0))
    assert Cell.from_json(found.as_json()) == found
    stored = found.as_json()
    del stored["correlation"], stored["share"]  # as written before there were any
    assert not Cell.from_json(stored).correlation
    with pytest.raises(ValueError, match="not all between −1 and 1"):
        cell(1.5, correlation=True)


@pytest.mark.parametrize(("did", "count"), [(0, 20), (1, 20), (13, 20), (20, 20), (3, 3)])
def test_the_interval_of_a_share_of_seeds_is_the_exact_one_of_scipy(did, count):
    found = cell(*[1.0] * did, *[0.0] * (count - did), share=True)
    expected = binomtest(did, count).proportion_ci(0.95, method="exact")
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert Cell.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_a_share_is_of_seeds_that_did_it_or_did_not():
    assert cell(1.0, 1.0, 1.0, share=True, published=1.0).verdict == "reproduced"
    assert cell(1.0, 0.0, share=True).interval is None
    with pytest.raises(ValueError, match="not all 0 or 1, as in a share of seeds"):
        cell(0.5, share=True)
    with pytest.raises(ValueError, match="exact, a correlation, or a share of seeds: one of them"):
        cell(1.0, share=True, exact=True)
    with pytest.raises(ValueError, match="the difference of two has no interval"):
        contrast(cell(1.0, share=True), cell(0.0, share=True, published=1.0))


def test_what_differs_alike_in_every_row_is_said_once_above_them():
    alike = [cell(1.0, row=row, tags=("other data", "other model")) for row in "ab"]
    title, table = brief("Table", outcome_table(alike))
    assert title == "Table (other data, other model)"
    assert "what differs" not in table.columns
    assert all(len(row) == len(table.columns) for row in table.rows)
    for some in ([*alike, cell(1.0)], alike[:1]):
        assert brief("Table", outcome_table(some)) == ("Table", outcome_table(some))
    assert brief("Table", outcome_table([cell(1.0), cell(2.0)]))[0] == "Table"


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "here").write_text("")
    with pytest.raises(ValueError, match="here is a file; give a folder"):
        reproduce(open_study("snell2021"), StudyTerms("smoke", CPU), tmp_path / "here", only=["table9"])


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
    assert Cell.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_a_contrast_is_within_each_seed():
    a, b = (
        cell(5.0, 6.0, 9.0, published=7.0, column="x"),
        cell(4.0, 5.0, 7.0, published=4.0, column="y", tags=("other data",)),
    )
    made = contrast(a, b)
    assert made.values == (1.0, 1.0, 2.0)
    assert (made.published, made.sign, made.column, made.tags) == (3.0, 1, "x − y", ("other data",))
    assert contrast(b, a).sign == -1
    assert contrast(a, cell(not_run="why", published=1.0)).not_run == "why"
    with pytest.raises(ValueError, match="a contrast is within a seed"):
        contrast(a, cell(1.0, published=1.0))
    with pytest.raises(ValueError, match="draws no contrast"):
        contrast(a, replace(b, published=7.0))


def test_groups_are_counted_apart():
    cells = [
        cell(1.0, 2.0, 3.0),
        cell(1.0, 2.0, 3.0, tags=("erratum",)),
        cell(9.0),
        cell(not_run="x", tags=("other data",)),
    ]
    cells += [cell(9.0, exact=True, tags=(tag,)) for tag in TAGS if tag != "erratum"]
    counted = tally(cells)
    assert counted["official"] == {
        "reproduced": 2, "same direction": 0, "not reproduced": 0, "no verdict": 1, "not run": 0,
    }  # fmt: skip
    assert counted["stand-in"]["not reproduced"] == 3
    assert counted["not run"]["not run"] == 1


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"values": ()}, "a, r, c must have values, or a reason why"),
        ({"values": (1.0,), "not_run": "no"}, "and not both"),
        ({"values": (math.nan,)}, "not all finite"),
        ({"values": (1.0,), "tags": ("other dat",)}, r"unknown tag 'other dat' \(did you mean 'other data'\?\)"),
        ({"values": (1.0, 2.0), "exact": True}, "is exact, and has 2 values"),
        ({"values": (1.0,), "published_interval": (2.0, 1.0)}, "ends before it begins"),
    ],
)
def test_a_cell_that_says_nothing_clear_is_refused(about, message):
    with pytest.raises(ValueError, match=message):
        cell(**about)


class Bench:
    """A study of two items that counts its runs; the second can be made to fail."""

    def __init__(self):
        self.runs, self.broken = [], False
        items = {"first": Item("First", self.first), "second": Item("Second", self.second, {"smoke": 2, "small": 4})}
        self.study = Study("bench", f"A bench {HOSTILE}", items)

    def first(self, setting):
        self.runs.append(("first", setting.seeds))
        figure = Figure()
        figure.subplots().plot([0, 1])
        values = tuple(1.0 + seed for seed in setting.seeds)
        return Findings([cell(*values, item="first", note=HOSTILE)], {"line": (figure, "a line")}, ("a remark",))

    def second(self, setting):
        if self.broken:
            raise KeyboardInterrupt
        self.runs.append(("second", setting.seeds))
        return Findings(
            [cell(*map(float, setting.seeds), item="second"), cell(item="second", row="q", not_run="no data")]
        )

    def run(self, out, **options):
        terms = StudyTerms(
            options.pop("scale", "smoke"), CPU, options.pop("seeds", None), command="attnlab reproduce bench"
        )
        return reproduce(self.study, terms, out, **options)


def test_what_is_finished_survives_an_interruption(tmp_path):
    bench = Bench()
    bench.broken = True
    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path)
    bench.broken = False
    told = []
    outcomes = bench.run(tmp_path, note=told.append)
    assert bench.runs == [("first", (0, 1, 2)), ("second", (0, 1))]
    assert told[0] == "first: already there, not run again"
    assert [outcome.config.item for outcome in outcomes] == ["first", "second"]
    again = bench.run(tmp_path)
    assert [vars(outcome) for outcome in again] == [vars(outcome) for outcome in outcomes]
    assert len(bench.runs) == 2


def test_other_seeds_another_edition_and_again_run_anew(tmp_path):
    bench = Bench()
    bench.run(tmp_path, only=["first"])
    bench.run(tmp_path, only=["first"], seeds=5)
    assert bench.runs[-1] == ("first", (0, 1, 2, 3, 4))
    bench.study = replace(bench.study, items={"first": Item("First", bench.first, edition=2)})
    bench.run(tmp_path)
    bench.run(tmp_path, again=True)
    assert len(bench.runs) == 4
    assert len(list((tmp_path / "items").iterdir())) == 3


def test_items_that_were_not_asked_for_are_shown_as_they_last_were(tmp_path):
    bench = Bench()
    bench.run(tmp_path, only=["second"])
    outcomes = bench.run(tmp_path, only=["first"])
    assert [outcome.config.item for outcome in outcomes] == ["first", "second"]
    assert len(bench.runs) == 2
    (small,) = bench.run(tmp_path, only=["second"], scale="small")  # scales are not mixed
    assert small.config.seeds == (0, 1, 2, 3)


def test_everything_is_written(tmp_path):
    bench = Bench()
    outcomes = bench.run(tmp_path, only=["first"])
    page = write(bench.study, outcomes, tmp_path).read_text()
    assert HOSTILE not in page
    assert page.count("<img") == 1
    assert "no result in this folder: second" in page
    whole = json.loads((tmp_path / "results.json").read_text())
    assert whole["items_without_result"] == ["second"]
    about = whole["items"][0]["about"]
    assert {"hardware", "torch", "python", "attnlab", "commit", "command", "begun", "wall_s"} <= set(about)
    assert whole["items"][0]["config"]["seeds"] == [0, 1, 2]
    outcomes = bench.run(tmp_path)
    write(bench.study, outcomes, tmp_path)
    rows = list(csv.DictReader((tmp_path / "cells.csv").read_text().splitlines()))
    assert [(row["item"], row["verdict"], row["group"]) for row in rows] == [
        ("first", "reproduced", "official"), ("second", "no verdict", "official"), ("second", "not run", "not run"),
    ]  # fmt: skip
    assert [float(x) for x in rows[0]["values"].split()] == [1.0, 2.0, 3.0]
    assert not list(tmp_path.rglob(".*"))


def test_a_damaged_result_is_named(tmp_path):
    bench = Bench()
    bench.run(tmp_path, only=["first"])
    (path,) = (tmp_path / "items").iterdir()
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=f"{path.name} is not the result of an item.*delete it"):
        bench.run(tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not the result of an item"):
        ItemResult.read(path)


def test_an_item_with_a_cell_of_another_is_refused(tmp_path):
    for cells in ([cell(1.0, item="other")], [cell(1.0, item="x"), cell(2.0, item="x")], []):
        study = Study("s", "s", {"x": Item("x", lambda setting, cells=cells: Findings(cells))})
        with pytest.raises(ValueError, match="the item x has"):
            reproduce(study, StudyTerms("smoke", CPU), tmp_path)


def test_numbers_are_read_as_they_are():
    assert [number(x) for x in (60338.0, 0.04344, 12611.4, -0.5, 0.0, 1e13)] == [
        "60,338", "0.04344", "12,611", "-0.5", "0", "10,000,000,000,000",
    ]  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_whole(name):
    study = open_study(name)
    assert study.name == name
    for item in study.items.values():
        assert set(item.seeds) == {"smoke", "small", "full"}
        assert item.title


def test_table_9_without_data_says_why(tmp_path):
    findings = table9(Setting("full", (0, 1, 2), CPU, tmp_path / "work", data_dir=str(tmp_path)))
    cells = list(findings.cells)
    assert {c.row for c in cells} == {row.name for row in ROWS}
    assert all(c.verdict == "not run" and "is not there" in c.not_run for c in cells)


@pytest.mark.data
def test_a_study_from_the_command_line(tmp_path):
    if not os.environ.get("ATTNLAB_DATA"):
        pytest.skip("ATTNLAB_DATA is not set: it names the folder of data sets that this test reads")
    words = ["reproduce", "snell2021", "--out", str(tmp_path), "--data-dir", os.environ["ATTNLAB_DATA"]]
    words += ["--only", "derivative", "--only", "table9"]  # the others have tests of their own
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, (first.output, first.exception)
    assert "table9: done" in first.output
    rows = {(r["row"], r["column"]): r for r in csv.DictReader((tmp_path / "cells.csv").read_text().splitlines())}
    assert rows["20 Newsgroups", "median training length"]["verdict"] == "reproduced"
    assert rows["20 Newsgroups", "vocabulary, as printed"]["tags"] == "other data; erratum"
    assert rows["20 Newsgroups", "vocabulary, from A.8"]["published"] == "12488"
    assert rows["IMDB", "vocabulary"]["not_run"] == "this row is run from scale small on"
    second = CliRunner().invoke(app, words)
    assert second.stderr.count("already there") == 2
    assert second.stdout == first.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["snell2012"], "no study is called 'snell2012' (did you mean 'snell2021'?)"),
        (["snell2021", "--only", "table5"], "snell2021 has no item 'table5' (it is in table2); there are"),
        (["snell2021", "--only", "fig3", "data=sst"], "fig3 of snell2021 has no option 'data'; table2, table3"),
        (["snell2021", "--only", "fig8"], "(attnlab diagnose draws it, for sentences of your own)"),
        (["snell2021", "--only", "derivatve"], "snell2021 has no item 'derivatve' (did you mean 'derivative'?)"),
        (["snell2021", "--scale", "large"], "scale must be one of smoke, small, full, not 'large'"),
        (["snell2021", "--seeds", "0"], "seeds must be at least 1"),
        (["snell2021", "--device", "abacus"], "device=abacus"),
    ],
)
def test_what_is_unknown_names_what_there_is(words, message, tmp_path):
    result = CliRunner().invoke(app, ["reproduce", *words, "--out", str(tmp_path / "out")])
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def from_the_command_line(monkeypatch):
    """`attnlab reproduce` of the Bench."""
    bench = Bench()
    monkeypatch.setattr("attnlab.experiments.study.open_study", lambda name: bench.study)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["attnlab", "reproduce", "bench", *words])
        return CliRunner().invoke(app, ["reproduce", "bench", *words])

    return bench, run


def test_what_is_printed_is_what_was_asked_for(from_the_command_line, tmp_path):
    _, run = from_the_command_line
    assert run("--only", "first", "--out", str(tmp_path)).exit_code == 0
    said = run("--only", "second", "--out", str(tmp_path))
    assert said.exit_code == 0
    assert "Second" in said.stdout
    assert "First" not in said.stdout
    assert "First" in (tmp_path / "report.html").read_text()


def test_what_is_interrupted_says_how_to_go_on(from_the_command_line, tmp_path):
    bench, run = from_the_command_line
    bench.broken = True
    said = run("--out", str(tmp_path))
    assert said.exit_code == 130
    assert said.stderr.endswith(
        f"attnlab: stopped, nothing is lost; to resume: attnlab reproduce bench --out {tmp_path}\n"
    )


def test_list_shows_the_studies():
    output = CliRunner().invoke(app, ["list"]).output
    assert "snell2021" in output
    assert "derivative" in output
