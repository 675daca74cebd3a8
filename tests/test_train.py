"""Training: an update is what torch's optimiser does, nothing is lost when a run dies, what goes wrong is said."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from in_process import run_attnlab as run
from process_pairs import run_pair
from safetensors.torch import load_file

from attnlab.mechanisms import coda
from attnlab.training import loop
from attnlab.training.loop import TrainConfig
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import RunFolder, read_checkpoint
from attnlab.training.run_list import list_runs
from attnlab.training.runs import open_run

LEXICON = ["data=lexicon", "examples=600", "held_out=50", "width=16", "layers=1", "heads=2", "feed_forward=32"]
LEXICON += ["batch_tokens=400"]


def command(*words):
    return [sys.executable, "-c", "from attnlab.cli import main; main()", *words]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-steps")
    trained(folder, "steps=2")
    return folder


def trained(out, *words):
    done = run("train", "synthetic", *LEXICON, *words, "device=cpu", f"out={out}")
    assert done.returncode == 0, done.stderr
    return done


# --- nothing lost ---


def same_checkpoint(one, other):
    a, b = (load_file(Path(folder) / "last.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    states = [read_checkpoint(Path(folder) / "last.safetensors").state for folder in (one, other)]
    assert states[0] == states[1] | {"metrics_length": states[0]["metrics_length"]}


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, kills):
    """Killed at random moments, each after a checkpoint and before the last step; bit-identical in the end."""
    steps = 200 * kills
    words = [
        f"steps={steps}",
        "checkpoint_every=5",
        "evaluate_every=150",
        "log_every=50",
        "attention=coda",
        "dropout=0.2",
    ]
    trained(tmp_path / "whole", *words)
    draw, out = random.Random(0), tmp_path / "killed"
    for _ in range(kills):
        process = subprocess.Popen(
            command("train", "synthetic", *LEXICON, *words, "device=cpu", f"out={out}"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        before = step_of(out)
        while step_of(out) <= before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.25)
        process.send_signal(signal.SIGKILL)
        process.wait()
        stood = step_of(out)
        assert before < stood < steps, "the kill must fall after a checkpoint and before the last step"
    trained(out, *words)
    same_checkpoint(tmp_path / "whole", out)
    curves = [
        [row.get("valid_loss") or row["loss"] for row in RunFolder(tmp_path / n).metrics()] for n in ("whole", "killed")
    ]
    assert curves[0] == curves[1]
    best = [load_file(folder / "best.safetensors") for folder in (tmp_path / "whole", out)]
    assert all(torch.equal(x, best[1][name]) for name, x in best[0].items())


def step_of(folder):
    """Where the newest checkpoint stands; asked while another process may be replacing it."""
    return RunFolder(Path(folder)).position().get("step", 0)


def test_a_checkpoint_half_written_leaves_the_one_before(tmp_path, monkeypatch):
    """Killed during the write: what is there is the previous checkpoint, whole."""
    code = """
import os, sys, attnlab.training.run_folder as store
written = store.save_file
def dies(tensors, path, metadata):
    written(tensors, path, metadata)
    if '"step": 20' in metadata["state"] and "last" in str(path):
        os.truncate(path, 1000)
        os.kill(os.getpid(), 9)
