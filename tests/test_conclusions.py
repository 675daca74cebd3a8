"""docs/conclusions.md: what it says of cells that are known, and of none."""

import json
import sys
from pathlib import Path

import pytest

from attnlab.studies.claims import Cell
from attnlab.studies.study import open_study

ROOT = Path(__file__).parent.parent
ABOUT = {"hardware": "a machine", "torch": "2", "commit": "abc"}


@pytest.fixture
def conclusions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import conclusions

    yield conclusions
    for name in ("conclusions", "results"):
        sys.modules.pop(name, None)


def written(folder, study, item, *cells):
    content = {"items": [{"config": {"item": item}, "about": ABOUT, "cells": [cell.as_json() for cell in cells]}]}
    path = folder / study / "full" / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def bleu(corpus, values, **about):
    about = {"item": "table2", "row": f"{corpus}: CODA − Transformer", "column": "BLEU", "sign": 1} | about
    return Cell(**about, values=values)


def test_each_line_says_on_which_side_the_interval_is(conclusions, tmp_path):
    some = (
        bleu("A", (1.0, 1.1, 0.9)), bleu("B", (-1.0, -1.1, -0.9)), bleu("C", (1.0, -1.0, 0.1)), bleu("D", (1.0, 1.0)),
        bleu("E", (), not_run="no data"), bleu("F", (3.0, 3.1, 3.2), sign=0),
    )  # fmt: skip
    written(tmp_path, "zheng2021", "table2", *some)
    page = conclusions.page(tmp_path)
    said = {
        line.split(" | ")[1][0]: line.split(" | ")[5] for line in page.splitlines() if "− Transformer, BLEU" in line
    }
    assert said == {"A": "held", "B": "the opposite", "C": "open", "D": "too few seeds"}
    assert "table2 by `attnlab reproduce zheng2021 --scale full` on a machine, torch 2, commit abc" in page
    assert page.count("| not run |") == sum(map(len, conclusions.CLAIMS.values())) - 1


def test_a_claim_that_was_not_run_says_why(conclusions, tmp_path):
    written(tmp_path, "zheng2021", "table2", bleu("IWSLT14", (), not_run="no data"))
    assert "| CODA translates better (Table 2) | IWSLT14: CODA − Transformer: no data |" in conclusions.page(tmp_path)


def test_every_claim_is_of_an_item_that_is_there(conclusions):
    for study, claims in conclusions.CLAIMS.items():
        assert {claim.item for claim in claims} <= set(open_study(study).items)


def test_the_page_is_made_from_what_the_repository_holds(conclusions):
    assert (ROOT / "docs" / "conclusions.md").read_text() == conclusions.page(ROOT / "results")


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
    page = conclusions.page(tmp_path)
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
    page = conclusions.page(tmp_path)
    assert "| coda | ptb, test perplexity | -1.97 | -2.35 … -1.59 | 3 | better |" in page
    assert "| 3 | open |" in next(line for line in page.splitlines() if line.startswith("| dagpam | ptb"))
    assert "`python benchmarks/learning.py ptb` on a card, commit abc" in page


def test_contrasts_that_were_run_on_no_data_are_named(conclusions, tmp_path):
    lines = (
        bleu("A", (1.0, 1.1, 0.9), item="table4"), bleu("B", (), not_run="no data", item="table4"),
        bleu("", (), not_run="left out", row="A: RealFormer − Transformer", item="table4"),
    )  # fmt: skip
    written(tmp_path, "zheng2021", "table4", *lines)
    page = conclusions.page(tmp_path)
    assert "| The cascade alone helps (Table 4) | A: RealFormer − Transformer: left out | – | – | – | not run |" in page
    assert "B: CODA − Transformer" not in page
    assert "Not run on B." in page
