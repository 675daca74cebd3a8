"""The LSTM models through the ordinary command line: recipes, training, evaluation, translation."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.models.lstm_config import SETTINGS, LSTMConfig
from attnlab.training.optimisers import compute_learning_rate
from attnlab.training.recipe import resolve_recipe, restore_recipe
from attnlab.training.run_folder import RunFolder, read_checkpoint


def run(*words, **options):
    return CliRunner().invoke(app, list(words), **options)


def trained(tmp_path, *words):
    result = run("train", *words, "device=cpu", f"out={tmp_path / 'run'}")
    assert result.exit_code == 0, result.output or result.exception
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("task", "values", "setting"),
    [
        ("translation", {}, "translation"),
        ("classification", {"data": "sst"}, "classification"),
        ("synthetic", {"data": "permutation"}, "copy"),
        ("synthetic", {"data": "keyword"}, "classification"),
    ],
)
def test_one_name_is_the_published_setting_of_each_task(task, values, setting):
    recipe = resolve_recipe(task, {"model": "lstm", **values})
    assert recipe.model == SETTINGS[setting]
    training = recipe.training
    assert (training.optimiser, training.lr, training.betas, training.eps) == ("adam", 1e-3, (0.9, 0.999), 1e-8)
    assert {compute_learning_rate(training, step) for step in (1, 50, 10_000)} == {1e-3}
    assert training.clip == training.weight_decay == training.label_smoothing == 0.0
    assert training.batch_examples == {"translation": 16, "classification": 32, "copy": 128}[setting]
    assert getattr(recipe.data, "source_begin", True)


def test_what_is_said_beside_a_preset_changes_that_alone():
    recipe = resolve_recipe("synthetic", {"data": "subset", "model": "lstm-multi-head", "join": "mean", "scale": "0.5"})
    assert (recipe.model.heads, recipe.model.join, recipe.model.attention_options) == (8, "mean", {"scale": 0.5})
    again = restore_recipe(json.loads(json.dumps(recipe.values())))
    assert isinstance(again.model, LSTMConfig)
    assert again == recipe


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        ("language", {"model": "lstm"}, "model=lstm .*language model"),
        ("translation", {"model": "lstm", "norm": "pre"}, "unknown key 'norm'"),
        ("translation", {"model": "lstm", "join": "max"}, "join=max: expected one of sum, mean"),
        ("translation", {"model": "ltsm"}, r"'ltsm' \(did you mean 'lstm'\?\)"),
    ],
)
def test_what_a_recipe_refuses(task, values, message):
    with pytest.raises(ValueError, match=message):
        resolve_recipe(task, values)


def test_two_vocabularies_are_not_one(tmp_path):
    result = run("train", "synthetic", "data=lexicon", "model=lstm", "steps=1", "device=cpu", f"out={tmp_path}")
    assert "share_embeddings" in str(result.exception)


def test_it_learns_to_copy(tmp_path):
    folder = trained(
        tmp_path, "synthetic", "data=subset", "length=5", "types=9", "held_out=100", "model=lstm", "width=48",
        "steps=140", "lr=6e-3", "evaluate_every=70",
    )  # fmt: skip
    result = run("evaluate", str(folder), "device=cpu", "bootstrap=0")
    assert result.exit_code == 0, result.exception
    assert float(re.search(r"accuracy\s+(\S+)", result.output)[1]) > 0.9
    result = run("translate", str(folder), "device=cpu", "beam=2", input="3 1 4 2 5\n9 8 7 6 1\n")
    assert result.exit_code == 0, result.exception
    assert [line.split()[0] for line in result.output.splitlines()] == ["3", "9"]


def test_beta_stays_frozen_while_the_attention_learns(tmp_path):
    folder = trained(
        tmp_path, "synthetic", "data=keyword", "length=11", "model=lstm", "width=8", "embedding_width=8", "steps=20",
        "trained=attention", "evaluate_every=20", "evaluate_at=1",
    )  # fmt: skip
    saved = [read_checkpoint(folder / "steps" / "00000001.safetensors"), read_checkpoint(RunFolder(folder).last)]
    first, last = (checkpoint.part("model/") for checkpoint in saved)
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert {name for name in first if not name.startswith("attention.")} <= same
    assert not {"attention.key.weight", "attention.score.weight"} & same


@pytest.mark.parametrize(
    ("name", "total"), [("lstm", "8,180,544"), ("lstm-copy", "1,337,130"), ("lstm-classifier", "4,581,482")]
)
def test_describe_prints_the_published_totals(name, total):
    assert re.search(rf"^total\s+{total}", run("describe", name).output, re.MULTILINE)
