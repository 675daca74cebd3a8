"""The command line, as a person uses it."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.mechanisms import MECHANISMS
from attnlab.recording import Record


def run(*words):
    return CliRunner().invoke(app, list(words))


def shell(*words):
    code = "from attnlab.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


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


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "uniform"])  # which looks nowhere
def test_every_mechanism_learns_to_copy(name, tmp_path):
    """Chance is 1/16; the report, the figure and the record are written."""
    result = run("demo", f"attention={name}", "steps=400", f"out={tmp_path}")
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.output.splitlines() if re.match(rf"{re.escape(name)}\s+[\d,]+\s", line)]
    assert float(row.split()[2]) > 0.5, row
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "attention.png").stat().st_size > 1000
    assert len(Record.load(tmp_path / f"{name}.safetensors").layers) == 2


def test_the_demo_is_deterministic(tmp_path):
    tables = [run("demo", "attention=coda", "steps=30", f"out={tmp_path}").output for _ in range(2)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["describe", "iwlst14"], "no model is called 'iwlst14' (did you mean 'iwslt14'?)"),
        (["describe", "iwslt14", "hedas=8"], "unknown key 'hedas' (did you mean 'heads'?)"),
        (["describe", "iwslt14", "heads=7"], "width=512 is not divisible by heads=7"),
        (["describe", "iwslt14", "heads=many"], "heads=many: expected a whole number"),
        (["check", "sofmax"], "no attention is called 'sofmax' (did you mean 'softmax'?)"),
        (["check", "coda", "heads=x"], "heads=x: expected a whole number"),
        (["check", "./nowhere.py:Mine"], "no file ./nowhere.py"),
        (["demo", "steps=0"], "steps must be at least 1"),
        (["demo", "attention=softmax,cogg"], "no attention is called 'cogg' (did you mean 'cog'?)"),
    ],
)
def test_an_error_is_one_plain_line_and_status_2(words, message):
    done = shell(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"attnlab: {message}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_check_tells_by_its_status():
    assert run("check", "softmax").exit_code == 0


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run("--version").output)


@pytest.mark.slow
def test_the_demo_as_make_runs_it(tmp_path):
    """The README's number: all four copy new tokens with an accuracy of at least 0.99."""
    result = run("demo", f"out={tmp_path}")
    rows = [line.split() for line in result.output.splitlines() if line.split()[:1] and line.split()[0] in MECHANISMS]
    assert len(rows) == 4
    assert all(float(row[2]) >= 0.99 for row in rows), rows
