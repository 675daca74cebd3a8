"""A study run, interrupted, resumed, repeated and written: its results are what the ledger has."""

import csv
import os
from dataclasses import replace
from functools import partial

import pytest
from in_process import run_attnlab
from inline_scheduler import InlineScheduler
from item_runs import run_item
from matplotlib.figure import Figure
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.experiments.ledger import Ledger, Row
from attnlab.experiments.plan import Calculation
from attnlab.experiments.reproduction import ITEM, OLD_CELLS, StudyTerms, draw_study, reproduce
from attnlab.experiments.status import tabulate_items, tabulate_status
from attnlab.experiments.study import Findings, Item, Study
from attnlab.experiments.study_page import write_study
from attnlab.experiments.verdicts import IMPOSSIBLE, Cell
from attnlab.studies import STUDIES, open_study
from attnlab.studies.snell2021.datasets import ROWS, table9

HOSTILE = "<script>alert(1)</script>"


def cell(*values, **about):
    return Cell(**{"item": "a", "row": "r", "column": "c", "published": 2.0, "values": values} | about)


class Bench:
    """A study of two items that counts its runs; the second can be made to stop in the middle."""

    def __init__(self):
        self.runs, self.stops, self.edition = [], False, 1
        items = {"first": Item("First", self.first), "second": Item("Second", self.second, {"smoke": 2, "small": 4})}
        self.study = Study("bench", f"A bench {HOSTILE}", items)

    def measure(self, item, place, seed):
        if self.stops and (item, seed) == ("second", 1):
            raise KeyboardInterrupt
        self.runs.append((item, seed))
        return {"value": 1.0 + seed}

    def read(self, item, setting):
        plan = {
            seed: Calculation(item, {"scale": setting.scale}, partial(self.measure, item), seed, self.edition)
            for seed in setting.seeds
        }
        return [values["value"] for values in setting.rows.read_plan(plan).values.values()]

    def first(self, setting):
        figure = Figure()
        figure.subplots().plot([0, 1])
        values = self.read("first", setting)
        return Findings([cell(*values, item="first", note=HOSTILE)], {"line": (figure, "a line")}, ("a remark",))

    def second(self, setting):
        values = self.read("second", setting)
        return Findings([cell(*values, item="second"), cell(item="second", row="q", not_run="no data")])

    def run(self, out, *, scale="smoke", seeds=None, again=False, **options):
        terms = StudyTerms(scale, seeds=seeds, command="attnlab reproduce bench", again=again)
        return reproduce(self.study, terms, out, InlineScheduler(), **options)


@pytest.fixture
def bench():
    return Bench()


def shown(results):
    """Results without the time and place of the last command."""
    return [replace(result, about={}) for result in results]


def test_what_is_measured_survives_an_interruption(bench, tmp_path):
    bench.stops = True
    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path)
    bench.stops, notes = False, []
    results = bench.run(tmp_path, note=notes.append)
    assert bench.runs == [("first", 0), ("first", 1), ("first", 2), ("second", 0), ("second", 1)]
    assert [note.split(":")[0] for note in notes] == ["first", "second"]
    assert [result.config.item for result in results] == ["first", "second"]
    assert shown(bench.run(tmp_path)) == shown(results)
    assert len(bench.runs) == 5


def test_results_are_drawn_again_from_the_ledger_alone(bench, tmp_path):
    results = bench.run(tmp_path)
    (tmp_path / "copy").mkdir()
    (tmp_path / "ledger.jsonl").rename(tmp_path / "copy" / "ledger.jsonl")
    assert shown(draw_study(bench.study, "smoke", tmp_path / "copy")) == shown(results)
    assert len(bench.runs) == 5


def test_only_other_seeds_another_edition_and_again_are_run(bench, tmp_path):
    bench.run(tmp_path, only=["first"])
    (five,) = bench.run(tmp_path, only=["first"], seeds=5)
    assert bench.runs == [("first", seed) for seed in range(5)]
    assert five.cells[0].values == (1.0, 2.0, 3.0, 4.0, 5.0)
    bench.edition = 2  # of what is measured
    bench.run(tmp_path, only=["first"])
    assert len(bench.runs) == 8
    bench.run(tmp_path, only=["first"], again=True)
    assert len(bench.runs) == 11
    rows = Ledger(tmp_path / "ledger.jsonl").rows()
    assert sorted((row.measure, row.seed or 0, row.edition) for row in rows) == sorted(
        [("first", seed, 1) for seed in range(5)] + [("first", seed, 2) for seed in range(3)] + [(ITEM, 0, 1)] * 2
    )