store.save_file = dies
from attnlab.cli import main
main()
"""
    words = ["train", "synthetic", *LEXICON, "steps=30", "checkpoint_every=10", "device=cpu", f"out={tmp_path / 'r'}"]
    died = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL
    assert step_of(tmp_path / "r") == 10
    trained(tmp_path / "r", "steps=30", "checkpoint_every=10")
    trained(tmp_path / "whole", "steps=30", "checkpoint_every=10")
    same_checkpoint(tmp_path / "r", tmp_path / "whole")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_named_and_the_previous_used(tmp_path, damage):
    words = ["steps=30", "checkpoint_every=10"]
    trained(tmp_path / "whole", *words)
    trained(tmp_path / "r", *words)
    last = tmp_path / "r" / "last.safetensors"
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    done = trained(tmp_path / "r", *words)
    assert re.search(r"last\.safetensors is damaged.*previous", done.stderr)
    same_checkpoint(tmp_path / "r", tmp_path / "whole")


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "mine"
    words = ["train", "synthetic", *LEXICON, "steps=4000", "checkpoint_every=5", "device=cpu", f"out={out}"]
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while step_of(out) < 5 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    (stopped,) = re.findall(
        r"stopped at step (\d+), nothing is lost; to resume: attnlab train synthetic data=lexicon", output
    )
    assert step_of(out) == int(stopped) < 4000
    for name, content in (("other", "{}"), ("number", "3"), ("broken", "{")):  # somebody else's folders are passed over
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    (row,) = list_runs(tmp_path)
    assert (row["run"], row["state"]) == ("mine", "interrupted")


def test_another_configuration_does_not_overwrite_a_run(tmp_path):
    trained(tmp_path / "r", "steps=5")
    done = run("train", "synthetic", *LEXICON, "steps=5", "lr=0.1", "device=cpu", f"out={tmp_path / 'r'}")
    assert done.returncode == 2
    assert "holds another run (training.lr: 0.0005 there, 0.1 now)" in done.stderr


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.lock():
        done = run("train", "synthetic", *LEXICON, "steps=5", "device=cpu", f"out={tmp_path}")
    assert done.returncode == 2
    assert "another process" in done.stderr


def test_a_finished_run_is_not_trained_again(tmp_path):
    trained(tmp_path, "steps=10", "checkpoint_every=5")
    before = (tmp_path / "last.safetensors").read_bytes()
    assert "finished at step 10" in trained(tmp_path, "steps=10", "checkpoint_every=5").stdout
    assert (tmp_path / "last.safetensors").read_bytes() == before


# --- what it says, keeps and learns ---


def test_not_finite_stops_with_step_and_examples_and_keeps_the_good_checkpoint(tmp_path):
    words = ["train", "synthetic", *LEXICON, "steps=60", "checkpoint_every=1", "lr=1e20", "warmup=30", "device=cpu"]
    done = run(*words, f"out={tmp_path}")
    assert done.returncode == 2
    assert re.search(
        r"not finite at step \d+ \(epoch \d+, training examples \d+, .*the last good checkpoint is", done.stderr
    )
    for tensor in load_file(tmp_path / "last.safetensors").values():
        assert not tensor.is_floating_point() or tensor.isfinite().all()


def test_every_resolved_value_is_stored_and_the_run_opens_again(tmp_path):
    trained(tmp_path, "steps=5", "attention=dagpam", "initial=0.5")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["training"]["betas"] == [0.9, 0.98]
    assert values["model"]["attention_options"] == {"initial": 0.5}
    opened = open_run(tmp_path, device="cpu")
    assert opened.recipe.training == TrainConfig(steps=5, batch_tokens=400)
    assert not opened.model.training


def test_weights_are_kept_at_chosen_steps_and_averaged(tmp_path):
    trained(tmp_path, "steps=20", "checkpoint_every=5", "keep_last=2", "evaluate_at=3,7")
    kept = sorted(int(path.stem) for path in (tmp_path / "steps").glob("*.safetensors"))
    assert kept == [3, 7, 15, 20]
    mean = dict(open_run(tmp_path, device="cpu", weights="2").model.named_parameters())
    parts = [read_checkpoint(RunFolder(tmp_path).step_file(step)).part("model/") for step in (15, 20)]
    for name, parameter in mean.items():
        torch.testing.assert_close(parameter.detach(), (parts[0][name] + parts[1][name]) / 2)


def test_patience_stops_early(tmp_path):
    done = trained(
        tmp_path, "steps=500", "evaluate_every=2", "patience=3", "lr=1e-12", "warmup=0", "checkpoint_every=50"
    )
    step = int(re.search(r"finished at step (\d+)", done.stdout)[1])
    assert step < 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["synthetic", "stepz=5"], "'stepz' .did you mean 'steps'"),
        (["synthetic", "attention=coda", "alhpa=2"], "'alhpa' .did you mean 'alpha'"),
        (["sinthetic"], "'sinthetic' .did you mean 'synthetic'"),
        (["synthetic", "model=iwslt15"], "'iwslt15' .did you mean 'iwslt14'"),
        (["synthetic", "steps=0"], "steps must"),
        (["synthetic", "lr=-1"], "lr must"),
        (["synthetic", "data=lexicn"], "data=lexicn: expected one of lexicon"),
        (["synthetic", "attention=shaped", "steps=1"], "cannot be a cross attention"),
        (["synthetic", "batch_tokens=4", "steps=1"], "a batch holds at most"),
    ],
)
def test_what_is_wrong_is_one_line(words, message, tmp_path):
    done = run("train", *words, "device=cpu", f"out={tmp_path / 'r'}")
    assert done.returncode == 2
    *notes, line = done.stderr.splitlines()
    assert re.search(message, line)
    assert all("training and" in note for note in notes)  # what was read, where that went well


def test_recipes_carry_the_published_values():
    recipe = resolve_recipe("translation", {"model": "iwslt14", "lr": "1e-3"})
    assert (recipe.training.lr, recipe.training.warmup, recipe.training.label_smoothing) == (1e-3, 4000, 0.1)
    assert (recipe.model.dropout, recipe.model.feed_forward, recipe.decoding.beam) == (0.3, 1024, 5)
    wmt = resolve_recipe("translation", {"model": "wmt14"})
    assert (wmt.training.lr, wmt.decoding.average, wmt.decoding.length_penalty) == (7e-4, 10, 0.6)


def silence_noise():
    """Switch CODA's noise off, and check that there are two processes."""
    coda.logit_noise = lambda *given: 0.0
    measure = loop.evaluate

    def checked(*given, **named):
        assert torch.distributed.get_world_size() == 2
        return measure(*given, **named)

    loop.evaluate = checked


