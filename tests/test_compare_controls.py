"""Controls of winners alone, what papers claim beside what was found, and drawing a comparison from its ledger."""

import math
from dataclasses import replace

import pytest
import scipy.stats
from inline_scheduler import InlineScheduler

from attnlab.commands.compare.comparison import ComparisonTerms, _Comparison, compare, draw
from attnlab.commands.compare.comparison_page import tabulate_controls, write_comparison
from attnlab.commands.compare.controls import HEADS
from attnlab.commands.compare.paper_verdicts import tabulate_claims
from attnlab.commands.compare.plan import plan_comparison
from attnlab.experiments.engine import Measured
from attnlab.experiments.ledger import FILE, Ledger
from attnlab.mechanisms import MECHANISMS
from attnlab.mechanisms.paper_claims import CLAIMS

TINY = {"data": "lexicon", "examples": "40", "held_out": "8", "layers": "1", "width": "12", "heads": "2"}
TINY |= {"feed_forward": "7", "steps": "2", "evaluate_every": "2", "checkpoint_every": "2", "batch_tokens": "99"}
LOSSES = {"softmax": 2.0, "dagpam": 1.0, "uniform": 3.0, "coda": 2.0, "sigmoid": 2.9, "xsa": 2.5}


class InventedRows:
    """A reader that has made-up values for everything, and notes what was asked for."""

    running = True

    def __init__(self):
        self.asked = []

    def read_plan(self, plan):
        self.asked.append(list(plan))
        if not all(isinstance(key, tuple) for key in plan):
            return Measured({key: {"tokens_per_second": 100.0 * len(key), "memory": 5.0} for key in plan})
        return Measured({(label, seed): self.measure(label, seed) for label, seed in plan})

    def measure(self, label, seed):
        loss = LOSSES.get(label, 1.8) + 0.01 * seed
        return {"perplexity": math.exp(loss), "valid_loss": loss, "curve": [], "inside": {}}


def read_invented(folder, controls, attention, **said):
    plan = plan_comparison("synthetic", TINY | {"seeds": "3", "attention": attention} | said)
    with InlineScheduler() as on:
        comparison = _Comparison(plan, ComparisonTerms(on, folder / "out", folder / "runs", controls))
    rows = InventedRows()
    return comparison.read_results(rows), rows


def test_only_rows_that_beat_softmax_get_controls_and_one_of_their_size(tmp_path):
    results, rows = read_invented(tmp_path, "winners", "softmax,dagpam,uniform,coda")
    sized = "softmax, as large as dagpam"
    assert [row.label for row in results.rows] == ["softmax", "dagpam", "uniform", "coda", sized, HEADS]
    sizes = {row.label: row.cost.parameters for row in results.rows}
    unit = 2 * 12 + 1  # a row of the first matrix with its bias, and a column of the second
    assert abs(sizes[sized] - sizes["dagpam"]) <= unit  # encoder and decoder have one each
    assert set(results.contrast_controls()) == {("dagpam", sized), ("dagpam", HEADS)}
    assert results.contrast_controls()["dagpam", HEADS].mean == pytest.approx(-0.8)
    assert [line[:2] for line in tabulate_controls(results).rows] == [["dagpam", sized], ["dagpam", HEADS]]
    timed = [keys for keys in rows.asked if keys and not isinstance(keys[0], tuple)]
    assert timed == [[row.label for row in results.rows]]  # once, after the controls are known


def test_controls_of_a_winner_do_not_change_that_it_won(tmp_path, monkeypatch):
    """Oracle: scipy's Welch test. With the controls in its family, the row would no longer win."""
    for label, loss in {"dagpam": 1.973, "softmax, as large as dagpam": 2.001, HEADS: 2.001}.items():
        monkeypatch.setitem(LOSSES, label, loss)
    results, _ = read_invented(tmp_path, "winners", "softmax,dagpam")
    losses = [[level + 0.01 * seed for seed in results.plan.seeds] for level in (1.973, 2.0)]
    p = scipy.stats.ttest_ind(*losses, equal_var=False).pvalue
    assert 0.025 < p < 0.05
    assert results.contrast_rows(results.main_measure)["dagpam"].holm == pytest.approx(p)
    assert {row for row, _ in results.contrast_controls()} == {"dagpam"}


