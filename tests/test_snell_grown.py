"""Runs trained as one are the runs that are trained alone; which ones are, and what is said where they cannot be."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from snell_corpora import pairs_in, texts_in

from attnlab import population
from attnlab.runs import open_run
from attnlab.store import read_checkpoint
from attnlab.studies.compare.work import finished
from attnlab.studies.snell2021 import corpora, grown, together
from attnlab.studies.snell2021.corpora import Size
from attnlab.studies.snell2021.grown import Runs, how_many, train_as_one
from attnlab.studies.snell2021.measures import measure
from attnlab.studies.snell2021.together import Wanted
from attnlab.studies.snell2021.trials import Field, Trial
from attnlab.studies.study import Setting

CPU = torch.device("cpu")
STEPS = (0, 3, 40)  # more than an epoch


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    size = Size(width=5, rate=1e-2, measured=7, measured_at=STEPS, comparisons="BC", proxy_epochs=1, output=5)
    monkeypatch.setitem(corpora.CLASSIFYING, "smoke", size)
    monkeypatch.setitem(corpora.TRANSLATING, "smoke", size)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return texts_in(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return pairs_in(tmp_path_factory.mktemp("pairs"))


def trial(corpus, folder, seed=0):
    return Trial(Field(corpus, Setting("smoke", (seed,), CPU, folder / "work" / "item")), seed)


def grown_from(one, roles):
    field, folders = one.field, [one.folder(role) for role in roles]
    train_as_one(field.task, [one.recipe(role) for role in roles], folders, field.vocabulary, CPU)
    return folders


def stacked(experiment, seeds, *, device, folder, processes):
    """As on a GPU."""
    folder.mkdir()
    return population._together(experiment, seeds, device, folder / "population.safetensors", lambda done, total: None)


@pytest.mark.parametrize("as_one", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("roles", [("A", "B", "C"), ("uniform",), ("frozen",)], ids=lambda roles: roles[0])
def test_a_run_trained_among_others_is_the_one_trained_alone(texts, tmp_path, monkeypatch, roles, as_one):
    if as_one:
        monkeypatch.setattr(grown, "grow", stacked)
    alone, among = trial(texts, tmp_path / "alone"), trial(texts, tmp_path / "among")
    assert among.field.task.size("train") % 32, "the last batch of an epoch should be a smaller one"
    folders = grown_from(among, roles)
    for role, folder in zip(roles, folders, strict=True):
        alone.train(role)
        for step in STEPS[1:]:
            mine, theirs = (read_checkpoint(where.kept(step)).part("model/") for where in (folder, alone.folder(role)))
            assert mine.keys() == theirs.keys()
            began = {name: x.detach() for name, x in alone.model(role, 0).named_parameters()}
            moved = sum(float((theirs[name] - x).square().sum()) for name, x in began.items())
            apart = sum(float((theirs[name] - mine[name]).square().sum()) for name in began)
            assert apart < 1e-4 * moved  # rounding of gradients that are next to 0, which Adam blows up
        assert finished(folder)
        assert folder.config() == alone.folder(role).config()


def test_what_is_left_is_a_run(texts, tmp_path):
    one = trial(texts, tmp_path)
    folder, _ = grown_from(one, ("A", "B"))
    (ran,) = json.loads((folder.path / "ran.json").read_text())
    assert (ran["after"], ran["to"], ran["stepper"]) == (0, 40, "population")
    opened = open_run(folder.path, device="cpu", weights="last")
    kept = read_checkpoint(folder.kept(40)).part("model/")
    assert all(torch.equal(x, kept[name]) for name, x in opened.model.named_parameters())
    assert not list(folder.path.parent.glob("as-one*"))
    before = folder.last.stat().st_mtime_ns
    one.train("A")
    assert folder.last.stat().st_mtime_ns == before  # finished, so not trained again


def test_an_interrupted_one_goes_on(texts, tmp_path, monkeypatch):
    whole = grown_from(trial(texts, tmp_path / "whole"), ("A", "B"))
    one, write = trial(texts, tmp_path / "stopped"), Runs.measure
    monkeypatch.setattr(Runs, "__init__", _often(Runs.__init__))

    def stops(self, population, seeds, step):
        if step == 40:
            raise KeyboardInterrupt
        return write(self, population, seeds, step)

    monkeypatch.setattr(Runs, "measure", stops)
    with pytest.raises(KeyboardInterrupt):
        grown_from(one, ("A", "B"))
    assert not finished(one.folder("A"))
    monkeypatch.setattr(Runs, "measure", write)
    for folder, expected in zip(grown_from(one, ("A", "B")), whole, strict=True):
        for name, x in read_checkpoint(expected.last).part("model/").items():
            torch.testing.assert_close(read_checkpoint(folder.last).part("model/")[name], x)


def _often(init):
    def made(self, *arguments):
        init(self, *arguments)
        self.checkpoint_every = 7

    return made


def test_a_translator_has_no_padding_among_its_targets(pairs, tmp_path):
    one = trial(pairs, tmp_path)
    runs = Runs(one.field.task, [one.recipe("A"), one.recipe("B")], [one.folder("A"), one.folder("B")])
    seeds = list(runs.recipes)
    source, given, goal = runs.feed(seeds, CPU)(0)
    assert source.shape[:2] == given.shape[:2] == goal.shape[:2] == (2, 16)
    assert bool(((goal == population.IGNORED) == (goal <= 0)).all())
    plan = one.field.task.plan("train", examples=16, seed=seeds[1], epoch=0)
    batch = one.field.task.batch("train", plan[0])
    assert torch.equal(source[1, :, : batch.inputs[0].shape[1]], batch.inputs[0])
    assert int((goal[1] > 0).sum()) == batch.count


def test_those_that_differ_in_more_than_a_seed_are_refused(texts, tmp_path):
    one = trial(texts, tmp_path)
    with pytest.raises(ValueError, match="differ in more than their seed"):
        grown_from(one, ("A", "uniform"))
    recipe = one.recipe("A")
    for change, said in (({"clip": 1.0}, None), ({"warmup": 5}, "warmup=5: .* only with warmup=0"),
                         ({"batch_examples": None}, "say batch_examples=")):  # fmt: skip
        changed = replace(recipe, training=replace(recipe.training, **change))
        if said is None:
            Runs(one.field.task, [changed], [one.folder("A")])
            continue
        with pytest.raises(ValueError, match=said):
            Runs(one.field.task, [changed], [one.folder("A")])


def test_one_that_diverges_is_named_and_the_others_are_finished(texts, tmp_path, monkeypatch):
    made, one = Runs.model, trial(texts, tmp_path)

    def broken(self, seed):
        model = made(self, seed)
        if seed == one.recipe("B").training.seed:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        return model

    monkeypatch.setattr(Runs, "model", broken)
    with pytest.raises(ValueError, match=r"0/B: a loss or a gradient was not finite"):
        grown_from(one, ("A", "B"))
    assert (finished(one.folder("A")), finished(one.folder("B"))) == (True, False)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([10] * 1000, 52), ([10] * 999 + [1000], 1), ([*range(1, 101)] * 10, 5)],
    ids=["of one length", "one very long", "even"],
)
def test_so_many_are_trained_as_one_as_fit_and_are_not_much_wider(lengths, expected):
    class Task:
        def lengths(self, part):
            return (np.array(lengths),)

    training = corpora.SST.recipe("full", "A", 0).training
    assert how_many(Task(), training, room=10 * 32 * 52) == expected


def test_on_a_gpu_alike_ones_are_grouped(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(together, "how_many", lambda task, training: 2)
    wanted = [Wanted(texts, "smoke", seed, tmp_path / "work" / "item", None, "cpu", role, measure)
              for seed in (0, 1) for role in ("A", "uniform", "B")]  # fmt: skip
    groups = together._groups(wanted, "cuda")
    assert [[(each.seed, each.role) for each in group] for group in groups] == [
        [(0, "A"), (0, "B")], [(1, "A"), (1, "B")], [(0, "uniform"), (1, "uniform")],
    ]  # fmt: skip
    assert together._groups(wanted, "cpu") == [(each,) for each in wanted]
    together.train_some(groups[0])
    assert all(each.trained for each in groups[0])
    seconds = [json.loads((each.trial.folder(each.role).path / "trained.json").read_text()) for each in groups[0]]
    assert seconds[0] == seconds[1]
    assert seconds[0]["seconds"] > 0
