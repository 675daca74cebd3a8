"""`attnlab compare` as a person uses it: trained, measured, interrupted, resumed, read."""

import csv
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import run_attnlab

from attnlab.commands.compare.comparison import ComparisonTerms, compare
from attnlab.commands.compare.comparison_page import CELL_COLUMNS, list_remarks, tabulate, write_comparison
from attnlab.commands.compare.plan import plan_comparison
from attnlab.decoding.evaluation import evaluate_part
from attnlab.experiments.ledger import FILE, Ledger
from attnlab.experiments.schedulers import open_scheduler
from attnlab.experiments.single_run import train_alone
from attnlab.tasks import TASKS
from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import RunFolder
from attnlab.training.runs import open_run

TINY = ["data=lexicon", "examples=600", "held_out=30", "width=16", "layers=1", "heads=2", "feed_forward=32"]
TINY += ["batch_tokens=400", "device=cpu", "steps=20"]
MINE = """
from attnlab.mechanisms.softmax import Softmax


class Mine(Softmax):
    pass


class Breaks(Softmax):
    def mix(self, q, *more, **named):
        if q.device.type != "meta":
            raise RuntimeError("broken on purpose")
        return super().mix(q, *more, **named)
"""


def words_of(*words):
    return [sys.executable, "-c", "from attnlab.cli import main; main()", "compare", "synthetic", *TINY, *words]


def compared(folder, *words):
    return run_attnlab("compare", "synthetic", *TINY, *words, cwd=folder)


