"""The page of a study, and its tables in a terminal: the same is said once, and what is not there has a reason."""

import csv
import re
from dataclasses import replace

import pytest

from attnlab.experiments.reproduction import ItemConfig, ItemResult
from attnlab.experiments.study import Findings, Item, Study
from attnlab.experiments.study_findings import list_findings, select_clearest
from attnlab.experiments.study_page import tabulate_result, tabulate_verdicts, write_study
from attnlab.experiments.verdicts import Cell
from attnlab.report.page import Bars, Table

ABOUT = {"command": "attnlab reproduce bench lr=1e-3 --only=one --only=two --scale=smoke --out='a b'", "torch": "2.13"}
SAME = [("scale", "smoke"), ("seeds", "0, 1, 2"), ("torch", "2.13")]
STUDY = Study("bench", "A bench", {name: Item(name, lambda setting: Findings([])) for name in ("one", "two", "three")})


def result(name, *cells, **about):
    config = ItemConfig("bench", name, "smoke", (0, 1, 2), 1)
    return ItemResult(config, name.title(), cells, (), (f"about {name}",), ABOUT | about)


def ran(name):
    return Cell(item=name, row="r", column="c", published=1.0, values=(0.5, 1.0, 1.5))


def unrun(name, row="q"):
    return Cell(item=name, row=row, column="c", not_run="no data")


@pytest.fixture
def page(tmp_path):
    some = [result("one", ran("one"), unrun("one"), wall_s=1.5), result("two", unrun("two"), wall_s=2.5)]
    return write_study(STUDY, "smoke", some, tmp_path).read_text()


def test_what_holds_of_every_item_is_said_once_and_the_rest_with_its_item(page):
    names = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    assert names == [("wall time (s)", "1.5"), ("wall time (s)", "2.5"), *SAME]


def test_the_command_of_an_item_makes_it_alone(page):
    commands = [text.replace("&#x27;", "'") for text in re.findall(r"<code>(.*?)</code>", page)]
    rest = "attnlab reproduce bench lr=1e-3 --scale=smoke '--out=a b'"
    assert commands == [f"{rest} --only=one", f"{rest} --only=two"]


def test_the_title_promises_nothing(page):
    assert "<h1>attnlab reproduce bench</h1>" in page


def test_an_item_of_which_nothing_was_run_says_why_instead_of_an_empty_table(page):
    table = tabulate_result([unrun("two"), unrun("two", "s")])
    assert table == Table(["row", "cells", "note"], [["q; s", 2, "not run: no data"]])
    assert tabulate_result([ran("one"), unrun("one")]).rows[0][:2] == ["r", "c"]
    second = page.split(">Two</h2>")[1]
    assert second.count("<table>") == 1
    assert "not run: no data" in second


def test_an_item_without_a_command_gets_one(tmp_path):
    drawn = replace(result("one", ran("one")), about={})
    page = write_study(STUDY, "smoke", [drawn], tmp_path).read_text()
    assert re.findall(r"<code>(.*?)</code>", page) == ["attnlab reproduce bench --scale=smoke --only=one"]


def test_cells_have_every_column_in_one_file(tmp_path):
    one = Cell(
        item="one",
        row="a, b",
        column="c",
        published_interval=(0.25, 2.0),
        values=(0.1, 0.5),
        note="x",
        tags=("erratum",),
    )
    write_study(STUDY, "smoke", [result("one", one, unrun("one"))], tmp_path)
    ours, missing = csv.DictReader((tmp_path / "smoke" / "cells.csv").read_text().splitlines())
    assert ours == {
        "item": "one", "row": "a, b", "column": "c", "published": "", "published_low": "0.25", "published_high": "2.0",
        "mean": "0.3", "low": "", "high": "", "seeds": "2", "values": "0.1 0.5", "margin_low": "0.25",
        "margin_high": "2.0", "p": "", "holm_p": "", "verdict": "no verdict", "seeds_needed": "", "group": "official",
        "tags": "erratum", "note": "x", "not_run": "",
    }  # fmt: skip
    assert (missing["values"], missing["seeds"], missing["not_run"]) == ("", "0", "no data")


def contrast(name, row, values, **about):
    return Cell(item=name, row=row, column="c", sign=1, values=values, **about)


def test_the_clearest_cells_are_contrasts_far_from_zero_and_at_most_two_of_an_item():
    """Mean over half width: a 2/0.25 = 8, same 2.5/1.24 = 2, b 3/2.48 = 1.2, far −4/2.48 = −1.6. c is a stand-in."""
    a, b = contrast("one", "a", (1.9, 2.0, 2.1)), contrast("one", "b", (2.0, 3.0, 4.0))
    same = contrast("one", "same", (2.0, 2.5, 3.0))
    c = contrast("two", "c", (1.99, 2.0, 2.01), tags=("other data",))
    agreeing, against = select_clearest([c, b, a, ran("one"), contrast("two", "far", (-3.0, -4.0, -5.0)), same])
    assert [cell.row for cell in agreeing] == ["a", "same", "c"]
    assert [cell.row for cell in against] == ["far"]


def test_the_findings_count_claims_and_name_what_agrees_and_departs():
    measured = Cell(item="one", row="unpublished", column="c", values=(1.0, 2.0, 3.0))
    cells = [contrast("one", "a", (1.9, 2.0, 2.1)), contrast("one", "far", (-3.0, -4.0, -5.0)), measured, unrun("one")]
    counts, agreement, departure = list_findings([result("one", *cells)])
    assert "Of 2 comparisons" in counts
    assert "2 were run" in counts
    assert "2 other cells" in counts
    table = tabulate_verdicts(cells)
    assert [row[-1] for row in table.rows] == [2, 0, 0]  # as many as the sentence counts
    assert "a, c: the paper has a value above 0, we have 2" in agreement
    assert "far, c: the paper has a value above 0, we have −4 [−6.484, −1.516]" in departure


def test_the_page_shows_findings_and_bars_and_folds_the_items(page):
    top, rest = page.split("</section>", 1)
    assert "class='findings'" in top
    assert "1 was run" in top
    assert rest.count("<details>") == 3  # two items, and how they were run
    assert f"aria-label='1 {ran('one').verdict}'" in rest


def test_the_legend_of_the_bars_has_their_colours():
    counts = {"reproduced": 1, "open": 2, "no verdict": 3, "not run": 4}
    bars, legend = Bars({"Table 1": counts}, "How to read it").html().split("</table>")
    drawn, named = (re.findall(r"<rect[^>]*class='(\w+)'", part) for part in (bars, legend))
    assert drawn == named
    assert len(set(named)) == len(counts)
