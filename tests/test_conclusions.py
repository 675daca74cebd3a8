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
    assert "table2 on a machine, torch 2, commit abc" in page
    assert page.count("| not run |") == sum(map(len, conclusions.CLAIMS.values())) - 1


def test_a_claim_that_was_not_run_says_why(conclusions, tmp_path):
    written(tmp_path, "zheng2021", "table2", bleu("IWSLT14", (), not_run="no data"))
    assert "| CODA translates better (Table 2) | IWSLT14: no data | – | – | – | not run |" in conclusions.page(tmp_path)


def test_every_claim_is_of_an_item_that_is_there(conclusions):
    for study, claims in conclusions.CLAIMS.items():
        assert {claim.item for claim in claims} <= set(open_study(study).items)


def test_the_page_is_made_from_what_the_repository_holds(conclusions):
    assert (ROOT / "docs" / "conclusions.md").read_text() == conclusions.page(ROOT / "results")
