"""docs/conclusions.md: the verdicts of known cells, and of missing ones."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from attnlab.experiments.ledger import FILE, Ledger, Row
from attnlab.experiments.reproduction import OLD_CELLS
from attnlab.experiments.verdicts import Cell
from attnlab.studies import STUDIES, open_study

ROOT = Path(__file__).parent.parent
ABOUT = {"hardware": "a machine", "torch": "2", "commit": "abc"}


@pytest.fixture
def conclusions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import conclusions

    yield conclusions
    for name in ("conclusions", "claims", "results"):
        sys.modules.pop(name, None)


def write_ledger(folder, study, item, *cells, remarks=()):
    stored = [{name: value for name, value in asdict(cell).items() if value} for cell in cells]
    recipe = {"study": study, "item": item, "scale": "full", "seeds": [0, 1, 2], "options": {}}
    values = {"cells": stored, "figures": [], "remarks": list(remarks)}
    edition = open_study(study).items[item].edition
    row = Row(recipe=recipe, seed=None, measure=OLD_CELLS, edition=edition, values=values, provenance=ABOUT)
    (folder / study).mkdir(parents=True)
    Ledger(folder / study / FILE).append(row)


def bleu(corpus, values, **about):
    about = {"item": "table2", "row": f"{corpus}: CODA − Transformer", "column": "BLEU", "sign": 1} | about
    return Cell(**about, values=values)


def test_each_line_says_on_which_side_the_interval_is(conclusions, tmp_path):
    some = (
        bleu("A", (1.0, 1.1, 0.9)), bleu("B", (-1.0, -1.1, -0.9)), bleu("C", (1.0, -1.0, 0.1)), bleu("D", (1.0, 1.0)),
        bleu("E", (), not_run="no data"), bleu("F", (3.0, 3.1, 3.2), sign=0),
    )  # fmt: skip
    write_ledger(tmp_path, "zheng2021", "table2", *some)
    page = conclusions.render_page(tmp_path)
    rows = [line.split(" | ") for line in page.splitlines() if "− Transformer, BLEU" in line]
    assert {row[1][0]: row[5] for row in rows} == {"A": "0.01", "B": "0.01", "C": "0.96", "D": "–"}
    assert {row[1][0]: row[6] for row in rows} == {
        "A": "same direction", "B": "opposite", "C": "open: 9,457 seeds", "D": "no verdict",
    }  # fmt: skip
    assert "table2 by `attnlab reproduce zheng2021 --scale full` on a machine, torch 2, commit abc" in page
    assert page.count("| not run |") == sum(map(len, conclusions.CLAIMS.values())) - 1


def test_a_claim_that_was_not_run_says_why(conclusions, tmp_path):
    write_ledger(tmp_path, "zheng2021", "table2", bleu("IWSLT14", (), not_run="no data"))
    assert "| CODA translates better (Table 2) | IWSLT14: CODA − Transformer: no data |" in conclusions.render_page(
        tmp_path
    )


def test_every_claim_is_of_an_item_that_is_there_and_of_its_cells(conclusions):
    assert set(conclusions.CLAIMS) == {
        name for name in STUDIES if (ROOT / "results" / name).is_dir() and open_study(name).from_paper
    }
    for study, claims in conclusions.CLAIMS.items():
        assert {claim.item for claim in claims} <= set(open_study(study).items)
        assert set(conclusions.MAIN[study]) <= {claim.text for claim in claims}
        items = conclusions.read_items(study, ROOT / "results")
        ran = [claim for claim in claims if claim.item in items]
        assert not [claim.text for claim in ran if not conclusions.list_cells(claim, items[claim.item])]


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ([(1.0, 1.1, 0.9), (2.0, 2.1, 2.2)], "Held"),
        ([(1.0, 1.1, 0.9), (1.0, -1.0, 0.1)], "Held in some rows, open in others"),
        ([(1.0, 1.1, 0.9), (-1.0, -1.1, -0.9)], "Rows disagree"),
        ([(-1.0, -1.1, -0.9), (1.0, -1.0, 0.1)], "Did not hold"),
        ([(1.0, -1.0, 0.1), (1.0, 1.1)], "Open"),
        ([(1.0, 1.1)], "No verdict"),
        ([], "Not run"),
    ],
)
def test_a_claim_is_answered_by_all_its_rows(conclusions, values, answer):
    assert conclusions.answer_claim([bleu("A", (), not_run="no data"), *(bleu("B", some) for some in values)]) == answer


def test_the_page_begins_each_paper_with_what_became_of_its_claims(conclusions, tmp_path):
    level = Cell(item="table2", row="A: CODA", column="BLEU", published=2.0, values=(1.99, 2.0, 2.01))
    write_ledger(tmp_path, "zheng2021", "table2", bleu("A", (1.0, 1.1, 0.9)), bleu("B", (), not_run="no data"), level)
    page = conclusions.render_page(tmp_path)
    assert "- **Held**\n    - CODA translates better (Table 2)\n" in page
    assert "*CODA translates better (Table 2)*: held;" in page.split("\n## ")[0]
    assert "Of the cells with a published number that were run: 1 reproduced." in page
    assert page.count("No cell with a published number was run.") == 3


def test_the_page_is_made_from_what_the_repository_holds(conclusions):
    assert (ROOT / "docs" / "conclusions.md").read_text() == conclusions.render_page(ROOT / "results")


def comparison(folder, name, by, *rows, **about):
    content = {"judged_by": by, "about": {"command": "attnlab compare", **about}, "rows": [{"row": "softmax"}, *rows]}
    path = folder / "compare" / name / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def row(name, by, better, differences, interval, holm):
    against = {"differences": differences, "mean": sum(differences.values()) / 3, "interval": interval, "holm": holm}
    return {"row": name, "measures": {by: {"better": better, "against_first": against}}, "failed": []}


def test_a_combination_is_better_by_the_side_that_is_and_by_holms_p(conclusions, tmp_path):
    three, less = {"1": 2.9, "2": 3.0, "3": 3.1}, {"1": -2.9, "2": -3.0, "3": -3.1}
    by = ("perplexity", "lower")
    rows = (
        row("a", *by, less, [-3.2, -2.8], 0.01), row("b", *by, three, [2.8, 3.2], 0.01),
        row("c", *by, less, [-3.2, -2.8], 0.06), row("d", *by, {"1": 1.0}, None, None),
        {"row": "e", "measures": {}, "failed": ["seed 1: no memory"]},
    )  # fmt: skip
    comparison(tmp_path, "one", "perplexity", *rows)
    comparison(tmp_path, "two", "BLEU", row("f", "BLEU", "higher", three, [2.8, 3.2], 0.01), **{"trained on": "a card"})
    page = conclusions.render_page(tmp_path)
    table = page[page.index("## Combinations") :]
    said = {
        line.split(" | ")[0][2:]: line.split(" | ")[-1][:-2] for line in table.splitlines() if line.startswith("| ")
    }
    said = {name: told for name, told in said.items() if len(name) == 1}
    assert said == {
        "a": "better", "b": "worse", "c": "open", "d": "too few seeds", "e": "seed 1: no memory", "f": "better"
    }  # fmt: skip
    assert "two: `attnlab compare`, trained on a card, without controls for size." in page
    assert "one: `attnlab compare`, without controls for size." in page


def test_runs_of_another_benchmark_are_compared_with_softmax_within_a_seed(conclusions, tmp_path):
    scores = {"softmax": (90.0, 91.0, 95.0), "coda": (88.0, 88.9, 93.2), "dagpam": (90.5, 90.0, 95.6)}
    rows = [{"attention": name, "seed": seed, "test_perplexity": value} for name, values in scores.items()
            for seed, value in enumerate(values)]  # fmt: skip
    path = tmp_path / "ptb" / "gpu.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"about": {"hardware": "a card", "commit": "abc"}, "rows": rows[::-1]}))
    page = conclusions.render_page(tmp_path)
    assert "| coda | ptb, test perplexity | -1.97 | -2.35 … -1.59 | 0.004 | 3 | better |" in page
    assert "| 3 | open |" in next(line for line in page.splitlines() if line.startswith("| dagpam | ptb"))
    assert "`python benchmarks/learning.py ptb` on a card, commit abc" in page


def test_contrasts_that_were_run_on_no_data_are_named(conclusions, tmp_path):
    lines = (
        bleu("A", (1.0, 1.1, 0.9), item="table4"), bleu("B", (), not_run="no data", item="table4"),
        bleu("", (), not_run="left out", row="A: RealFormer − Transformer", item="table4"),
    )  # fmt: skip
    write_ledger(tmp_path, "zheng2021", "table4", *lines)
    page = conclusions.render_page(tmp_path)
    assert (
        "| The cascade alone helps (Table 4) | A: RealFormer − Transformer: left out | – | – | – | – | not run |"
        in page
    )
    assert "B: CODA − Transformer" not in page
    assert "Not run on B." in page


def learning(folder, **scores):
    rows = [
        {"attention": name, "seed": 1 + n, "bleu": value}
        for name, some in scores.items()
        for n, value in enumerate(some)
    ]
    path = folder / "multi30k" / "gpu.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"about": {"hardware": "a card", "commit": "abc"}, "rows": rows}))


def scored(name, *scores, against=None):
    seeds = {str(1 + number): score for number, score in enumerate(scores)}
    return {
        "row": name,
        "failed": [],
        "measures": {"BLEU": {"better": "higher", "seeds": seeds, "against_first": against}},
    }


def read_verdicts(page, heading):
    lines = page[page.index(heading) :].split("\n\n")[1].splitlines()[2:]
    return {tuple(line[2:-2].split(" | ")[:2]): line[2:-2].split(" | ")[-1] for line in lines}


def test_what_two_sets_of_runs_answer_differently_is_open(conclusions, tmp_path):
    """dagpam is better in the comparison and open beside it; coda better in both; realformer open in Table 4 alone."""
    learning(
        tmp_path, softmax=(40.0, 40.0, 40.0), dagpam=(41.0, 39.0, 40.1), coda=(41.0, 41.1, 41.2),
        realformer=(42.0, 42.1, 42.2),
    )  # fmt: skip
    better = {"differences": {"1": 2.9, "2": 3.0, "3": 3.1}, "mean": 3.0, "interval": [2.8, 3.2], "holm": 0.01}
    rows = (scored("dagpam", 43.0, 43.0, 43.0, against=better), scored("coda", 43.0, 43.0, 43.0, against=better))
    comparison(tmp_path, "multi30k", "BLEU", *rows)
    cell = Cell(
        item="table4", row="Multi30k de→en: RealFormer − Transformer", column="BLEU", sign=1, values=(1.0, -1.0, 0.3)
    )
    write_ledger(tmp_path, "zheng2021", "table4", cell)
    page = conclusions.render_page(tmp_path)
    assert read_verdicts(page, "## The same questions") == {
        ("dagpam", "multi30k, BLEU"): "open", ("coda", "multi30k, BLEU"): "better",
        ("realformer", "multi30k, BLEU"): "better in these runs, open over all",
    }  # fmt: skip
    compared = read_verdicts(page, "## Combinations")
    assert compared["dagpam", "multi30k, BLEU, − softmax"] == "better in these runs, open over all"
    assert compared["coda", "multi30k, BLEU, − softmax"] == "better"
    assert "differs by up to 4.0 BLEU" in page  # dagpam with seed 2


def test_a_combination_is_held_against_its_parts(conclusions, tmp_path):
    rows = (scored("coda", 40.0, 40.1, 40.2), scored("coda+dagpam", 41.0, 41.1, 40.9))
    comparison(tmp_path, "one", "BLEU", *rows)
    said = read_verdicts(conclusions.render_page(tmp_path), "## Combinations")
    assert said["coda+dagpam", "one, BLEU, − coda"] == "better"
    assert said["coda+dagpam", "one, BLEU, − dagpam"] == "dagpam was not run"


def test_a_translator_has_its_rows_by_log_perplexity_and_by_bleu(conclusions, tmp_path):
    log = {"better": "lower", "seeds": {}, "against_first": None}
    better = {"differences": {"1": -0.1, "2": -0.1, "3": -0.1}, "mean": -0.1, "interval": [-0.11, -0.09], "holm": 0.01}
    row = scored("coda", 40.0, 40.1, 40.2, against=better | {"mean": 0.2, "interval": [-1.0, 1.4], "holm": 0.5})
    row["measures"]["log-perplexity (nats)"] = log | {"against_first": better}
    comparison(tmp_path, "one", "log-perplexity (nats)", row)
    said = read_verdicts(conclusions.render_page(tmp_path), "## Combinations")
    assert list(said.items()) == [
        (("coda", "one, log-perplexity (nats), − softmax"), "better"), (("coda", "one, BLEU, − softmax"), "open"),
    ]  # fmt: skip


def test_the_rates_that_were_found_and_the_regime_are_read_from_the_results(conclusions, tmp_path):
    level = {"row": "Penn Treebank, 15 layers: softmax, at the best rate tried", "values": (80.0,), "note": "lr 0.004"}
    rates = Cell(item="rates", column="test perplexity", **level)
    softmax = Cell(
        item="ptb", row="Penn Treebank, 15 layers: softmax", column="test perplexity", values=(71.2,), published=108.26
    )
    write_ledger(tmp_path, "heo2024", "rates", rates)
    assert "(item rates): softmax 0.004." in conclusions.render_page(tmp_path)
    (tmp_path / "other").mkdir()
    write_ledger(tmp_path / "other", "heo2024", "ptb", softmax)
    assert "a test perplexity of 71, the paper's 108" in conclusions.render_page(tmp_path / "other")


def test_an_item_put_together_elsewhere_says_where_its_runs_were_trained(conclusions, tmp_path):
    remarks = ("Something.", "Trained on a card, torch 2.11.")
    write_ledger(tmp_path, "zheng2021", "table2", bleu("A", (1.0, 1.1, 0.9)), remarks=remarks)
    assert "on a card, torch 2.11, commit abc" in conclusions.render_page(tmp_path)
