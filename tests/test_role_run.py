"""Planned runs of Snell et al. 2021: side by side, in order, stopped, failing, as populations, from a ledger alone."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from inline_scheduler import InlineScheduler
from item_runs import make_setting, run_item
from snell_corpora import make_brief, pairs_in, run_trial, texts_in
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.experiments import engine
from attnlab.experiments.engine import RowReader, complete, make_jobs, train_runs
from attnlab.experiments.ledger import Ledger
from attnlab.experiments.plan import Workplace
from attnlab.experiments.recipe_population import RecipeSeeds
from attnlab.experiments.schedulers import open_scheduler
from attnlab.studies.snell2021 import additive, agreements, role_run, trials
from attnlab.studies.snell2021 import plan as corpora
from attnlab.studies.snell2021.agreements import list_compared
from attnlab.studies.snell2021.measures import measure_agreement
from attnlab.studies.snell2021.role_run import RoleRun, read_corpora
from attnlab.studies.snell2021.trials import Field, Trial

CPU = torch.device("cpu")
ITEMS = {"table2": agreements.table2, "a1": additive.a1}
COMMAND = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from snell_corpora import texts_in
from attnlab.cli import main
from attnlab.studies.snell2021 import agreements
if __name__ == "__main__":
    agreements.CORPORA = (texts_in(Path.cwd()),)
    main()
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return make_brief(texts_in(tmp_path_factory.mktemp("texts")))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_brief(pairs_in(tmp_path_factory.mktemp("pairs")))


@pytest.fixture(scope="module")
def items(texts, pairs):
    """Table 2 and A.1 of the small corpora."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "CORPORA", (texts,))
        patch.setattr(additive, "MULTI", pairs)
        yield ITEMS


def numbers(findings):
    return {(cell.row, cell.column): cell.values for cell in findings.cells}


@pytest.fixture(scope="module")
def in_turn(items, tmp_path_factory):
    """Both items with their runs one after another in this process."""
    return {name: numbers(run_item(item, tmp_path_factory.mktemp("in-turn"))) for name, item in items.items()}


def name_run(corpus, seed, role):
    return f"{corpus.row} at smoke scale, seed {seed}, {role}, agreement"


def list_rows(out):
    return {(row.recipe["corpus"], row.seed, row.recipe["role"]): row for row in Ledger(out / "ledger.jsonl").rows()}


# --- in processes ---


def test_side_by_side_the_numbers_are_the_same(in_turn, items, tmp_path, monkeypatch):
    monkeypatch.setattr(Trial, "train", lambda self, role: pytest.fail(f"{role} was trained in this process"))
    with open_scheduler("local", jobs=2, device="cpu") as on:
        for name, expected in (
            ("table2", (12, 12, "4 of 4 runs measured")),
            ("a1", (10, 10, "2 of 2 runs measured")),
        ):
            seen = []
            found = run_item(items[name], tmp_path, on, progress=lambda *told, seen=seen: seen.append(told))
            assert numbers(found) == in_turn[name]
            assert seen[-1] == expected
    for name, item in items.items():
        assert numbers(item(make_setting(tmp_path, running=False))) == in_turn[name]  # from the ledger alone


@pytest.mark.slow
def test_the_command_is_stopped_and_goes_on(tmp_path, monkeypatch):
    words = ["reproduce", "snell2021", "--only=table2", "--seeds=1", "--jobs=2", "--device=cpu", "--out=out"]
    stopped = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(Path(__file__).parent), *words],
        cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not list(tmp_path.glob("out/work/runs/*/0/A/steps/*.safetensors")):
        assert stopped.poll() is None, stopped.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    os.killpg(stopped.pid, signal.SIGINT)
    said = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, said
    assert {row.recipe["role"] for row in Ledger(tmp_path / "out" / "ledger.jsonl").rows()} <= {"A"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agreements, "CORPORA", (texts_in(tmp_path),))
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0, (again.output, again.exception)
    cells = list(csv.DictReader((tmp_path / "out" / "smoke" / "cells.csv").read_text().splitlines()))
    values = {(cell["row"], cell["column"]): float(cell["values"]) for cell in cells}
    whole = numbers(run_item(agreements.table2, tmp_path / "whole"))
    assert values == {place: value for place, (value,) in whole.items()}


# --- what is run, and in which order ---


def test_what_can_be_measured_goes_first_then_a_then_the_longest(texts, pairs, tmp_path):
    on, about = InlineScheduler(), {"seeds": (0, 1)}
    Trial(Field(texts, make_setting(tmp_path)), 1).train("C")

    def read(setting):
        return read_corpora((texts, pairs), setting, list_compared)

    rows = run_item(read, tmp_path, on, **about)
    expected = [name_run(corpus, seed, "A") for corpus in (pairs, texts) for seed in (0, 1)]
    expected.append(name_run(texts, 1, "C"))  # trained before
    for corpus, roles in ((pairs, ("uniform", "B")), (texts, ("uniform", "B", "C"))):
        for seed in (0, 1):
            for name in [name_run(corpus, seed, role) for role in roles]:
                expected += [f"{name}, training", name] if name not in expected else []
    assert on.names == expected
    assert [[trial.seed for trial in row.trials] for row in rows] == [[0, 1], [0, 1]]
    run_item(read, tmp_path, on, **about)
    assert on.names == expected


