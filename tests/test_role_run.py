"""Models of Snell et al. 2021 made side by side: the same numbers, each after what it needs, stopped, gone on with, and
failing."""

import csv
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from snell_corpora import pairs_in, texts_in
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.experiments.jobs import Waiting, attempt
from attnlab.experiments.schedulers import Scheduler, scheduler
from attnlab.experiments.study import Setting
from attnlab.studies.snell2021 import additive, agreements, together, trials
from attnlab.studies.snell2021 import plan as corpora
from attnlab.studies.snell2021.measures import measure
from attnlab.studies.snell2021.plan import ScaleSize
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
    return texts_in(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return pairs_in(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def brief(monkeypatch):
    """Next to nothing is learnt, and soon."""
    size = ScaleSize(width=5, rate=1e-2, measured=7, measured_at=(0, 3), comparisons="BC", proxy_epochs=1, output=5)
    monkeypatch.setitem(corpora.CLASSIFYING, "smoke", size)
    monkeypatch.setitem(corpora.TRANSLATING, "smoke", replace(size, measured_at=(0, 2, 5)))


class InTurn(Scheduler):
    """Jobs one after another in this process, each sent as if to another; what was asked for stays."""

    device, here = "cpu", True

    def __init__(self):
        self.runs = []

    def run(self, jobs, *, alone=False, watch=lambda: None):
        waiting, done = Waiting(jobs), []
        while job := waiting.take():
            done.append((job.name, job.function))
            waiting.ended(job, attempt(pickle.loads(pickle.dumps(job)), os.getcwd()))
            watch()
        self.runs.append(done)
        return waiting.failed


def setting(folder, on=None, seeds=(0,), **more):
    return Setting("smoke", seeds, CPU, folder / "work" / "item", on=on, **more)


def numbers(findings):
    return {(cell.row, cell.column): cell.values for cell in findings.cells}


@pytest.fixture(scope="module")
def one_after_another(texts, pairs, tmp_path_factory):
    """Table 2 and A.1 as they are without a scheduler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreements, "CORPORA", (texts,))
        patch.setattr(additive, "MULTI", pairs)
        here = setting(tmp_path_factory.mktemp("alone"))
        return {name: numbers(item(here)) for name, item in ITEMS.items()}


def test_side_by_side_the_numbers_are_the_same(one_after_another, texts, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(agreements, "CORPORA", (texts,))
    monkeypatch.setattr(additive, "MULTI", pairs)
    monkeypatch.setattr(Trial, "train", lambda self, role: pytest.fail(f"{role} was trained in this process"))
    seen = []
    with scheduler("local", jobs=2, device="cpu") as on:
        here = setting(tmp_path, on, progress=lambda *told: seen.append(told))
        for name, item in ITEMS.items():
            assert numbers(item(here)) == one_after_another[name]
    whole = [told for told in seen if told[0] == told[1]]
    assert list(dict.fromkeys(whole)) == [
        (6, 6, "models trained and measured"),  # A, B and uniform of the texts
        (4, 4, "models trained and measured"),  # A and additive of the pairs
    ]


@pytest.mark.usefixtures("brief")
def test_what_can_be_measured_goes_first_then_a_then_the_longest(texts, pairs, tmp_path):
    on = InTurn()
    here = setting(tmp_path, on, seeds=(0, 1))
    Trial(Field(texts, here), 1).train("C")
    made = together.rows((texts, pairs), here, agreements.beside_a)
    (jobs,) = on.runs

    def measured(name):
        return [(name, together.measure_one)]

    def both(name):
        return [(f"{name}, trained", together.train_some), *measured(name)]

    expected = [*both("Multi30k, seed 0, A"), *both("Multi30k, seed 1, A"), *both("texts, seed 0, A")]
    expected += [*both("texts, seed 1, A"), *measured("texts, seed 1, C")]  # trained before
    for row, roles in (("Multi30k", ("uniform", "B")), ("texts", ("uniform", "B", "C"))):
        for seed in (0, 1):
            for role in roles:
                expected += both(f"{row}, seed {seed}, {role}") if (row, seed, role) != ("texts", 1, "C") else []
    assert jobs == expected
    assert [[trial.seed for trial in row.trials] for row in made] == [[0, 1], [0, 1]]
    together.rows((texts, pairs), here, agreements.beside_a)
    assert on.runs[1:] == [[]]


@pytest.mark.usefixtures("brief")
def test_a_corpus_that_cannot_be_run_has_its_reason_and_no_job(texts, pairs, tmp_path):
    on = InTurn()
    here = setting(tmp_path, on, options={"data": "sst"})
    made = together.rows((pairs, replace(texts, from_scale="full")), here, agreements.beside_a)
    assert [row.reason for row in made] == ["left out by data=sst", "this row is run from scale full on"]
    assert not any(row.trials for row in made)
    assert on.runs == [[]]


def breaks(trial, role):
    """B of seed 1 cannot be measured."""
    if (trial.seed, role) == (1, "B"):
        raise RuntimeError("no space\nleft")
    return measure(trial, role)


@pytest.mark.usefixtures("brief")
def test_one_that_fails_is_named_and_the_others_are_done(texts, tmp_path):
    here = setting(tmp_path, InTurn(), seeds=(0, 1))
    with pytest.raises(ValueError, match=r"^texts, seed 1, B: RuntimeError: no space left \(1 of 8 models failed; "):
        together.rows((texts,), here, agreements.beside_a, breaks)
    known = {(seed, role) for seed in (0, 1) for role in ("A", "uniform", "B", "C")
             if Trial(Field(texts, here), seed).known(role)}  # fmt: skip
    assert len(known) == 7
    assert (1, "B") not in known
    on = InTurn()
    together.rows((texts,), setting(tmp_path, on, seeds=(0, 1)), agreements.beside_a)
    assert on.runs == [[("texts, seed 1, B", together.measure_one)]]


@pytest.mark.usefixtures("brief")
def test_nothing_is_measured_that_failed_before_or_whose_a_did(texts, tmp_path):
    on = InTurn()
    here = setting(tmp_path, on, seeds=(0, 1))
    for seed, role in ((0, "A"), (1, "uniform")):
        Trial(Field(texts, here), seed).folder(role).claim({"another": "run"})
    with pytest.raises(ValueError, match=r"texts, seed 0, A, trained: .*A holds another run .*\(5 of 8 models failed"):
        together.rows((texts,), here, agreements.beside_a)
    measured = [name for name, function in on.runs[0] if function is together.measure_one]
    assert measured == ["texts, seed 1, A", "texts, seed 1, B", "texts, seed 1, C"]
    trained = {name for name, function in on.runs[0] if function is together.train_some}
    assert {f"texts, seed 0, {role}, trained" for role in ("uniform", "B", "C")} <= trained


@pytest.mark.usefixtures("brief")
def test_how_batches_are_cut_changes_chance_alone(pairs, tmp_path, monkeypatch):
    found = []
    for tokens in (8192, 23):
        monkeypatch.setattr(trials, "TOKENS", {"cpu": tokens})
        trial = Trial(Field(pairs, setting(tmp_path / str(tokens))), 0)
        found.append({f"{role}/{name}": curve for role in ("A", "uniform", "B")
                      for name, curve in trial.curves(role, measure).items() if name != "seconds"})  # fmt: skip
        assert (len(trial.field.batches["valid"]) == 1) is (tokens == 8192)
    whole, cut = found
    assert whole.keys() == cut.keys()
    for name, curve in whole.items():
        assert "/chance/" in name or cut[name] == pytest.approx(curve, abs=1e-9), name
    assert any(cut[name] != curve for name, curve in whole.items() if "/chance/" in name)


@pytest.mark.slow
def test_the_command_is_stopped_and_goes_on(one_after_another, tmp_path, monkeypatch):
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
    assert not list(tmp_path.glob("out/items/*"))
    assert not [file for role in ("uniform", "B") for file in tmp_path.glob(f"out/work/runs/*/0/{role}/measured.json")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agreements, "CORPORA", (texts_in(tmp_path),))
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0, (again.output, again.exception)
    cells = list(csv.DictReader((tmp_path / "out" / "cells.csv").read_text().splitlines()))
    values = {(cell["row"], cell["column"]): float(cell["values"]) for cell in cells}
    expected = {place: value for place, (value,) in one_after_another["table2"].items()}
    assert values == expected