def test_items_that_were_not_asked_for_are_shown_as_they_last_were(bench, tmp_path):
    bench.run(tmp_path, only=["second"])
    results = bench.run(tmp_path, only=["first"])
    assert [result.config.item for result in results] == ["first", "second"]
    assert len(bench.runs) == 5
    (small,) = bench.run(tmp_path, only=["second"], scale="small")  # scales are not mixed
    assert small.config.seeds == (0, 1, 2, 3)
    assert [result.config.seeds for result in draw_study(bench.study, "smoke", tmp_path)] == [(0, 1, 2), (0, 1)]


def test_an_item_of_an_older_edition_is_not_shown(bench, tmp_path):
    bench.run(tmp_path, only=["first"])
    newer = replace(bench.study, items={"first": replace(bench.study.items["first"], edition=2)})
    with pytest.warns(UserWarning, match="edition 1"):
        assert not draw_study(newer, "smoke", tmp_path)


def test_the_contrasts_of_all_items_are_one_family(tmp_path):
    """p is 0.01 in one item and 0.04 in the other: 0.02 and 0.04 after Holm's correction for two."""
    claims = {"one": (0.81, 1.0, 1.19), "two": (0.61, 1.0, 1.39)}
    items = {
        name: Item(name, partial(lambda name, setting: Findings([cell(*claims[name], item=name, sign=1)]), name))
        for name in claims
    }
    study = Study("claims", "Claims", items)
    apart = [cell(*values, sign=1).p for values in claims.values()]
    terms, place = StudyTerms("smoke"), InlineScheduler()
    for results in (reproduce(study, terms, tmp_path, place), draw_study(study, "smoke", tmp_path)):
        assert [result.cells[0].holm for result in results] == pytest.approx([2 * apart[0], apart[1]])
    assert reproduce(study, terms, tmp_path, place, only=["two"])[1].cells[0].family == pytest.approx(sorted(apart))


def test_the_status_counts_numbers_and_cells(bench, tmp_path):
    """Two cells share a number; a contrast is computed from others; one number has no cell."""

    def shared(setting):
        both = [cell(1.0, item="shared"), cell(1.0, item="shared", column="as corrected", number="shared, r, c")]
        return Findings(
            [
                *both,
                cell(1.0, item="shared", row="d", sign=1, number=""),
                cell(1.0, item="shared", row="e", published=None),
            ]
        )

    reasons = ("no data", f"{IMPOSSIBLE}no data")
    lacking = [cell(item="absent", row=reason, number="no", not_run=reason) for reason in reasons]
    absent = Item("Absent", lambda setting: Findings(lacking), {"full": 3})
    items = {"first": Item("First", bench.first), "shared": Item("Shared", shared), "absent": absent}
    study = Study("bench", "A bench", items, unimplemented={"an appendix": 5})
    out = tmp_path / "bench"
    reproduce(study, StudyTerms("full"), out, InlineScheduler(), only=["first", "shared"])
    table, commands = tabulate_status([study], tmp_path)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["numbers"], row["measured"]) == (1 + 1 + 1 + 5, 2)
    assert (row["cells"], row["run"], row["impossible"], row["official"]) == (1 + 3 + 2, 4, 1, 4)
    assert (row["open"], row["no verdict"]) == (1, 3)
    assert "--only absent" in commands[0]
    table, commands = tabulate_items(study, tmp_path)
    rows = {each[0]: dict(zip(table.columns, each, strict=True)) for each in table.rows}
    assert [rows[name]["cells"] for name in ("first", "shared", "absent", "all")] == [1, 3, 2, 6]
    assert [rows[name]["run"] for name in ("first", "shared", "absent", "all")] == [1, 3, 0, 4]
    assert [rows[name]["fewest seeds"] for name in ("first", "shared", "absent")] == [5, 1, "–"]
    assert [command.split()[-1] for command in commands] == ["absent"]


def test_the_status_measures_nothing_without_a_ledger(bench, tmp_path):
    """Exact cells have values without a run; they are not results of a folder that lacks them."""
    exact = Item("Exact", lambda setting: Findings([cell(1.0, item="exact")]))
    study = replace(bench.study, items={"first": bench.study.items["first"], "exact": exact})
    other = replace(study, name="other")
    with pytest.raises(FileNotFoundError, match="ledger"):
        tabulate_status([study, other], tmp_path)
    reproduce(study, StudyTerms("full"), tmp_path / "bench", InlineScheduler(), only=["first"])
    table, commands = tabulate_status([study, other], tmp_path)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["measured"], row["cells"], row["run"]) == (1, 2, 1)
    assert [each[0] for each in table.rows] == ["bench", "all"]
    assert "reproduce other" in commands[1]
    table, commands = tabulate_items(study, tmp_path)
    assert [each[:1] + each[2:4] for each in table.rows] == [["first", 1, 1], ["exact", 1, 0], ["all", 2, 1]]
    assert [command.split()[-1] for command in commands] == ["exact"]