def test_a_corpus_that_cannot_be_run_has_its_reason_and_no_job(texts, pairs, tmp_path):
    on, some = InlineScheduler(), (pairs, replace(texts, from_scale="full"))
    rows = run_item(lambda setting: read_corpora(some, setting, list_compared), tmp_path, on, options={"data": "sst"})
    assert [row.reason for row in rows] == ["excluded by data=sst", "this row runs from scale full on"]
    assert not any(row.trials for row in rows)
    assert not on.names


def breaks(trial, role):
    """B of seed 1 cannot be measured."""
    if (trial.seed, role) == (1, "B"):
        raise RuntimeError("no space\nleft")
    return measure_agreement(trial, role)


def breaks_otherwise(trial, role):
    raise RuntimeError("no memory left")


def test_one_that_fails_is_named_and_tried_again_and_the_others_are_done(texts, tmp_path):
    def read(function):
        on = InlineScheduler()
        item = lambda setting: read_corpora((texts,), setting, list_compared, function=function)  # noqa: E731
        try:
            run_item(item, tmp_path, on, seeds=(0, 1))
        finally:
            names.append(on.names)

    names = []
    with pytest.raises(ValueError, match=r"^sst, seed 1, B: RuntimeError: no space left \(1 of 8 runs failed"):
        read(breaks)
    rows = list_rows(tmp_path)
    assert {place for place, row in rows.items() if row.failed} == {("sst", 1, "B")}
    assert len(rows) == 8
    assert not rows["sst", 1, "B"].final
    with pytest.raises(ValueError, match="no memory left"):
        read(breaks_otherwise)
    assert list_rows(tmp_path)["sst", 1, "B"].failed == "RuntimeError: no memory left"
    read(measure_agreement)
    assert names[1] == names[2] == [name_run(texts, 1, "B")]
    assert not list_rows(tmp_path)["sst", 1, "B"].failed


def test_nothing_is_measured_that_failed_before_or_whose_a_did(texts, tmp_path):
    on = InlineScheduler()
    for seed, role in ((0, "A"), (1, "uniform")):
        Trial(Field(texts, make_setting(tmp_path)), seed).folder(role).claim({"another": "run"})
    with pytest.raises(ValueError, match=r"sst, seed 0, A: .*another.*\(5 of 8 runs failed"):
        run_item(lambda setting: read_corpora((texts,), setting, list_compared), tmp_path, on, seeds=(0, 1))
    rows = list_rows(tmp_path)
    assert {place[1:] for place, row in rows.items() if not row.failed} == {(1, "A"), (1, "B"), (1, "C")}
    assert "another" in rows["sst", 1, "uniform"].failed  # why training failed, not that it did
    assert all(name_run(texts, 0, "A") in rows["sst", 0, role].failed for role in ("uniform", "B", "C"))
    measured = [name for name in on.names if not name.endswith("training")]
    assert measured == [name_run(texts, seed, role) for seed, role in ((0, "A"), (1, "A"), (1, "B"), (1, "C"))]
    assert {f"{name_run(texts, 0, role)}, training" for role in ("uniform", "B", "C")} <= set(on.names)


def test_how_batches_are_cut_changes_chance_alone(pairs, tmp_path, monkeypatch):
    found = []
    for tokens in (8192, 23):
        monkeypatch.setattr(trials, "TOKENS", {"cpu": tokens})
        trial = run_trial(pairs, tmp_path / str(tokens), lambda size: ("uniform", "B"))
        found.append({f"{role}/{name}": curve for role, curves in trial.curves.items()
                      for name, curve in curves.items() if name != "seconds"})  # fmt: skip
        assert (len(trial.field.batches["valid"]) == 1) is (tokens == 8192)
    whole, cut = found
    assert whole.keys() == cut.keys()
    for name, curve in whole.items():
        assert "/chance/" in name or cut[name] == pytest.approx(curve, abs=1e-9), name
    assert any(cut[name] != curve for name, curve in whole.items() if "/chance/" in name)


# --- from the ledger, where weights are gone ---