def test_two_processes_do_what_one_does_with_twice_the_accumulation(tmp_path, monkeypatch):
    """With gloo; dropout and noise off; the same losses to 1e-5."""
    words = ["train", "synthetic", *LEXICON, "steps=20", "log_every=1", "dropout=0", "attention=coda", "device=cpu"]
    for ended in run_pair(tmp_path, *words, "accumulate=1", f"out={tmp_path / 'two'}", prepare=silence_noise):
        assert ended.returncode == 0, ended.output
    monkeypatch.setattr("attnlab.mechanisms.coda.logit_noise", lambda *a: 0.0)
    done = run(*words, "accumulate=2", f"out={tmp_path / 'one'}")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [[row["loss"] for row in RunFolder(tmp_path / out).metrics() if "loss" in row] for out in ("two", "one")]
    assert len(losses[0]) == 20
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_tracker_that_is_not_installed_is_said(tmp_path):
    done = run("train", "synthetic", *LEXICON, "steps=2", "logging=wandb", "device=cpu", f"out={tmp_path}")
    assert done.returncode == 2
    assert "pip install wandb" in done.stderr


def test_a_tracker_is_given_every_measurement(tmp_path, monkeypatch):
    from accelerate import Accelerator

    from attnlab.training import runs

    told = []
    monkeypatch.setattr(runs, "find_spec", lambda name: object())
    monkeypatch.setattr(Accelerator, "__init__", tracked(Accelerator.__init__))
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, name, config: told.append(config))
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: told.append((step, values["loss"])))
    recipe = resolve_recipe(
        "synthetic", dict(word.split("=") for word in LEXICON) | {"steps": "4", "logging": "tensorboard"}
    )
    monkeypatch.setattr("attnlab.training.loop.evaluate", lambda *a, **k: {"valid_loss": 1.0, "loss": 1.0})
    runs.start_run(recipe, out=str(tmp_path), device="cpu", report=lambda values: None, note=print)
    assert told[0]["training.steps"] == 4
    assert [step for step, _ in told[1:]] == [4, 4]


def tracked(init):
    return lambda self, **options: init(self, **options | {"log_with": None})