@pytest.mark.parametrize("study", [(), ("zheng2021",)])
def test_the_status_of_a_folder_is_read_from_it(tmp_path, study):
    done = run_attnlab("reproduce", *study, "--status", "--from", str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr


def test_stored_cells_keep_their_values_and_get_the_claims_of_this_version(tmp_path):
    stored = {"item": "one", "row": "r", "column": "c", "published": 9.0, "values": [1.0, 2.0, 4.0]}
    gone = stored | {"row": "no longer planned"}
    recipe = {"study": "old", "item": "one", "scale": "full", "seeds": [0, 1, 2], "options": {}}
    values = {"cells": [stored, gone], "figures": [], "remarks": []}
    Ledger(tmp_path / "ledger.jsonl").append(
        Row(recipe=recipe, seed=None, measure=OLD_CELLS, edition=1, values=values, provenance={})
    )
    planned = cell(item="one", not_run="no runs", published=None, tags=("one model",))
    study = Study("old", "Old", {"one": Item("One", lambda setting: Findings([planned]))})
    first, second = draw_study(study, "full", tmp_path)[0].cells
    assert (first.values, first.published, first.tags) == ((1.0, 2.0, 4.0), None, ("one model",))
    assert (second.published, second.tags) == (9.0, ())


def test_everything_is_written(bench, tmp_path):
    results = bench.run(tmp_path, only=["first"])
    page = write_study(bench.study, "smoke", results, tmp_path).read_text()
    assert HOSTILE not in page
    assert page.count("<img") == 1
    assert "Items without a result in this ledger: second" in page
    (row,) = [row for row in Ledger(tmp_path / "ledger.jsonl").rows() if row.measure == ITEM]
    assert {"hardware", "torch", "python", "attnlab", "commit", "command", "began"} <= set(row.provenance)
    assert {*row.provenance, "wall_s"} <= set(results[0].about)
    assert row.recipe == {"study": "bench", "item": "first", "scale": "smoke", "seeds": [0, 1, 2], "options": {}}
    results = bench.run(tmp_path)
    write_study(bench.study, "smoke", results, tmp_path)
    rows = list(csv.DictReader((tmp_path / "smoke" / "cells.csv").read_text().splitlines()))
    assert [(row["item"], row["verdict"], row["group"]) for row in rows] == [
        ("first", "open", "official"), ("second", "no verdict", "official"), ("second", "not run", "not run"),
    ]  # fmt: skip
    assert [float(x) for x in rows[0]["values"].split()] == [1.0, 2.0, 3.0]
    assert {file.name for file in (tmp_path / "smoke" / "figures").iterdir()} >= {"first-line.png"}
    assert not list(tmp_path.rglob(".*"))


def test_a_torn_last_row_is_measured_again_and_a_damaged_one_is_named(bench, tmp_path):
    bench.run(tmp_path, only=["first"])
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:2]) + lines[2][:-20])
    with pytest.warns(UserWarning, match="incomplete"):
        bench.run(tmp_path, only=["first"])
    assert bench.runs == [("first", 0), ("first", 1), ("first", 2), ("first", 2)]
    assert len(Ledger(ledger).rows()) == 4
    damaged = tmp_path / "damaged" / "ledger.jsonl"
    damaged.parent.mkdir()
    damaged.write_text("".join([lines[0], "{}\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"ledger\.jsonl:2"):
        bench.run(damaged.parent)


def test_an_item_with_a_cell_of_another_is_refused(tmp_path):
    for cells in ([cell(1.0, item="other")], [cell(1.0, item="x"), cell(2.0, item="x")], []):
        study = Study("s", "s", {"x": Item("x", lambda setting, cells=cells: Findings(cells))})
        with pytest.raises(ValueError, match="the item x has"):
            reproduce(study, StudyTerms("smoke"), tmp_path, InlineScheduler())
        assert not (tmp_path / "ledger.jsonl").exists()


def test_out_that_is_a_file_is_refused(bench, tmp_path):
    (tmp_path / "here").write_text("")
    with pytest.raises(ValueError, match="here is a file"):
        bench.run(tmp_path / "here")


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_whole(name):
    study = open_study(name)
    assert study.name == name
    for item in study.items.values():
        assert set(item.seeds) == {"smoke", "small", "full"}
        assert item.title


def test_table_9_without_data_says_why(tmp_path):
    cells = list(run_item(table9, tmp_path, scale="full", seeds=(0, 1, 2), data_dir=str(tmp_path)).cells)
    assert {c.row for c in cells} == {row.name for row in ROWS}
    assert all(c.verdict == "not run" and "does not exist" in c.not_run for c in cells)


@pytest.mark.data
def test_a_study_from_the_command_line(tmp_path):
    if not os.environ.get("ATTNLAB_DATA"):
        pytest.skip("ATTNLAB_DATA is not set: it names the folder of data sets that this test reads")
    words = ["reproduce", "snell2021", "--out", str(tmp_path), "--data-dir", os.environ["ATTNLAB_DATA"]]
    words += ["--only", "derivative", "--only", "table9"]  # the others have tests of their own
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, (first.output, first.exception)
    assert "table9: done" in first.output
    rows = {
        (r["row"], r["column"]): r for r in csv.DictReader((tmp_path / "smoke" / "cells.csv").read_text().splitlines())
    }
    assert rows["20 Newsgroups", "median training length"]["verdict"] == "reproduced"
    assert rows["20 Newsgroups", "vocabulary, as printed"]["tags"] == "other vocabulary; erratum"
    assert rows["20 Newsgroups", "vocabulary, from A.8"]["published"] == "12488"
    assert rows["IMDB", "vocabulary"]["not_run"] == "this row runs from scale small on"
    second = CliRunner().invoke(app, words)
    assert second.stdout == first.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["snell2012"], "unknown study 'snell2012' (did you mean 'snell2021'?)"),
        (["snell2021", "--only", "table5"], "snell2021 has no item 'table5' (it is in table2); available"),
        (["snell2021", "--only", "fig3", "data=sst"], "fig3 of snell2021 has no option 'data'; table2, table3"),
        (["snell2021", "--only", "fig8"], "attnlab diagnose"),
        (["snell2021", "--only", "derivatve"], "snell2021 has no item 'derivatve' (did you mean 'derivative'?)"),
        (["snell2021", "--scale", "large"], "scale must be one of smoke, small, full, got 'large'"),
        (["snell2021", "--seeds", "0"], "seeds must be at least 1"),
        (["snell2021", "--device", "abacus"], "device=abacus"),
    ],
)
def test_what_is_unknown_names_what_there_is(words, message, tmp_path):
    result = CliRunner().invoke(app, ["reproduce", *words, "--out", str(tmp_path / "out")])
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def from_the_command_line(bench, monkeypatch):
    """`attnlab reproduce` of the Bench, in this process."""
    monkeypatch.setattr("attnlab.commands.reproduce.open_study", lambda name: bench.study)
    monkeypatch.setattr("attnlab.commands.reproduce.open_scheduler", lambda on, jobs, device: InlineScheduler())

    def run(*words):
        monkeypatch.setattr("sys.argv", ["attnlab", "reproduce", "bench", *words])
        return CliRunner().invoke(app, ["reproduce", "bench", *words])

    return run


def test_what_is_printed_is_what_was_asked_for(from_the_command_line, tmp_path):
    run = from_the_command_line
    assert run("--only", "first", "--out", str(tmp_path)).exit_code == 0
    said = run("--only", "second", "--out", str(tmp_path), "--table")
    assert said.exit_code == 0
    assert "Second" in said.stdout
    assert "First" not in said.stdout
    short = run("--only", "second", "--out", str(tmp_path))
    assert "Second" not in short.stdout
    assert "published" in short.stdout.split("at scale smoke")[1]
    assert "report.html" in short.stdout
    assert "First" in (tmp_path / "smoke" / "report.html").read_text()


def test_what_is_interrupted_says_how_to_go_on(bench, from_the_command_line, tmp_path):
    bench.stops = True
    said = from_the_command_line("--out", str(tmp_path))
    assert said.exit_code == 130
    assert said.stderr.endswith(
        f"attnlab: stopped, nothing is lost; to resume: attnlab reproduce bench --out {tmp_path}\n"
    )


def test_list_shows_the_studies():
    output = CliRunner().invoke(app, ["list"]).output
    assert "snell2021" in output
    assert "derivative" in output