def test_where_only_the_row_of_a_is_left_it_is_trained_again_for_those_that_need_it(texts, tmp_path):
    first = run_trial(texts, tmp_path, lambda size: ("B",))
    whole = run_trial(texts, tmp_path, lambda size: ("frozen",))
    rows = (tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "ledger.jsonl").write_text("".join(rows[:2]))  # A and B, as on another machine
    on = InlineScheduler()
    again = run_trial(texts, tmp_path / "elsewhere", lambda size: ("frozen",), on=on)
    assert on.names == [f"{name_run(texts, 0, 'A')}, training again", name_run(texts, 0, "frozen")]
    assert again.curves["A"] == first.curves["A"]
    assert again.curves["frozen"] | {"seconds": 0} == whole.curves["frozen"] | {"seconds": 0}
    kept = [sorted(file.name for file in trial.folder("A").path.glob("steps/*")) for trial in (first, again)]
    assert kept[0] == kept[1]


def test_measured_again_they_are_trained_again_since_their_weights_were_deleted(texts, tmp_path):
    first = run_trial(texts, tmp_path, lambda size: ("B",))
    setting, on = make_setting(tmp_path), InlineScheduler()

    def read(rows):
        return read_corpora((texts,), replace(setting, rows=rows), lambda size: ("B",))

    (row,) = complete(read, setting.place, on, reader=RowReader(setting.place.open_ledger(), running=True, again=True))
    assert sum(line.count('"agreement"') for line in (tmp_path / "ledger.jsonl").read_text().splitlines()) == 4
    for role, curves in row.trials[0].curves.items():
        assert curves | {"seconds": 0} == first.curves[role] | {"seconds": 0}
    assert on.names[0] == name_run(texts, 0, "A")


# --- as populations ---


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """A place whose runs are grouped as on a GPU, and computed on the CPU."""
    monkeypatch.setattr(Field, "device", CPU)
    monkeypatch.setattr(role_run, "find_room", lambda device: 10_000)
    monkeypatch.setattr(engine, "collect_provenance", lambda device: {})
    return Workplace.at(tmp_path, device="cuda")


def test_what_diverges_among_others_is_trained_alone_and_all_are_measured(texts, on_gpu, tmp_path, monkeypatch):
    model = RecipeSeeds.model

    def broken(self, seed):
        made = model(self, seed)
        if seed % corpora.SEEDS_APART == corpora.ROLES["B"]:
            with torch.no_grad():
                next(made.parameters()).fill_(torch.nan)
        return made

    monkeypatch.setattr(RecipeSeeds, "model", broken)
    on = InlineScheduler("cuda")
    trial = run_trial(texts, tmp_path, list_compared, on=on, device="cuda")
    assert f"{name_run(texts, 0, 'A')} and 2 more, training" in on.names
    assert trial.curves.keys() == {"A", "uniform", "B", "C"}
    assert all(trial.curves.values())
    steppers = {role: json.loads((trial.folder(role).path / "ran.json").read_text())[-1]["stepper"]
                for role in trial.curves}  # fmt: skip
    assert steppers == dict.fromkeys(("A", "C", "uniform"), "population, tf32") | {"B": "eager"}


def test_one_by_itself_is_a_population_on_a_gpu_where_it_has_room(texts, on_gpu, tmp_path, monkeypatch):
    RoleRun(texts, "smoke", 0, "B").train(on_gpu)
    for role, device, room, expected in (
        ("A", "cuda", 10**6, True), ("A", "cuda", 1, False), ("A", "cpu", 10**6, False), ("B", "cuda", 10**6, False)
    ):  # fmt: skip
        monkeypatch.setattr(role_run, "find_room", lambda device, room=room: room)
        place = replace(on_gpu, device=device)
        assert (RoleRun(texts, "smoke", 0, role).group(place) is not None) is expected


def test_on_a_gpu_alike_ones_are_grouped_but_for_those_begun_alone(texts, on_gpu, monkeypatch):
    monkeypatch.setattr(role_run, "count_fitting", lambda task, training, room: 2)
    runs = [RoleRun(texts, "smoke", seed, role) for seed in (0, 1) for role in ("A", "uniform", "B", "C")]
    runs[3].train(on_gpu)
    (runs[3].trial(on_gpu).folder("C").step_file(3)).unlink()  # begun alone, and not to be measured yet

    def groups(place):
        jobs = [job for job in make_jobs(runs, place) if job.function is train_runs]
        return [[(run.seed, run.role) for run in job.arguments[0]] for job in jobs]

    as_one = [[(0, "A"), (0, "B")], [(1, "A"), (1, "B")], [(1, "C")], [(0, "uniform"), (1, "uniform")], [(0, "C")]]
    assert sorted(groups(on_gpu)) == sorted(as_one)
    alone = [
        [(run.seed, run.role)] for run in runs if run.role != "A"
    ]  # A needs no other: one job trains and measures it
    assert groups(replace(on_gpu, device="cpu")) == alone
    train_runs((runs[0], runs[2]), on_gpu)
    assert runs[0].is_trained(on_gpu)
    assert runs[2].is_trained(on_gpu)
    seconds = [run.trial(on_gpu).read_seconds(run.role) for run in (runs[0], runs[2])]
    assert seconds[0] == seconds[1] > 0
