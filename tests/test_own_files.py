"""A task, an analysis and a study of the user's own file work as those with a name, and ask as mechanisms do."""

import json
import pickle
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import tiny_models
from in_process import run_attnlab
from inline_scheduler import InlineScheduler

import attnlab
from attnlab.analysis import ANALYSES, find_analysis
from attnlab.commands.compare.plan import plan_comparison
from attnlab.mechanisms import find_mechanism
from attnlab.studies import open_study
from attnlab.tasks import find_task
from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_list import list_runs

ROOT = Path(__file__).parent.parent
SMALL = ["layers=1", "width=8", "heads=2", "feed_forward=8", "steps=2", "batch_examples=4", "length=5", "compile=no"]
FINDERS = {"mechanism": find_mechanism, "task": find_task, "analysis": find_analysis, "study": open_study}


def read_example(file, heading):
    """Return the first Python example below a heading of a page."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", text[text.index(heading) :], re.DOTALL)[1]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with the examples of the documentation as files."""
    (tmp_path / "tasks.py").write_text(read_example("CONTRIBUTING.md", "## Add a task"))
    (tmp_path / "analyses.py").write_text(read_example("docs/analyses.md", "## Adding one"))
    (tmp_path / "studies.py").write_text(read_example("docs/reproduce.md", "## Adding an item"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*words):
    return run_attnlab("train", "./tasks.py:Reverse", *SMALL, *words, "out=run", "device=cpu")


def test_a_task_is_trained_listed_resumed_and_scored(place):
    assert train().returncode == 0
    assert train().returncode == 0
    keys = run_attnlab("list", "./tasks.py:Reverse").stdout
    assert "length=8" in keys
    assert "Number of different tokens." in keys
    (row,) = list_runs(place)
    assert row["task"].startswith("./tasks.py:Reverse")
    assert row["best score"].startswith("valid perplexity")
    asked = run_attnlab("evaluate", "run", "part=valid", "device=cpu")
    assert asked.returncode == 2
    assert "--allow-code" in asked.stderr
    done = run_attnlab("evaluate", "run", "part=valid", "device=cpu", "--allow-code")
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    texts = run_attnlab("translate", "run", "--allow-code", "device=cpu", input="a\n")
    assert texts.returncode == 2
    assert "encode" in texts.stderr


def test_a_run_runs_the_file_of_its_task_only_if_it_is_the_same(place):
    train()
    assert list(json.loads((place / "run" / "config.json").read_text())["code"]) == ["./tasks.py"]
    with pytest.raises(ValueError, match="allow_code"):
        runs.open_run("run", device="cpu")
    assert runs.open_run("run", device="cpu", allow_code=True).task.architecture == "translation"
    (place / "tasks.py").write_text((place / "tasks.py").read_text() + "\n# edited\n")
    with pytest.raises(ValueError, match="hash"):
        runs.open_run("run", device="cpu", allow_code=True)
    assert "code" in train().stderr  # another run: choose another --out


def test_another_process_can_read_what_the_file_defines(place):
    """A recipe with the task's own configuration, as `compare` sends it to a worker that has not loaded the file."""
    recipe = resolve_recipe("./tasks.py:Reverse", dict(word.split("=") for word in SMALL))
    sent = pickle.dumps(recipe)
    del sys.modules[type(recipe.data).__module__]
    assert asdict(pickle.loads(sent)) == asdict(recipe)
    plan = plan_comparison("./tasks.py:Reverse", dict(word.split("=") for word in SMALL) | {"attention": "softmax"})
    assert plan.name.startswith("Reverse-")  # the name of a folder


def test_an_analysis_adds_its_table_and_resumes(place):
    for part in (tiny_models.bert(), tiny_models.tokenizer()):
        part.save_pretrained("bert")
    words = ["inspect", "bert", "--text", "the cat sat .", "--device", "cpu", "--analysis", "./analyses.py:Distances"]
    words += ["--analysis", "diversity", "--out", "out"]
    for _ in range(2):  # the second reads the sums that the first saved
        done = run_attnlab(*words)
        assert done.returncode == 0, done.stderr
        found = pd.read_csv("out/tables/distances.csv")
    namespace = {}
    exec((place / "analyses.py").read_text(), namespace)
    expected = namespace["distance"](attnlab.record("bert", "the cat sat ."))
    pd.testing.assert_frame_equal(found, expected, rtol=1e-6)
    assert len(pd.read_csv("out/tables/diversity.csv")) == 3 * 3
    assert "Analysis: distances" in Path("out/report.html").read_text()
    (place / "analyses.py").write_text((place / "analyses.py").read_text() + "\n# edited\n")
    assert "another inspection (code" in run_attnlab(*words).stderr


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_makes_a_table_that_merges(name):
    record = attnlab.record(
        tiny_models.bert(), tiny_models.tokenizer()("the cat sat on the mat .", return_tensors="pt")
    )
    one, two = (find_analysis(name)() for _ in range(2))
    one.add(record), two.add(record)
    two.merge(one.tensors())
    pd.testing.assert_frame_equal(one.table(), two.table())


def test_a_study_is_reproduced(place, monkeypatch):
    monkeypatch.setattr("attnlab.commands.reproduce.open_scheduler", lambda on, jobs, device: InlineScheduler())
    done = run_attnlab("reproduce", "./studies.py:STUDY")
    assert done.returncode == 0, done.stderr
    assert "a fair coin" in (place / "results" / "coins" / "smoke" / "cells.csv").read_text()


@pytest.mark.parametrize("kind", FINDERS)
@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("./absent.py:Mine", "no file"),
        ("./mine.py", "write ./mine.py:"),
        ("./mine.py:Absent", "has no 'Absent'"),
        ("./mine.py:other", "is not a"),
        ("./broken.py:Mine", "cannot be imported: ZeroDivisionError"),
        ("nothing", "'nothing'"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, kind, name, keyword):
    (tmp_path / "mine.py").write_text("other = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=re.escape(keyword)) as raised:
        FINDERS[kind](name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("code", "keyword"),
    [
        ("class Mine(Analysis):\n    def add(self, record):\n        pass\n", "does not define table"),
        ("class Heads(Analysis):\n    add = table = print\n", "table 'heads'"),
        ("class Mine(Analysis):\n    add = table = lambda self, *given: 3\n", "DataFrame"),
    ],
)
def test_a_bad_analysis_is_one_line(tmp_path, monkeypatch, code, keyword):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"from attnlab.analysis.sums import Analysis\n\n{code}")
    name = re.search(r"class (\w+)", code)[1]
    words = ["inspect", tiny_models.minilm(), "--text", "a", "--device", "cpu", "--analysis", f"./mine.py:{name}"]
    done = run_attnlab(*words)
    assert done.returncode == 2
    assert keyword in done.stderr
    assert done.stderr.count("\n") == 1
