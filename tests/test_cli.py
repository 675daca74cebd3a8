"""The command line, as a person uses it."""

import re
import subprocess
import sys

import pytest
from in_process import run_attnlab
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.mechanisms import MECHANISMS


def run(*words):
    return CliRunner().invoke(app, list(words))


def test_list_names_every_mechanism_and_its_options():
    output = run("list").output
    for name in MECHANISMS:
        assert re.search(rf"^{re.escape(name)}\s", output, re.MULTILINE), name
    assert "alpha variant residual" in output
    assert "wikitext103" in output


@pytest.mark.parametrize(
    ("words", "total"),
    [
        (["iwslt14"], "39,469,056"),
        (["iwslt14", "attention=coda"], "39,476,616"),
        (["iwslt14", "attention=coda", "heads=32"], "39,916,608"),
        (["wmt14", "attention=coda"], "60,944,656"),
        (["wikitext103"], "246,933,504"),
    ],
)
def test_describe_prints_the_published_totals(words, total):
    assert re.search(rf"^total\s+{total}", run("describe", *words).output, re.MULTILINE)


COPYING = ("data=subset", "length=6", "types=12", "examples=20000", "held_out=50", "model=tiny", "layers=1", "heads=2",
           "width=32", "feed_forward=64", "batch_examples=32", "warmup=50", "lr=5e-3")  # fmt: skip
TRANSLATING = ("data=lexicon", "examples=4000", "held_out=50", "layers=1", "heads=2", "width=32", "feed_forward=64",
               "batch_examples=32", "steps=200", "warmup=50", "lr=5e-3")  # fmt: skip
QUICK = ("softmax", "coda", "dagpam", "gated", "shaped", "uniform")  # the others are slow tests: each trains a model


def mark_learning(*, self_only):
    names = [name for name, kind in MECHANISMS.items() if kind.self_only == self_only]
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]
    )


@mark_learning(self_only=False)
def test_every_mechanism_learns_to_copy(name, tmp_path):
    """6 of 12 tokens, in their order, to an accuracy that is out of reach where attention looks nowhere: uniform."""
    steps = 300 if name in QUICK else 550
    result = run("train", "synthetic", *COPYING, f"steps={steps}", f"attention={name}", f"out={tmp_path / 'run'}")
    assert result.exit_code == 0, (result.output, result.exception)
    accuracy = float(re.findall(r"valid_accuracy ([\d.]+)", result.output)[-1])
    assert accuracy < 0.65 if name == "uniform" else accuracy > 0.7, accuracy


@mark_learning(self_only=True)
def test_a_mechanism_for_self_attention_alone_learns_to_translate(name, tmp_path):
    """Without any attention, which is what uniform has, the accuracy is below 0.6 by then."""
    words = (*TRANSLATING, f"attention={name}", "cross_attention=softmax", f"out={tmp_path / 'run'}")
    result = run("train", "synthetic", *words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert float(re.findall(r"valid_accuracy ([\d.]+)", result.output)[-1]) > 0.7


@pytest.mark.parametrize(
    ("words", "keywords"),
    [
        (["describe", "iwlst14"], ["'iwlst14'", "did you mean 'iwslt14'?"]),
        (["describe", "iwslt14", "hedas=8"], ["'hedas'", "did you mean 'heads'?"]),
        (["describe", "iwslt14", "heads=7"], ["divisible", "heads=7"]),
        (["describe", "iwslt14", "heads=many"], ["heads=many", "whole number"]),
        (["check", "sofmax"], ["'sofmax'", "did you mean 'softmax'?"]),
        (["check", "coda", "heads=x"], ["heads=x", "whole number"]),
        (["check", "./nowhere.py:Mine"], ["./nowhere.py"]),
        (["demo", "steps=0"], ["steps", "at least 1"]),
        (["demo", "attention=softmax,cogg"], ["'cogg'", "did you mean 'cog'?"]),
    ],
)
def test_an_error_is_one_plain_line_and_status_2(words, keywords):
    done = run_attnlab(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("attnlab: ")
    assert all(keyword in done.stderr for keyword in keywords), done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_process_says_and_returns_the_same():
    words = [sys.executable, "-m", "attnlab", "check", "sofmax"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", run_attnlab("check", "sofmax").stderr)


def test_check_tells_by_its_status():
    assert run("check", "softmax").exit_code == 0


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run("--version").output)


@pytest.mark.slow
def test_the_demo_as_make_runs_it(tmp_path):
    """The README's number: all four write new words right with an accuracy of at least 0.97, the mean of 3 seeds."""
    result = run("demo", f"out={tmp_path}")
    assert result.exit_code == 0, (result.output, result.exception)
    rows = [line.split() for line in result.output.splitlines() if line.split()[:1] and line.split()[0] in MECHANISMS]
    assert len([row for row in rows if row[1].replace(",", "").isdigit()]) == 4
    assert all(float(row[2]) >= 0.97 for row in rows if row[1].replace(",", "").isdigit()), rows
    assert "An LSTM learns to copy" in result.output


def test_what_is_interrupted_says_so(monkeypatch):
    def stop(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("attnlab.commands.list_all.show_table", stop)
    result = run("list")
    assert result.exit_code == 130
    assert result.stderr == "attnlab: interrupted\n"
