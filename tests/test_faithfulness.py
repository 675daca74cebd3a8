"""The benchmark of explanations: what it hides, and that the table of the page is that of its results."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / "faithfulness.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_tokens_with_the_highest_scores_are_hidden_first(script):
    hideable = torch.tensor([False, True, True, True, True, False])
    case = SimpleNamespace(hideable=hideable)
    masks = script["score_masks"](case, torch.tensor([9.0, 1.0, 4.0, 2.0, 3.0, 9.0]))
    half = script["SHARES"].index(0.5)
    assert masks[2 * half].tolist() == [True, True, False, True, False, True]  # tokens 2 and 4 are hidden
    assert masks[2 * half + 1].tolist() == [True, False, True, False, True, True]  # tokens 1 and 3 are hidden
    assert masks[:, [0, 5]].all()


def test_means_have_intervals_over_examples(script):
    import numpy as np

    rows = [{"a": {"deletion": x, "insertion": 0.0, "agreement": 1.0, "error": x / 10}} for x in (0.0, 1.0)]
    (entry,) = script["summarise"]("model", rows, np.random.default_rng(0))
    assert (entry["deletion"], entry["deletion_low"], entry["deletion_high"]) == (0.5, 0.0, 1.0)
    assert (entry["agreement_low"], entry["agreement_high"], entry["completeness_error"]) == (1.0, 1.0, 0.1)


def test_a_row_is_added_beside_the_stored_ones(script, tmp_path):
    old = [{"explanation": name, "insertion": 0.5, "deletion": x} for name, x in (("a", 0.4), ("b", 0.6))]
    (tmp_path / "m.json").write_text(json.dumps({"about": {"commit": "first"}, "rows": old}))
    about, rows = script["add_rows"](tmp_path / "m.json", [{"explanation": "a", "insertion": 0, "deletion": 1}], "next")
    assert about == {"commit": "first"}
    assert [(row["explanation"], row["deletion"], row.get("commit")) for row in rows] == [
        ("a", 1, "next"),
        ("b", 0.6, None),
    ]


def test_the_table_of_the_page_is_that_of_the_results(script):
    table = script["render_markdown"](ROOT / "results" / "faithfulness")
    assert table.count("\n") > 12
    assert table in (ROOT / "docs" / "attribution.md").read_text(encoding="utf-8")
