"""Runs trained as one are the runs that are trained alone; which ones are, and what is said where they cannot be."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from snell_corpora import new_trial, pairs_in, texts_in

from attnlab.experiments import recipe_population
from attnlab.experiments.population import IGNORED
from attnlab.experiments.recipe_population import RecipeSeeds, count_fitting, train_recipes
from attnlab.experiments.single_run import is_finished
from attnlab.studies.snell2021 import plan as corpora
from attnlab.studies.snell2021.plan import ScaleSize
from attnlab.training.run_folder import read_checkpoint
from attnlab.training.runs import open_run, start_run

CPU = torch.device("cpu")
STEPS = (0, 3, 40)  # more than an epoch


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    size = ScaleSize(width=5, rate=1e-2, measured=7, measured_at=STEPS, comparisons="BC", proxy_epochs=1, output=5)
    monkeypatch.setitem(corpora.CLASSIFYING, "smoke", size)
    monkeypatch.setitem(corpora.TRANSLATING, "smoke", size)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return texts_in(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return pairs_in(tmp_path_factory.mktemp("pairs"))


def train_together(one, roles):
    field, folders = one.field, [one.folder(role) for role in roles]
    train_recipes(field.task, [one.recipe(role) for role in roles], folders, field.vocabulary, CPU)
    return folders


@pytest.mark.parametrize("how", ["one width", "long ones apart"])
@pytest.mark.parametrize("roles", [("A", "B", "C"), ("uniform",), ("frozen",)], ids=lambda roles: roles[0])
def test_a_run_trained_among_others_is_the_one_trained_alone(texts, tmp_path, monkeypatch, roles, how):
    if how == "long ones apart":
        monkeypatch.setattr(recipe_population, "LONG", 12)
    alone, among = new_trial(texts, tmp_path / "alone"), new_trial(texts, tmp_path / "among")
    assert among.field.task.count_examples("train") % 32, "the last batch of an epoch should be a smaller one"
    folders = train_together(among, roles)
    for role, folder in zip(roles, folders, strict=True):
        alone.train(role)
        for step in STEPS[1:]:
            mine, theirs = (
                read_checkpoint(where.step_file(step)).part("model/") for where in (folder, alone.folder(role))
            )
            assert mine.keys() == theirs.keys()
            began = {name: x.detach() for name, x in alone.load_model(role, 0).named_parameters()}
            if (
                role == "frozen"
            ):  # a bias that no relu cuts off moves all logits of a text alike: its gradient is rounding
                began = {name: x for name, x in began.items() if not name.endswith("bias")}
            moved = sum(float((theirs[name] - x).square().sum()) for name, x in began.items())
            apart = sum(float((theirs[name] - mine[name]).square().sum()) for name in began)
            assert apart < 5e-4 * moved  # rounding of gradients that are next to 0, which Adam blows up
        assert is_finished(folder)
        assert folder.config() == alone.folder(role).config()


def test_what_is_left_is_a_run(texts, tmp_path):
    one = new_trial(texts, tmp_path)
    folder, _ = train_together(one, ("A", "B"))
    (ran,) = json.loads((folder.path / "ran.json").read_text())
    assert (ran["after"], ran["to"], ran["stepper"]) == (0, 40, "population, tf32")
    opened = open_run(folder.path, device="cpu")
    kept = read_checkpoint(folder.step_file(40)).part("model/")
    assert all(torch.equal(x, kept[name]) for name, x in opened.model.named_parameters())
    assert not list(folder.path.parent.glob("as-one*"))
    before = folder.last.stat().st_mtime_ns
    one.train("A")
    assert folder.last.stat().st_mtime_ns == before  # finished, so not trained again
    with pytest.raises(ValueError, match="finished"):
        start_run(one.recipe("A"), out=str(folder.path), device="cpu", report=print, note=print, task=one.field.task)


def test_an_interrupted_one_goes_on_from_where_it_was(texts, tmp_path, monkeypatch):
    whole = train_together(new_trial(texts, tmp_path / "whole"), ("A", "B"))
    one, feed, fed = new_trial(texts, tmp_path / "stopped"), RecipeSeeds.feed, []

    def stops_at(last):
        def noted(self, seeds, device):
            batches = feed(self, seeds, device)

            def made(step):
                fed.append((*seeds, step))
                if step == last:
                    os.kill(os.getpid(), signal.SIGTERM)
                return batches(step)

            return made

        return noted

    monkeypatch.setattr(RecipeSeeds, "feed", stops_at(11))
    with pytest.raises(KeyboardInterrupt):
        train_together(one, ("A", "B"))
    assert not is_finished(one.folder("A"))
    assert len(fed) == 12
    monkeypatch.setattr(RecipeSeeds, "feed", stops_at(None))
    for folder, expected in zip(train_together(one, ("B", "A")), whole[::-1], strict=True):
        for name, x in read_checkpoint(expected.last).part("model/").items():
            torch.testing.assert_close(read_checkpoint(folder.last).part("model/")[name], x)
    assert len(fed) == len(set(fed)) == 40


def test_a_translator_has_no_padding_among_its_targets(pairs, tmp_path):
    one = new_trial(pairs, tmp_path)
    runs = RecipeSeeds(one.field.task, [one.recipe("A"), one.recipe("B")], [one.folder("A"), one.folder("B")])
    seeds = list(runs.recipes)
    ((source, given, goal),) = runs.feed(seeds, CPU)(0)
    assert source.shape[:2] == given.shape[:2] == goal.shape[:2] == (2, 16)
    assert bool(((goal == IGNORED) == (goal <= 0)).all())
    plan = one.field.task.plan_batches("train", examples=16, seed=seeds[1], epoch=0)
    longest = np.maximum.reduce(one.field.task.get_lengths("train"))
    batch = one.field.task.make_batch("train", sorted(plan[0], key=lambda index: -longest[index]))
    assert torch.equal(source[1, :, : batch.inputs[0].shape[1]], batch.inputs[0])
    assert int((goal[1] > 0).sum()) == batch.count


def test_long_texts_are_passed_apart_and_the_others_not_padded_to_them(texts, tmp_path, monkeypatch):
    one = new_trial(texts, tmp_path)
    task, lengths = one.field.task, one.field.task.get_lengths("train")[0]
    monkeypatch.setattr(recipe_population, "LONG", 13)
    short, long = (iter(np.flatnonzero(which).tolist()) for which in (lengths <= 13, lengths > 13))
    plan = [[next(long) for _ in range(many)] + [next(short) for _ in range(rows - many)]
            for many, rows in ((0, 32), (1, 32), (5, 32), (17, 32), (32, 32), (2, 25), (3, 3))]  # fmt: skip
    other = [plan[0], plan[0], *plan[2:]]  # of the second step, the other seed has nothing long
    plans = dict(zip((seeds := [corpora.ROLES["B"], corpora.ROLES["A"]]), (plan, other), strict=True))
    monkeypatch.setattr(task, "plan_batches", lambda part, *, examples, seed, epoch: plans[seed])
    feed = RecipeSeeds(task, [one.recipe("A"), one.recipe("B")], [one.folder("A"), one.folder("B")]).feed(seeds, CPU)
    shapes = [[tuple(tokens.shape[1:]) for tokens, _ in feed(step)] for step in range(len(plan))]
    assert shapes == [[(32, 13)], [(4, 16), (28, 13)], [(8, 16), (24, 13)], [(32, 16)], [(32, 16)],
                      [(4, 16), (28, 13)], [(4, 16)]]  # fmt: skip
    for step in range(len(plan)):
        for number, seed in enumerate(seeds):
            batch = task.make_batch("train", plans[seed][step])
            given = [(text(row), int(label)) for row, label in zip(batch.inputs[0], batch.targets, strict=True)]
            parts = [zip(tokens[number], goal[number], strict=True) for tokens, goal in feed(step)]
            passed = [(text(row), int(label)) for part in parts for row, label in part if label != IGNORED]
            assert sorted(given) == sorted(passed)


def text(row):
    return row[row > 0].tolist()


def test_those_that_differ_in_more_than_a_seed_are_refused(texts, tmp_path):
    one = new_trial(texts, tmp_path)
    with pytest.raises(ValueError, match="differ in more than their seed"):
        train_together(one, ("A", "uniform"))
    recipe = one.recipe("A")
    for change, said in (({"clip": 1.0}, None), ({"warmup": 5}, "warmup=5"),
                         ({"optimiser": "muon"}, "optimiser=muon"), ({"z_loss": 0.1}, "z_loss=0.1"),
                         ({"batch_examples": None}, "batch_examples=")):  # fmt: skip
        changed = replace(recipe, training=replace(recipe.training, **change))
        if said is None:
            RecipeSeeds(one.field.task, [changed], [one.folder("A")])
            continue
        with pytest.raises(ValueError, match=said):
            RecipeSeeds(one.field.task, [changed], [one.folder("A")])


@pytest.fixture
def b_diverges(monkeypatch):
    """Where runs are trained as one."""
    made = RecipeSeeds.model

    def broken(self, seed):
        model = made(self, seed)
        if seed % corpora.SEEDS_APART == corpora.ROLES["B"]:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        return model

    monkeypatch.setattr(RecipeSeeds, "model", broken)


@pytest.mark.usefixtures("b_diverges")
def test_one_that_diverges_is_left_and_the_others_are_finished(texts, tmp_path):
    one = new_trial(texts, tmp_path)
    train_together(one, ("A", "B"))
    assert (is_finished(one.folder("A")), is_finished(one.folder("B"))) == (True, False)
    assert not list(one.folder("A").path.parent.glob("as-one*"))


def test_so_many_are_trained_as_one_as_there_is_room_for(texts, tmp_path):
    task, training = new_trial(texts, tmp_path).field.task, corpora.SST.recipe("full", "A", 0).training
    longest = int(task.get_lengths("train")[0].max())
    for room, expected in ((32 * longest * 5 + 1, 5), (32 * longest * 2 - 1, 1), (1, 0)):
        assert count_fitting(task, training, room) == expected
    assert count_fitting(task, replace(training, batch_examples=None), 10**6) == 0


def test_long_texts_that_are_passed_apart_take_no_room_from_the_others(texts, tmp_path, monkeypatch):
    task, training = new_trial(texts, tmp_path).field.task, corpora.SST.recipe("full", "A", 0).training
    monkeypatch.setattr(task, "get_lengths", lambda part: (np.array([10] * 97 + [20] * 3),))
    for border, widest in ((9, 32 * 20), (15, 32 * 10), (20, 32 * 20)):
        monkeypatch.setattr(recipe_population, "LONG", border)
        assert (count_fitting(task, training, 3 * widest), count_fitting(task, training, 3 * widest - 1)) == (3, 2)
    monkeypatch.setattr(task, "get_lengths", lambda part: (np.array([10] * 97 + [200] * 3),))
    monkeypatch.setattr(recipe_population, "LONG", 15)
    assert count_fitting(task, training, 4 * 200) == 1