def test_without_a_winner_there_is_no_control(tmp_path):
    results, _ = read_invented(tmp_path, "winners", "softmax,uniform,coda")
    assert [row.label for row in results.rows] == ["softmax", "uniform", "coda"]
    assert results.contrast_controls() == {}


def test_winners_need_a_softmax_to_beat(tmp_path):
    with pytest.raises(ValueError, match="the first row must be softmax"):
        read_invented(tmp_path, "winners", "dagpam,softmax")


def test_claims_stand_beside_what_was_found(tmp_path, monkeypatch):
    results, _ = read_invented(tmp_path, "none", "softmax,dagpam,uniform,coda,coda(alpha=2),sigmoid")
    found = {line[0]: line[2:] for line in tabulate_claims(results).rows}
    assert found == {  # an option makes another model than the paper's
        "dagpam": ["same direction", "0.86 ×", "1.00 ×"],
        "uniform": ["worse", "1.00 ×", "1.00 ×"],
        "coda": ["open", "0.57 ×", "1.00 ×"],
        "sigmoid": ["worse", "1.00 ×", "1.00 ×"],
    }
    results, _ = read_invented(tmp_path, "none", "softmax,coda,uniform", alpha="2")
    assert [line[0] for line in tabulate_claims(results).rows] == ["uniform"]  # an option of all rows that have it
    monkeypatch.setitem(LOSSES, "dagpam", 4.0)
    results, _ = read_invented(tmp_path, "none", "softmax,dagpam")
    assert tabulate_claims(results).rows[0][2] == "opposite"


def test_every_mechanism_has_a_claim():
    assert [name for name in MECHANISMS if name not in CLAIMS] == ["softmax"]
    assert set(CLAIMS) <= set(MECHANISMS)


def test_a_comparison_is_drawn_from_an_older_ledger_of_another_machine(tmp_path):
    """Speeds of the machine that measured them are shown, and nothing is trained or added to the ledger."""
    plan = plan_comparison("synthetic", TINY | {"seeds": "1", "attention": "softmax,uniform"})
    with InlineScheduler() as on:
        measured, folder = compare(plan, ComparisonTerms(on, tmp_path / "out", tmp_path / "runs", "none"))
        ledger = tmp_path / "copied.jsonl"
        ledger.write_text((folder / FILE).read_text())
        age_rows(ledger, "another machine")
        before = ledger.read_text()
        terms = ComparisonTerms(on, tmp_path / "drawn", tmp_path / "no-runs", "none")
        drawn, place = draw(plan, terms, ledger)
    assert place == tmp_path / "drawn"
    values = [[row.measured for row in results.rows] for results in (measured, drawn)]
    assert values[0] == values[1]
    assert all(row.speed and not row.failures for row in drawn.rows)
    assert ledger.read_text() == before
    assert not (tmp_path / "no-runs").exists()
    assert write_comparison(drawn, place, {"command": "attnlab compare"}).exists()


def age_rows(file, hardware):
    """Rewrite a ledger as if its speeds had been measured on another machine, and its rows before z_loss was added."""
    rows = Ledger(file).rows()
    file.unlink()
    for row in rows:
        recipe = {**row.recipe, "hardware": hardware} if row.measure == "speed" else dict(row.recipe)
        recipe["training"] = {key: x for key, x in recipe["training"].items() if key != "z_loss"}
        Ledger(file).append(replace(row, recipe=recipe, digest=""))


def test_a_half_finished_ledger_is_drawn_with_what_it_lacks(tmp_path):
    plan = plan_comparison("synthetic", TINY | {"seeds": "1", "attention": "softmax,uniform"})
    (tmp_path / FILE).write_text("")
    with InlineScheduler() as on:
        results, _ = draw(plan, ComparisonTerms(on, tmp_path / "out", controls="none"), tmp_path / FILE)
    assert [row.failures for row in results.rows] == [("seed 1: not in the ledger",)] * 2
