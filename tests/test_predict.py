"""attnlab predict: the label of each line, what its words contribute, and what a bad line leads to."""

import json
import math
import re

import pytest
from in_process import run_attnlab

from attnlab.decoding import labels
from attnlab.decoding.labels import predict_labels
from attnlab.training.runs import open_run

FAST = ["lr=1e-2", "warmup=5", "batch_examples=32", "evaluate_every=60", "device=cpu"]
TRANSFORMER = ["width=16", "layers=1", "heads=2", "feed_forward=16", "steps=60", "dropout=0"]
LSTM = ["model=lstm", "width=8", "embedding_width=8", "steps=60"]
THREE = "awful boring film\ngood lovely film\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    rows = [
        f"{'a' if k % 3 else 'the'} {'good lovely' if k % 2 else 'awful boring'} film,{'yn'[k % 2 == 0]}"
        for k in range(90)
    ]
    (folder / "a.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    for name, words in (("transformer", TRANSFORMER), ("lstm", LSTM)):
        done = run_attnlab("train", "classification", "data=a.csv", *words, *FAST, f"out=runs/{name}", cwd=folder)
        assert done.returncode == 0, done.stderr
    lexicon = ["data=lexicon", "examples=50", "held_out=5", "width=8", "layers=1", "heads=2", "feed_forward=8"]
    assert run_attnlab("train", "synthetic", *lexicon, "steps=1", "out=runs/pairs", cwd=folder).returncode == 0
    return folder


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_each_line_gets_its_label_and_the_words_it_rests_on(name, folder):
    done = run_attnlab("predict", f"runs/{name}", "device=cpu", input=THREE, cwd=folder)
    assert done.returncode == 0, done.stderr
    first, second, blank = done.stdout.removesuffix("\n").split("\n")
    assert re.fullmatch(r"n\t0\.9\d+\t(awful|boring) \+\d.*", first)
    assert re.fullmatch(r"y\t0\.9\d+\t(good|lovely) \+\d.*", second)
    assert blank == ""
    (folder / "lines.txt").write_text(THREE)
    again = run_attnlab("predict", f"runs/{name}", "device=cpu", "--file", "lines.txt", cwd=folder)
    assert again.stdout == done.stdout


def test_words_that_the_model_does_not_know_are_named(folder):
    text = "good zebra film\ngood film\n"
    done = run_attnlab("predict", "transformer", "device=cpu", input=text, cwd=folder)
    assert done.stderr.splitlines() == ["line 1: not in the vocabulary, read as <unk>: 'zebra'"]
    done = run_attnlab("translate", "pairs", "device=cpu", input="zebra\n", cwd=folder)
    assert done.returncode == 0
    assert "not in the vocabulary, read as <unk>: 'zebra'" in done.stderr


def test_a_word_that_moses_cuts_otherwise_when_it_is_alone_is_known(tmp_path):
    for name, line in (("de", "wir sehen etw. davon"), ("en", "we see some of it")):
        (tmp_path / name).write_text("".join(f"{line} {k}\n" for k in range(60)))
    tiny = ["width=8", "layers=1", "heads=2", "feed_forward=8", "steps=1", "device=cpu"]
    text = ["src=de", "tgt=en", "pair=de-en", "units=word", "moses=true"]
    done = run_attnlab("train", "translation", *text, *tiny, "out=runs/pairs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given = ["translate", "pairs", "device=cpu"]
    assert "vocabulary" not in run_attnlab(*given, input="wir sehen etw. davon\n", cwd=tmp_path).stderr
    done = run_attnlab(*given, input="wir sehen etw. davon\nwir sehen zebra\n", cwd=tmp_path)
    assert done.stderr.splitlines()[0] == "not in the vocabulary, read as <unk>: 'zebra'"


def test_json_has_every_probability(folder):
    done = run_attnlab("predict", "transformer", "--json", "--words", "2", "device=cpu", input=THREE, cwd=folder)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["line"], row["label"]) for row in rows] == [(1, "n"), (2, "y"), (3, None)]
    assert rows[0]["probabilities"].keys() == {"n", "y"}
    assert sum(rows[0]["probabilities"].values()) == pytest.approx(1)
    assert len(rows[0]["words"]) == 2
    assert rows[2]["probability"] is None


