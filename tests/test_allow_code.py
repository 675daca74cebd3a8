"""A folder runs code only where the user allows it, and only the file that the folder was made with."""

import json
import shutil
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
from in_process import run_attnlab

import attnlab
from attnlab.aligning import AlignmentRequest, align
from attnlab.experiments.plan import Measure, TrainedRun, Workplace
from attnlab.huggingface import pretrained
from attnlab.reading.reader import open_reader
from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe

MINE = """
from pathlib import Path
from attnlab.mechanisms import Softmax
Path(__file__).with_name("was-run").touch()
assert not Path(__file__).with_name("broken").exists()

class Mine(Softmax):
    pass
"""
SMALL = {
    "data": "lexicon", "examples": "60", "held_out": "20", "layers": "1", "width": "8", "heads": "2",
    "feed_forward": "8", "steps": "1", "batch_examples": "4", "compile": "no",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with mine.py and a run of it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(MINE)
    (folder / "text").write_text("wa\n")
    with chdir(folder):
        recipe = resolve_recipe("synthetic", SMALL | {"attention": "./mine.py:Mine"})
        runs.start_run(recipe, out="run", device="cpu", report=lambda _: None, note=lambda _: None)
    return folder


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A copy of that folder as the working folder; its file has not been executed in this process."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    forget(tmp_path)
    return tmp_path


def forget(place):
    for name in [name for name in sys.modules if name.startswith("attnlab_own_")]:
        del sys.modules[name]
    (place / "was-run").unlink(missing_ok=True)


def was_run(place):
    return (place / "was-run").exists()


COMMANDS = {
    "evaluate": ("evaluate", "run", "part=valid", "bootstrap=2", "device=cpu"),
    "translate": ("translate", "run", "device=cpu"),
    "inspect": ("inspect", "run", "--pair", "a", "b", "--device", "cpu", "--out", "inspected"),
    "align": ("align", "run", "text", "text", "--device", "cpu"),
    "align --reverse": ("align", "ibm1", "text", "text", "--reverse", "run", "--device", "cpu"),
}


def test_predict_asks_too(place):
    done = run_attnlab("predict", "run", "--device", "cpu", input="wa\n")
    assert done.returncode == 2
    assert "--allow-code" in done.stderr
    assert not was_run(place)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_asks_before_it_runs_code(place, command):
    done = run_attnlab(*COMMANDS[command], input="wa\n")
    assert done.returncode == 2
    assert "--allow-code" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not was_run(place)
    done = run_attnlab(*COMMANDS[command], "--allow-code", input="wa\n")
    assert done.returncode == 0, done.stderr
    assert was_run(place)


@pytest.mark.parametrize(
    "call",
    [
        lambda: runs.open_run("run", device="cpu"),
        lambda: open_reader("run", device="cpu"),
        lambda: align("run", ([["a"]], [["b"]]), AlignmentRequest(device="cpu")),
    ],
)
def test_a_python_function_asks_before_it_runs_code(place, call):
    with pytest.raises(ValueError, match="allow_code=True"):
        call()
    assert not was_run(place)


def test_an_edited_file_is_refused(place):
    (place / "mine.py").write_text(MINE + "\n# edited\n")
    with pytest.raises(ValueError, match="hash"):
        runs.open_run("run", allow_code=True)
    assert not was_run(place)


def test_an_error_in_the_users_file_is_not_blamed_on_the_run(place):
    (place / "broken").touch()
    with pytest.raises(ValueError, match="imported") as raised:
        runs.open_run("run", allow_code=True)
    assert "model.json" not in str(raised.value)


@pytest.mark.parametrize("form", ["{}/other.py:Mine", "../{}/other.py:Mine", "./other.py:Mine", "./other.py"])
@pytest.mark.parametrize("key", ["attention", "cross_attention"])
def test_a_file_that_the_run_was_not_trained_with_is_refused(place, key, form):
    (place / "other.py").write_text(MINE)
    file = place / "run" / "model.json"
    name = form.format(place if form.startswith("{") else place.name)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention": "softmax", key: name}))
    for allow in (False, True):
        with pytest.raises(ValueError, match=r"hash|names other\.py|allow_code|does not name a class"):
            runs.open_run("run", allow_code=allow)
    assert not was_run(place)


@pytest.mark.parametrize("name", [["./mine.py:Mine"], {"./mine.py:Mine": 1}, 3, True])
def test_a_name_of_another_type_is_refused(place, name):
    file = place / "run" / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention": name}))
    with pytest.raises(ValueError, match=r"model\.json"):
        runs.open_run("run", allow_code=True)
    assert not was_run(place)


def test_a_file_in_the_home_folder_has_its_hash_too(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place))
    recipe = resolve_recipe("synthetic", SMALL | {"attention": "~/mine.py:Mine"})
    assert list(recipe.code()) == ["~/mine.py"]


def test_the_same_command_resumes_without_asking(place):
    words = [f"{key}={value}" for key, value in SMALL.items()]
    done = run_attnlab("train", "synthetic", *words, "attention=./mine.py:Mine", "out=run", "device=cpu")
    assert done.returncode == 0, done.stderr


def test_a_planned_run_trusts_its_own_recipe_alone(place):
    recipe = resolve_recipe("synthetic", SMALL | {"attention": "./mine.py:Mine"})
    planned = TrainedRun(recipe, Measure("name", lambda run, _: {"attention": run.recipe.model.attention}), runs=place)
    shutil.copytree(place / "run", place / recipe.name())
    assert planned.take_measure(Workplace.at(place)) == {"attention": "./mine.py:Mine"}
    forget(place)
    softmax = replace(planned, trained=resolve_recipe("synthetic", SMALL))
    shutil.copytree(place / "run", place / softmax.trained.name())
    with pytest.raises(ValueError, match="allow_code"):
        softmax.take_measure(Workplace.at(place))
    assert not was_run(place)


def test_an_adapted_model_stores_the_hash_of_its_file(place):
    pretrained.adapt(tiny_models.gpt2(), "./mine.py:Mine").save_pretrained("saved")
    forget(place)
    attnlab.load("saved", allow_code=True)
    forget(place)
    (place / "mine.py").write_text(MINE + "\n# edited\n")
    with pytest.raises(ValueError, match="hash"):
        attnlab.load("saved", allow_code=True)
    about = json.loads(Path("saved/attnlab.json").read_text())
    Path("saved/attnlab.json").write_text(json.dumps(about | {"code": {}}))
    with pytest.raises(ValueError, match="stores no hash"):
        attnlab.load("saved", allow_code=True)
    assert not was_run(place)
