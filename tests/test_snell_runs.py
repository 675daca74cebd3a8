"""The runs behind the tables of Snell et al. 2021, on corpora small enough to know what must come out."""

import csv
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from inline_scheduler import InlineScheduler
from item_runs import make_setting, run_item
from snell_corpora import new_trial, pairs_in, run_trial, texts_in
from typer.testing import CliRunner

from attnlab.analysis.agreement import agreement
from attnlab.cli import app
from attnlab.experiments import single_run
from attnlab.experiments.engine import measure_run
from attnlab.experiments.ledger import Ledger
from attnlab.experiments.plan import Workplace
from attnlab.recording.probe import beta, gamma, saliency
from attnlab.recording.watch import record
from attnlab.studies.snell2021 import additive, agreements, frozen, model_sizes, sms, training_curves
from attnlab.studies.snell2021 import plan as corpora
from attnlab.studies.snell2021.agreements import CHANCE, DEFINED, NEGATED, ScorePair, list_compared, read_columns
from attnlab.studies.snell2021.measures import find_reference
from attnlab.studies.snell2021.plan import ScaleSize
from attnlab.studies.snell2021.role_run import RoleRun
from attnlab.studies.snell2021.trials import Trial
from attnlab.training.loop import Training, TrainingResult

VALIDATION = ScorePair("agreement", "accuracy", "valid")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return texts_in(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return pairs_in(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def classifying(monkeypatch):
    size = ScaleSize(width=13, rate=2e-2, measured_at=(0, 30, 90), comparisons="BC", proxy_epochs=5)
    monkeypatch.setitem(corpora.CLASSIFYING, "smoke", size)


@pytest.fixture
def translating(monkeypatch):
    size = ScaleSize(measured=17, width=13, rate=1e-2, measured_at=(0, 40), proxy_epochs=3, output=9)
    monkeypatch.setitem(corpora.TRANSLATING, "smoke", size)


@pytest.mark.usefixtures("classifying")
def test_attention_goes_to_the_word_that_uniform_attention_learns(texts, tmp_path, monkeypatch):
    """The claim of §3.2 on a corpus where it must hold; then that nothing is trained twice, or kept without need."""
    trial = run_trial(texts, tmp_path, list_compared)
    found = read_columns(trial, VALIDATION).values
    assert found["ξ*"] > 95
    assert found["A(α, β^uf)"] > 80
    assert found["A(Δ, β^uf)"] > 80
    assert found[DEFINED] > 80
    assert found[NEGATED] < 10
    assert 5 < found[CHANCE] < 15
    best = {find_reference(trial, part, "accuracy") for part in ("valid", "train")}
    kept = {int(file.stem) for file in trial.folder("A").path.glob("steps/*")}
    assert kept == best - {0}
    assert not [*trial.folder("uniform").path.glob("steps/*")]
    assert trial.folder("B").best.exists()
    rows = {row.recipe["role"]: row for row in Ledger(tmp_path / "ledger.jsonl").rows()}
    assert rows.keys() == {"A", "uniform", "B", "C"}
    assert rows["A"].values["references"] == sorted(best)
    assert all(len(row.values["valid/accuracy"]) == 3 for role, row in rows.items() if role != "uniform")
    monkeypatch.setattr(Trial, "train", lambda self, role: pytest.fail(f"{role} was trained again"))
    assert read_columns(run_trial(texts, tmp_path, list_compared), VALIDATION).values == found


@pytest.mark.usefixtures("classifying")
def test_interrupted_runs_go_on_and_say_the_same(texts, tmp_path, monkeypatch):
    whole = run_trial(texts, tmp_path / "whole", seed=1)
    start_run, reported = single_run.start_run, []

    def interrupt(values):
        reported.append(values["step"])
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(single_run, "start_run", lambda *given, **more: start_run(*given, **more | {"report": interrupt}))
        with pytest.raises(KeyboardInterrupt):
            run_trial(texts, tmp_path / "cut", seed=1)
    assert reported == [30]  # the first checkpoint
    assert not Ledger(tmp_path / "cut" / "ledger.jsonl").rows()
    again = run_trial(texts, tmp_path / "cut", seed=1)
    parts = json.loads((again.folder("A").path / "ran.json").read_text())
    assert [(part["after"], part["to"]) for part in parts] == [(0, 31), (31, 90)]
    assert again.curves["A"] | {"seconds": None} == whole.curves["A"] | {"seconds": None}


@pytest.mark.usefixtures("classifying")
def test_before_any_update_a_model_is_what_training_starts_from(texts, tmp_path, monkeypatch):
    trial, begun = new_trial(texts, tmp_path, 3), {}

    def only_look(training):
        training.metrics.close()
        begun.update({name: x.detach().clone() for name, x in training.model.named_parameters()})
        return TrainingResult(training.config.steps, 0.0, 0, True, "none")

    monkeypatch.setattr(Training, "run", only_look)
    trial.train("B")
    before = torch.get_rng_state()
    fresh = dict(trial.load_model("B", 0).named_parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert begun.keys() == fresh.keys()
    assert all(torch.equal(begun[name], fresh[name]) for name in begun)
    other = dict(trial.load_model("A", 0).named_parameters())
    assert not torch.equal(other["attention.key.weight"], fresh["attention.key.weight"])


@pytest.mark.usefixtures("translating")
def test_curves_are_the_means_of_single_sentences(pairs, tmp_path):
    """Every pair again, one sentence at a time and without padding, from the weights themselves."""
    place, role = Workplace.at(tmp_path), RoleRun(pairs, "smoke", 0, "uniform")
    measure_run(role.gold, place)
    role.train(place)
    trial = role.trial(place)
    gold = find_reference(trial, "train", "accuracy")
    a, uniform = trial.load_model("A", gold), trial.load_model("uniform", 40)
    held = {"probe": [], "saliency": [], "negated": []}
    for k in trial.field.indices["train"]:
        batch = trial.field.task.make_batch("train", [k])
        assert bool((batch.inputs[0] != 0).all())
        judged = beta(uniform, batch.inputs, batch.targets)[0]
        alpha = record(a, batch.inputs).kind("cross")[-1].weights[0, 0]
        delta = saliency(a, batch.inputs, batch.targets)[0]
        for name, u in (("probe", alpha), ("saliency", delta), ("negated", -delta)):
            held[name] += agreement(u, judged).tolist()
    measure_run(role, place)
    curves = place.open_ledger().find(role.key).values
    for name, each in held.items():
        assert curves[f"train/{gold}/{name}/agreement"][-1] == pytest.approx(100 * sum(each) / len(each))
    assert not any("train" in name and "kendall" in name for name in curves)


@pytest.mark.usefixtures("translating")
def test_the_optimal_attention_of_the_additive_model_is_better_than_its_own(pairs, tmp_path):
    trial = new_trial(pairs, tmp_path)
    trial.train("additive")
    model, batch = trial.load_model("additive", 40), trial.field.batches["valid"][0]
    assert model.combine is torch.add
    log_p = model(*batch.inputs).log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]  # under its own α
    probes = beta(model, batch.inputs, batch.targets)
    for t, (best, alone, mask) in enumerate(additive.find_optimal_rows(model, batch)):
        real = batch.targets[:, t] != 0
        assert torch.equal(alone, probes[real, t])
        assert best.sum(-1).allclose(torch.ones(len(best), dtype=best.dtype))
        assert not best[~mask].any()
        logits = gamma(model, batch.inputs, position=t)[real].double()  # (words,l,vocabulary)
        mixed = torch.einsum("wl,wlo->wo", best, logits).log_softmax(-1)
        reached = mixed.gather(-1, batch.targets[real, t][:, None])[:, 0]
        assert bool((reached >= log_p[real, t] - 1e-5).all())
        assert bool((reached >= alone.max(-1).values - 1e-5).all())


@pytest.mark.slow  # five seconds or more on an idle core
def test_every_item_runs_on_any_corpus(texts, pairs, tmp_path, monkeypatch):
    """The items themselves, with both corpora in the place of the paper's."""
    short = ScaleSize(width=13, rate=2e-2, measured_at=(0, 60), comparisons="B", proxy_epochs=2)
    monkeypatch.setitem(corpora.CLASSIFYING, "smoke", short)
    monkeypatch.setitem(corpora.TRANSLATING, "smoke", replace(short, measured=7, measured_at=(0, 9), output=5))
    for module in (agreements, corpora):
        monkeypatch.setattr(module, "CORPORA", (texts, pairs))
    for name in ("SMS", "SST"):
        monkeypatch.setattr(sms, name, replace(texts, row=name))
    monkeypatch.setattr(additive, "MULTI", pairs)
    on = InlineScheduler()
    items = {**{name: getattr(agreements, name) for name in agreements.TABLES}, "fig2": training_curves.fig2}
    items |= {"table10": frozen.table10, "a1": additive.a1, "a9": sms.a9}
    cells = {
        name: {(c.row, c.column): c for c in run_item(run, tmp_path, on, seeds=(0, 1)).cells}
        for name, run in items.items()
    }
    assert len(on.names) == len(set(on.names))  # the items share their runs
    assert all(c.item == name and c.values for name, found in cells.items() for c in found.values())
    assert all("smaller scale" in c.tags for found in cells.values() for c in found.values() if not c.exact)
    table2, table10, fig2 = cells["table2"], cells["table10"], cells["fig2"]
    assert table2["texts", "A(α, β^uf)"].values == table10["texts", "A(α, β^uf)"].values
    assert table2["texts", "A(α, β^uf)"].values == fig2["texts", "A(α, β^uf), best checkpoint"].values
    assert ("Multi30k", NEGATED) not in table2
    assert ("Multi30k", "A(α, β)") not in cells["table4"]
    assert {row for row, _ in cells["table6"]} == {"Multi30k"}
    assert all(x < -40 for x in table10["texts", "A(α, α^fr) − A(α, β^uf)"].values)
    assert set(cells["a9"]["SMS − SST", "A(α, α̂)"].values) == {0.0}


def reproduce_smoke(folder, *words):
    """Run `attnlab reproduce snell2021` on real data, and return its cells and the names of its figures."""
    if not os.environ.get("ATTNLAB_DATA"):
        pytest.skip("ATTNLAB_DATA is not set: it names the folder of data sets that this test reads")
    command = ["reproduce", "snell2021", "--out", str(folder), "--data-dir", os.environ["ATTNLAB_DATA"], "--device=cpu"]
    result = CliRunner().invoke(app, [*command, *words])
    assert result.exit_code == 0, (result.output, result.exception)
    rows = csv.DictReader((folder / "smoke" / "cells.csv").read_text().splitlines())
    figures = {file.stem.partition("-")[2] for file in (folder / "smoke" / "figures").iterdir()}
    return {(row["item"], row["row"], row["column"]): row for row in rows}, figures


@pytest.mark.data
def test_the_smoke_scale_shows_the_effect_from_the_command_line(tmp_path):
    found, figures = reproduce_smoke(tmp_path, "--only=table2", "--only=fig2", "data=sst", "--seeds=1")
    above = found["table2", "SST, official parts", "A(α, β^uf) − Â"]
    assert float(above["values"]) > 2
    assert above["tags"] == "other data; other vocabulary; smaller scale"
    assert "from scale full on" in found["table2", "IMDB", "A(α, β^uf)"]["not_run"]
    assert figures == {"sst"}


@pytest.mark.slow
@pytest.mark.data
def test_every_item_of_the_smoke_scale_from_the_command_line(tmp_path):
    items = [*agreements.TABLES, "fig2", "table10", "a1", "a9"]
    found, figures = reproduce_smoke(tmp_path, *(f"--only={item}" for item in items))
    assert {item for item, _, _ in found} == set(items)
    assert all(float(x) > 2 for x in found["table2", "SST, official parts", "A(α, β^uf) − Â"]["values"].split())
    assert found["a9", "SMS", "training examples"]["verdict"] == "reproduced"
    assert {name.rpartition("-")[2] for name in figures} == {"sst", "multi30k"}


def test_the_models_have_the_published_numbers_of_parameters(tmp_path):
    cells = model_sizes.a8(make_setting(tmp_path)).cells
    assert len(cells) == 10
    assert {cell.verdict for cell in cells} == {"reproduced"}