def test_a_contribution_is_the_change_of_the_log_odds_without_the_word(folder):
    run = open_run(folder / "runs/lstm", device="cpu")
    whole, without = predict_labels(run, ["a good lovely film", "a lovely film"], words=4)
    (good,) = [each for each in whole.words if each.word == "good"]
    assert good.position == 2
    one, two = (math.log(each.probabilities["y"] / each.probabilities["n"]) for each in (whole, without))
    assert good.contribution == pytest.approx(one - two, rel=1e-3, abs=1e-3)
    direct = run.model(run.task.encode(["a good lovely film"]).pad([0])).softmax(-1)[0].detach()
    assert whole.probability == pytest.approx(float(direct.max()))


def test_a_line_does_not_depend_on_the_others(folder, monkeypatch):
    run = open_run(folder / "runs/transformer", device="cpu")
    lines = [" ".join(["good", "boring", "a"][: k % 4]) for k in range(9)]
    together = list(predict_labels(run, lines))
    monkeypatch.setattr(labels, "LINES", 2)
    monkeypatch.setattr(labels, "TOKENS", 7)
    for line, each, other in zip(lines, together, predict_labels(run, lines), strict=True):
        assert each.label == other.label
        if line:
            assert each.probability == pytest.approx(other.probability, abs=1e-5)


def test_a_huge_line_is_cut_and_said(folder, monkeypatch):
    monkeypatch.setattr(labels, "MOST_WORDS", 5)
    monkeypatch.setattr(labels, "MOST_EXPLAINED", 4)
    done = run_attnlab("predict", "transformer", "device=cpu", input="good " * 9 + "\n" + "x" * 90, cwd=folder)
    first, second = done.stdout.splitlines()
    assert first.startswith("y\t")
    assert "first 5 words" in done.stderr
    assert "at most 4 words" in done.stderr
    assert second.split("\t")[2].split()[0] == "x" * 39 + "…"
    monkeypatch.setattr(labels, "CHARACTERS", 9)
    done = run_attnlab("predict", "transformer", "device=cpu", input="good good good", cwd=folder)
    assert "line 1: only the first 9 characters" in done.stderr


@pytest.mark.parametrize(
    ("words", "input", "message"),
    [
        (["pairs"], "x\n", "attnlab translate"),
        (["transfomer"], "x\n", "runs/transformer"),
        (["transformer", "--words", "-1"], "x\n", "at least 0"),
        (["transformer", "--file", "none.txt"], "", "no such file"),
        (["transformer", "--file", "runs"], "", "folder"),
        (["transformer", "beam=2"], "x\n", "'beam'"),
        (["transformer"], "good\0", "binary"),
    ],
)
def test_what_is_wrong_is_one_line(words, input, message, folder):
    done = run_attnlab("predict", *words, input=input, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_the_keyword_task_has_labels_too(tmp_path):
    small = ["data=keyword", "length=5", "examples=64", "held_out=8", "model=lstm", "width=4", "embedding_width=4"]
    done = run_attnlab("train", "synthetic", *small, "steps=1", "device=cpu", "out=k", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_attnlab("predict", "k", input="1 2 3\n\n2\n", cwd=tmp_path)
    assert [line.split("\t")[0] in ("absent", "present") for line in done.stdout.splitlines()] == [True, False, True]


def test_inspect_shows_the_label_of_an_lstm(folder):
    words = ["inspect", "lstm", "--text", "good lovely film", "--device", "cpu", "--out", "page"]
    done = run_attnlab(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "“y”" in done.stdout
    example = (folder / "page/examples/1/layers.csv").read_text()
    assert ",label,lovely," in example
    assert "decoder" not in (folder / "page/report.html").read_text().partition("<script")[0]


def test_translate_names_predict(folder):
    assert "attnlab predict" in run_attnlab("translate", "lstm", input="x", cwd=folder).stderr