def test_evaluate_and_translate(tmp_path):
    trained(tmp_path / "r", "steps=5", "attention=coda")
    done = run("evaluate", str(tmp_path / "r"), "bootstrap=20", "beam=2", "eval_samples=2", "device=cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r/evaluation-test.json").read_text())
    assert {score["name"] for score in found["text"]} == {"BLEU", "chrF2", "compound-split BLEU"}
    assert found["bound_perplexity"] >= found["perplexity"]
    assert len(found["translations"]) == 50
    lines = "biki nigeba\n\nnurabu\u2028biki\n"
    done = run("translate", str(tmp_path / "r"), "beam=2", "device=cpu", input=lines)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split("\n")) == 4
    best = done.stdout.splitlines()
    assert best[1] == ""
    done = run("translate", str(tmp_path / "r"), "beam=2", "n_best=2", "device=cpu", input=lines)
    listed = [line.split(" ||| ") for line in done.stdout.splitlines()]
    assert [number for number, *_ in listed] == ["0", "0", "1", "2", "2"]
    assert [listed[n][1] for n in (0, 2, 3)] == best
    assert all(float(listed[n][2]) >= float(listed[n + 1][2]) for n in (0, 3))
    assert listed[0][1] != listed[1][1]
    assert listed[3][1] != listed[4][1]
    assert float(listed[0][2]) < 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "nowhere"], "no run nowhere"),
        (["translate", "RUN", "n_best=3", "beam=2"], "n_best=3 must be from 1 to beam=2"),
        (["translate", "RUN", "baem=3"], "'baem' .did you mean 'beam'"),
        (["evaluate", "RUN", "part=tset"], "'tset' .did you mean 'test'"),
        (["evaluate", "RUN", "weights=often"], "weights=often"),
        (["evaluate", "RUN", "weights=9"], "keeps 0 checkpoints"),
        (["evaluate", "RUN", "eval_samples=2"], "noise.* eval_samples="),
    ],
)
def test_what_is_wrong_with_an_evaluation_is_one_line(words, message, two_steps):
    done = run(*(two_steps if word == "RUN" else word for word in words), "device=cpu")
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert done.stderr.count("\n") == 1


def test_text_of_ones_own_is_translated_and_scored(tmp_path, two_steps):
    (tmp_path / "a.txt").write_text("biki nigeba\nnurabu\n")
    (tmp_path / "b.txt").write_text("jipy\nvyje\n")
    done = run("evaluate", str(two_steps), f"src={tmp_path / 'a.txt'}", f"tgt={tmp_path / 'b.txt'}", "bootstrap=5")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^sentences\s+2", done.stdout, re.MULTILINE)
    assert "src= and tgt=" in run("evaluate", two_steps, f"src={tmp_path / 'a.txt'}").stderr


def test_classification_starts_from_the_given_vectors(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"good film {k},1\nbad film {k},0\n" for k in range(40)))
    (tmp_path / "vectors.txt").write_text("good 1 2 3 4\nbad 4 3 2 1\n")
    words = ["train", "classification", f"data={tmp_path / 'a.csv'}", f"embeddings={tmp_path / 'vectors.txt'}"]
    words += ["heads=2", "layers=1", "feed_forward=8", "steps=1", "lr=1e-12", "batch_examples=16", "device=cpu"]
    words += [f"out={tmp_path / 'r'}"]
    done = run(*words, "width=4")
    assert done.returncode == 0, done.stderr
    opened = open_run(tmp_path / "r", device="cpu")
    row = opened.model.encoder.embedding.words.weight[opened.task.vocabulary.ids["good"]]
    assert row.tolist() == pytest.approx([1, 2, 3, 4], abs=1e-4)
    done = run(*[word for word in words if not word.startswith("out=")], "width=8", f"out={tmp_path / 'q'}")
    assert "vectors of size 4" in done.stderr


def test_cross_attention_of_its_own_can_be_said_of_what_translates(tmp_path):
    trained(tmp_path / "r", "steps=2", "attention=shaped", "cross_attention=dot")
    kinds = {type(block.cross.mechanism).__name__ for block in open_run(tmp_path / "r").model.decoder.blocks}
    assert kinds == {"Dot"}
    done = run(
        "train", "synthetic", "data=keyword", "cross_attention=dot", "steps=2", "device=cpu", f"out={tmp_path}/k"
    )
    assert done.returncode == 2
    assert "cross_attention" in done.stderr
