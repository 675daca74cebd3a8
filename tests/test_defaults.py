"""The first commands of a new user: defaults that fit the text, parts that exist, and names that do not."""

import json
import re

import pytest
from in_process import run_attnlab

from attnlab.reading.reader import open_reader
from attnlab.tasks.language import LanguageConfig
from attnlab.training.recipe import resolve_recipe

SMALL = ["width=16", "layers=1", "heads=2", "feed_forward=16", "steps=2", "warmup=1", "batch_tokens=512", "device=cpu"]
WORDS = ["dog", "cat", "bird", "sees", "hears", "the", "a", "small", "old", "tree"]


def make_lines(shift):
    return [" ".join(WORDS[(k * step + shift) % 10] for step in (1, 2, 3, 7)) for k in range(60)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, shift in (("a.de", 0), ("a.en", 3)):
        (folder / name).write_text("\n".join(make_lines(shift)) + "\n")
    return folder


@pytest.fixture(scope="module")
def translator(corpus):
    done = run_attnlab("train", "translation", "src=a.de", "tgt=a.en", *SMALL, "out=runs/first", cwd=corpus)
    assert done.returncode == 0, done.stderr
    return done


def test_a_default_vocabulary_shrinks_and_says_so(translator, corpus):
    (size,) = re.findall(r"vocabulary=(\d+): .*default 8,000", translator.stderr)
    assert json.loads((corpus / "runs/first/model.json").read_text())["vocabulary"] == int(size)
    done = run_attnlab("train", "language", "data=a.de", "block=64", *SMALL, "out=runs/language", cwd=corpus)
    assert done.returncode == 0, done.stderr
    assert "default 8,000" in done.stderr


def test_a_vocabulary_asked_for_is_refused_with_the_largest(corpus):
    words = ["train", "translation", "src=a.de", "tgt=a.en", *SMALL, "out=runs/refused"]
    done = run_attnlab(*words, "vocabulary=7000", cwd=corpus)
    assert done.returncode == 2
    (largest,) = re.findall(r"set vocabulary=(\d+)$", done.stderr.strip())
    done = run_attnlab(*words, f"vocabulary={largest}", cwd=corpus)
    assert done.returncode == 0, done.stderr


def test_a_presets_average_follows_the_checkpoints():
    with pytest.warns(UserWarning, match="average=1 "):
        assert resolve_recipe("translation", {"model": "wmt14", "steps": "1000"}).decoding.average == 1
    assert resolve_recipe("translation", {"model": "wmt14"}).decoding.average == 10
    with pytest.raises(ValueError, match="average=3"):
        resolve_recipe("translation", {"model": "wmt14", "steps": "1000", "average": "3"})


def test_the_context_follows_the_block():
    assert resolve_recipe("language", {}).values()["data"]["context"] == 480
    assert resolve_recipe("language", {"block": "64"}).values()["data"]["context"] == 60
    assert resolve_recipe("language", {"block": "64", "context": "32"}).values()["data"]["context"] == 32
    assert LanguageConfig(block=64).resolve().context == 60
    with pytest.raises(ValueError, match="context=480"):
        resolve_recipe("language", {"block": "64", "context": "480"})


def test_without_a_test_part_validation_is_scored(translator, corpus):
    done = run_attnlab("evaluate", "runs/first", "bootstrap=2", "device=cpu", cwd=corpus)
    assert done.returncode == 0, done.stderr
    assert "no test part" in done.stderr
    assert "on valid" in done.stdout
    assert (corpus / "runs/first/evaluation-valid.json").exists()
    assert "'tset'" in run_attnlab("evaluate", "runs/first", "part=tset", cwd=corpus).stderr


@pytest.mark.parametrize("command", ["evaluate", "translate", "predict", "inspect --text x", "align a.de a.en"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [("runs/frist", "did you mean runs/first"), ("runs/zzzz", "attnlab runs"), ("./runs/frist", "mean runs/first")],
)
def test_a_run_that_does_not_exist_is_said_with_similar_names(command, name, hint, translator, corpus):
    verb, *rest = command.split()
    words = [verb, name, *rest]
    done = run_attnlab(*words, cwd=corpus)
    assert done.returncode == 2
    assert f"there is no run {name}" in done.stderr
    assert hint in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_any_run_the_command_that_starts_one_is_named(tmp_path):
    assert "attnlab train" in run_attnlab("evaluate", "runs/nope", cwd=tmp_path).stderr


def test_the_title_of_a_page_names_the_users_own_file(translator, corpus, monkeypatch):
    monkeypatch.chdir(corpus)
    assert "trained on a.de" in open_reader("runs/first", device="cpu").title