WORDS = ["attention=softmax,dagpam,./mine.py:Mine,./mine.py:Breaks", "lr=1e-2", "out=out"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A comparison that is finished: a row of one's own, one that breaks, and the controls."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "mine.py").write_text(MINE)
    done = compared(folder, *WORDS)
    assert done.returncode == 1, done.stderr  # one row failed
    (folder / "output.txt").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def results(place):
    return json.loads((place / "out" / "results.json").read_text())


@pytest.fixture(scope="module")
def rows(results):
    return {row["row"]: row for row in results["rows"]}


def test_the_values_are_those_that_evaluate_gives(rows):
    for row in ("dagpam", "softmax, twice the heads"):
        for seed, folder in rows[row]["runs"].items():
            found = evaluate_part(open_run(folder, device="cpu"), "test", bootstrap=0)
            assert rows[row]["measures"]["perplexity"]["seeds"][seed] == found["perplexity"]
            assert rows[row]["measures"]["BLEU"]["seeds"][seed] == found["text"][0]["value"]


def test_a_row_that_fails_says_why_and_loses_no_other(place, rows):
    assert rows["./mine.py:Breaks"]["failed"] == [f"seed {seed}: RuntimeError: broken on purpose" for seed in (1, 2, 3)]
    assert rows["./mine.py:Breaks"]["measures"] == {}
    assert "./mine.py:Breaks failed: seed 1: RuntimeError: broken on purpose" in (place / "output.txt").read_text()
    for name in rows.keys() - {"./mine.py:Breaks"}:
        assert len(rows[name]["measures"]["BLEU"]["seeds"]) == 3
        assert rows[name]["failed"] == []


def test_a_copy_of_softmax_equals_it_in_every_seed(rows):
    """So data order, initialisation and updates are the same for all rows."""
    mine, softmax = rows["./mine.py:Mine"], rows["softmax"]
    assert mine["measures"]["perplexity"]["seeds"] == softmax["measures"]["perplexity"]["seeds"]
    assert mine["measures"]["perplexity"]["against_first"]["p"] == 1.0
    assert mine["paired_bootstrap_p"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    assert mine["parameters"] == softmax["parameters"]
    assert mine["flops_per_token"] == softmax["flops_per_token"]


def test_what_is_measured_inside_and_what_it_costs(results, rows):
    for name in rows.keys() - {"./mine.py:Breaks"}:
        values = {measure: found["mean"] for measure, found in rows[name]["measures"].items()}
        assert values["head JSD (nats a sentence)"] > 0
        assert values["relative residual"] > 0
        assert -1 <= values["mean cosine"] <= 1
        assert values["query gradient"] > 0
        assert values["query gradient at the start"] > 0
        speed = rows[name]["speed"]
        assert 0 < speed["slowest"] <= speed["tokens_per_second"] <= speed["fastest"]
        assert speed["memory"] > 0
    assert results["about"].keys() >= {"command", "seeds", "hardware", "torch", "commit", "attnlab", "python"}
    assert results["about"]["command"].startswith("attnlab compare synthetic data=lexicon")


def test_tables_figures_and_page(place, rows):
    out = place / "out"
    with open(out / "table.csv", newline="") as file:
        table = list(csv.reader(file))
    assert [line[0] for line in table] == ["attention", *rows]
    assert {
        "BLEU",
        "log-perplexity (nats)",
        "detectable",
        "p of the t-test",
        "parameters",
        "MFLOPs a token",
        "speed (tokens/s)",
        "memory (MiB)",
        "mean cosine",
    } <= set(table[0])
    with open(out / "cells.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    assert tuple(cells[0]) == CELL_COLUMNS
    for cell in cells:
        values = list(map(float, cell["values"].split()))
        assert float(cell["mean"]) == pytest.approx(statistics.fmean(values))
        assert float(cell["low"]) <= float(cell["mean"]) <= float(cell["high"])
    names = {"quality", "differences", "learning", "speed", "inside"}
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"{n}.{kind}" for n in names for kind in ("png", "svg", "pdf")
    }
    page = (out / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    for text in (*rows, "broken on purpose", "feed_forward=", "attnlab compare synthetic"):
        assert text.replace("'", "&#x27;") in page, text


def in_here(folder, *, controls=False, note=lambda line: None, **said):
    """The same without a command line."""
    values = dict(word.split("=") for word in TINY if not word.startswith("device")) | {"seeds": "1"} | said
    with open_scheduler("local", jobs=2, device="cpu") as on:
        terms = ComparisonTerms(on, folder / "out", folder / "runs", "all" if controls else "none", note)
        return compare(plan_comparison("synthetic", values), terms)[0]


def test_the_same_again_trains_nothing_and_finds_the_same(place, rows, monkeypatch):
    monkeypatch.chdir(place)
    before = {path: path.stat().st_mtime_ns for path in place.glob("runs/*/last.safetensors")}
    assert len(before) == 5 * 3
    said, notes = dict(word.split("=", 1) for word in WORDS if not word.startswith("out")), []
    again = in_here(place, controls=True, note=notes.append, **said, seeds="3").as_json()["rows"]
    assert f"{place / 'out' / FILE} has 20 rows already" in notes  # 5 rows with 3 seeds and a timing each
    assert {path: path.stat().st_mtime_ns for path in place.glob("runs/*/last.safetensors")} == before
    assert {row["row"]: json.loads(json.dumps(row)) for row in again} == rows


@pytest.mark.slow  # five seconds or more on an idle core
def test_the_point_with_the_lowest_validation_loss_is_chosen_with_equal_trials(tmp_path):
    results = in_here(tmp_path, attention="softmax,uniform", lr="1e-2,1e-6", seeds="2")
    for row in results.rows:
        assert row.trials.keys() == {0, 1}
        assert row.point == min(row.trials, key=row.trials.__getitem__) == 0
        assert RunFolder(Path(row.runs[1])).position()["best"] == row.trials[0]
        assert row.measured.keys() == {1, 2}
    assert len(list((tmp_path / "runs").iterdir())) == 2 * (2 + 1)  # the second seed at the chosen point alone
    told = list_remarks(results)
    assert any("tried at the same 2 points of the grid with seed 1" in line for line in told)
    assert "uniform: chosen lr=1e-2" in told
    assert not any(row.failures for row in results.rows)
    write_comparison(results, tmp_path / "out", {"command": "attnlab compare"})
    assert "lr=1e-6" in (tmp_path / "out" / "report.html").read_text()


def test_a_point_of_the_grid_that_fails_is_told(tmp_path):
    (row,) = in_here(tmp_path, attention="softmax", lr="1e-2,1e36", seeds="1").rows
    assert row.point == 0
    (why,) = row.failures
    assert why.startswith("lr=1e36: ")
    assert "not finite" in why


@pytest.mark.slow  # five seconds or more on an idle core
def test_a_number_that_is_not_finite_is_shown_and_one_that_is_none_is_counted(tmp_path):
    results = in_here(tmp_path, attention="softmax", seeds="2")
    (row,) = results.rows
    measured = {1: {**row.measured[1], "perplexity": math.inf}, 2: {**row.measured[2], "accuracy": math.nan}}
    results = replace(results, rows=(replace(row, measured=measured),))
    shown = dict(zip(tabulate(results).columns, tabulate(results).rows[0], strict=True))
    assert shown["perplexity"] == "inf"
    assert shown["accuracy"].endswith("(1 of 2 seeds)")
    write_comparison(results, tmp_path / "out", {"command": "attnlab compare"})


def test_a_plan_reads_its_pilot_from_the_ledger_and_says_how_many_seeds_are_needed(place):
    before = {path: path.stat().st_mtime_ns for path in (place / "out").iterdir() if path.name != "ledger.jsonl.lock"}
    words = [word for word in WORDS if not word.startswith("attention")] + ["attention=softmax,dagpam"]
    done = compared(place, *words, "--plan", "effect=0.5", "measure=bleu")
    assert done.returncode == 0, done.stderr
    assert "true difference of 0.5 in BLEU from softmax" in done.stdout
    assert "--seeds" in done.stdout
    assert "seed=4" in done.stdout
    done = compared(place, *words, "--plan", "effect=90", "measure=bleu")
    enough = "The 3 seeds of the pilot are enough. Next: the same command without --plan, effect= and measure=."
    assert enough in done.stdout
    done = compared(place, *words, "--plan", "effect=1e-9", "measure=bleu")
    assert "Choose a larger effect= or another measure=: no practical number of seeds is enough." in done.stdout
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before  # nothing was trained, measured, timed or written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan"], "effect= is missing"),
        (["--plan", "effect=0"], "above 0, got 0"),
        (["--plan", "effect=nan"], "finite"),
        (["--plan", "effect=inf"], "finite"),
        (["--plan", "effect=much"], "expected a number"),
        (["--plan", "effect=1", "measure=BLUE"], "did you mean 'BLEU'"),
        (["--plan", "effect=1", "--seeds", "2"], "at least 3 seeds, got 2"),
        (["--plan", "effect=1", "attention=softmax"], "two attentions"),
        (["effect=1"], "--plan"),
        (["measure=BLEU"], "--plan"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line_before_anything_runs(tmp_path, words, message):
    attention = [] if any(word.startswith("attention") for word in words) else ["attention=softmax,coda"]
    done = compared(tmp_path, *attention, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_task_that_is_missing_is_named_before_its_settings(tmp_path):
    done = run_attnlab("compare", "--plan", "effect=0.5", "synthetic", "attention=softmax,coda", cwd=tmp_path)
    assert done.returncode == 2
    assert "unknown task 'effect=0.5'" in done.stderr


def test_a_measure_that_the_pilot_lacks_is_named_with_those_that_it_has(place):
    words = [word for word in WORDS if not word.startswith("attention")] + ["attention=softmax,dagpam"]
    done = compared(place, *words, "--plan", "effect=1", "measure=bits per byte")
    assert done.returncode == 2
    assert "no run of this task has it; it has log-perplexity" in done.stderr


def test_a_run_of_attnlab_train_is_used(tmp_path):
    recipe = resolve_recipe("synthetic", dict(word.split("=") for word in TINY if not word.startswith("device")))
    run = tmp_path / "runs" / recipe.name()
    runs.start_run(recipe, out=str(run), device="cpu", report=lambda values: None, note=lambda line: None)
    before = (run / "last.safetensors").stat().st_mtime_ns
    (row,) = in_here(tmp_path, attention="softmax").rows
    assert row.runs == {1: str(run)}
    assert row.measured[1]["valid_loss"] == RunFolder(run).position()["best"]
    assert (run / "last.safetensors").stat().st_mtime_ns == before


def test_a_seed_that_fails_leaves_the_others(tmp_path):
    first = in_here(tmp_path, attention="softmax", seeds="3").rows[0]
    ledger = tmp_path / "out" / FILE
    ledger.write_text("".join(f"{row.as_line()}\n" for row in Ledger(ledger).rows() if row.seed != 2))
    for name in ("last", "previous", "best"):
        (Path(first.runs[2]) / f"{name}.safetensors").write_bytes(b"damaged")
    again = in_here(tmp_path, attention="softmax", seeds="3").rows[0]
    assert again.measured == {seed: values for seed, values in first.measured.items() if seed != 2}
    assert len(again.failures) == 1
    assert again.failures[0].startswith("seed 2: ")
    assert "damaged" in again.failures[0]


def test_nothing_runs_where_no_row_can_be_built(tmp_path):
    with pytest.raises(ValueError, match="Shaped"):
        in_here(tmp_path, attention="shaped")
    assert not (tmp_path / "runs").exists()


def test_a_row_that_cannot_be_built_is_named_before_anything_is_trained(tmp_path):
    notes = []

    def note(line):
        notes.append(line)
        if line.startswith("shaped"):
            raise KeyboardInterrupt  # as a person would

    with pytest.raises(KeyboardInterrupt):
        in_here(tmp_path, attention="softmax,shaped", note=note)
    assert "shaped: cannot be built and gets no run: Shaped is defined for self-attention only" in notes[-1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow  # test_going_on.py and test_engine.py interrupt smaller work
def test_interrupted_it_says_how_to_go_on_and_goes_on(tmp_path):
    words = ["attention=softmax,coda", "seeds=1", "steps=150", "checkpoint_every=10", "--no-controls", "--jobs=2"]
    words = [word for word in words_of(*words) if word != "steps=20"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not _all_begun(tmp_path / "runs", 2) and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "attnlab: stopped, nothing is lost; to resume: attnlab compare synthetic data=lexicon" in told
    stood = {folder: folder.position() for folder in map(RunFolder, (tmp_path / "runs").iterdir())}
    assert not any(folder.is_locked() for folder in stood)
    assert all(10 <= position["step"] < 150 for position in stood.values())
    in_here(tmp_path, attention="softmax,coda", steps="150", checkpoint_every="10")
    assert all(folder.position()["finished"] for folder in stood)


def _all_begun(root, count):
    runs = list(root.iterdir()) if root.exists() else []
    return len(runs) == count and all(RunFolder(run).position().get("step", 0) >= 10 for run in runs)


def test_an_error_is_one_plain_line_and_status_2(tmp_path):
    done = compared(tmp_path, "attention=softmax,cosa")
    assert done.returncode == 2
    assert done.stderr.startswith("attnlab: no attention is called 'cosa' (did you mean 'coda'?)")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_takes_the_vocabulary_that_was_made_once(tmp_path):
    lines = [f"s{k % 11} s{k % 7}\tt{k % 11} t{k % 7}\n" for k in range(60)]
    for part in ("train", "valid"):
        (tmp_path / f"{part}.tsv").write_text("".join(lines[: 60 if part == "train" else 7]))
    words = {"data": str(tmp_path / "train.tsv"), "valid": str(tmp_path / "valid.tsv"), "units": "word", "steps": "2"}
    words |= {"layers": "1", "width": "8", "heads": "2", "feed_forward": "16", "batch_tokens": "100"}
    recipe, vocabulary = resolve_recipe("translation", words), tmp_path / "vocabulary"
    vocabulary.mkdir()
    TASKS["translation"].prepare(recipe.data, vocabulary)
    train_alone(recipe, RunFolder(tmp_path / "r"), vocabulary, "cpu")
    made = {file.name: file.read_bytes() for file in vocabulary.iterdir()}
    assert made
    assert {name: (tmp_path / "r" / name).read_bytes() for name in made} == made
