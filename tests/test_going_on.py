"""A run goes on from what it kept: the right checkpoints, as many processes, the same code; never past a failure."""

import json
import os
import re
import signal
import time
import warnings

import pytest
import torch
from accelerate import Accelerator
from in_process import run_attnlab
from process_pairs import run_pair
from safetensors.torch import load_file

from attnlab.config import FREE_KEYS
from attnlab.training import loop as train
from attnlab.training.checkpoints import average_checkpoints
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import Checkpoint, Metrics, RunFolder, write_checkpoint
from attnlab.training.runs import open_run, start_run

LEXICON = ["data=lexicon", "examples=600", "held_out=20", "width=16", "layers=1", "heads=2", "feed_forward=32"]
LEXICON += ["batch_tokens=400"]


def trained(out, *words):
    return run_attnlab("train", "synthetic", *LEXICON, *words, "device=cpu", f"out={out}")


def saved(path, step, value=0.0):
    write_checkpoint(Checkpoint({"model/x": torch.full((3,), value)}, {"step": step}), path)


def test_an_early_stop_does_not_hide_what_was_not_finite(tmp_path):
    done = trained(tmp_path, "lr=1e20", "warmup=3", "steps=40", "evaluate_every=10", "patience=1")
    assert done.returncode == 2
    assert "not finite at step" in done.stderr
    assert not (tmp_path / "last.safetensors").exists()


def test_a_damaged_checkpoint_never_takes_the_place_of_a_whole_one(tmp_path):
    folder = RunFolder(tmp_path)
    saved(folder.previous, 5), saved(folder.last, 10)
    folder.last.write_bytes(folder.last.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="damaged"):
        assert folder.resume().state["step"] == 5
    folder.save(Checkpoint({"model/x": torch.zeros(3)}, {"step": 6}))
    assert folder.resume().state["step"] == 6
    assert not folder.previous.exists() or RunFolder(tmp_path).resume().state["step"] == 6
    assert (tmp_path / "last.damaged").exists()


def test_two_damaged_checkpoints_are_reported_once(tmp_path):
    folder = RunFolder(tmp_path)
    for path, step in ((folder.previous, 5), (folder.last, 10)):
        saved(path, step)
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"last.*previous.*no checkpoint"):  # and no warning, which would be an error
        folder.resume()


def test_damaged_weights_name_those_that_are_whole(tmp_path):
    assert trained(tmp_path, "steps=2").returncode == 0
    folder = RunFolder(tmp_path)
    whole = folder.best.read_bytes()
    folder.best.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="weights=last"):
        open_run(tmp_path, device="cpu")
    folder.last.write_bytes(folder.last.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"best.*damaged") as caught:
        open_run(tmp_path, device="cpu")
    assert "weights=" not in str(caught.value)


def test_a_flipped_bit_anywhere_never_blocks_a_run_that_has_a_whole_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    saved(folder.previous, 5), saved(folder.last, 10)
    whole = folder.last.read_bytes()
    for place in range(0, len(whole) * 8, 7):  # prime: all bits of a byte in turn
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        folder.last.write_bytes(damaged)
        assert folder.position()["step"] in (5, 10), place
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = folder.resume()
        assert checkpoint.state["step"] == (10 if folder.last.exists() else 5)  # 10: the bit changed nothing
        assert torch.equal(checkpoint.tensors["model/x"], torch.zeros(3))


def test_ctrl_c_takes_no_place_among_the_checkpoints_to_average(tmp_path):
    values = dict(word.split("=") for word in LEXICON) | {"checkpoint_every": "5", "keep_last": "3", "log_every": "1"}
    recipe = resolve_recipe("synthetic", values | {"steps": "20"})

    def stop(row):
        if row["step"] == 16:
            os.kill(os.getpid(), signal.SIGINT)

    folder, outcome = start_run(recipe, out=str(tmp_path), device="cpu", report=stop, note=print)
    assert 16 <= outcome.step < 20
    average_checkpoints(folder, 3)
    start_run(recipe, out=str(tmp_path), device="cpu", report=lambda row: None, note=print)
    assert sorted(int(path.stem) for path in (tmp_path / "steps").iterdir()) == [10, 15, 20]


def test_a_finished_run_continues_where_only_steps_grow(tmp_path):
    words = ["schedule=constant", "warmup=2", "checkpoint_every=4", "dropout=0.1"]
    assert trained(tmp_path / "whole", *words, "steps=12").returncode == 0
    assert trained(tmp_path / "grown", *words, "steps=8").returncode == 0
    assert "another run" in trained(tmp_path / "grown", *words, "steps=12", "lr=1e-2").stderr
    done = trained(tmp_path / "grown", *words, "steps=1.2e1")
    assert "finished at step 12" in done.stdout, done.stderr
    assert "continues to step 12" in done.stderr
    assert "differs" not in done.stderr
    one, other = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "grown"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [leg["steps"] for leg in json.loads((tmp_path / "grown" / "ran.json").read_text())] == [8, 12]
    assert "another run" in trained(tmp_path / "grown", *words, "steps=8").stderr


def test_a_longer_run_says_where_its_learning_rate_was_another(tmp_path):
    assert trained(tmp_path, "steps=20").returncode == 0  # the warm-up is a tenth of the steps
    assert "differs from a run that began with steps=30" in trained(tmp_path, "steps=30").stderr


def test_an_early_stop_stays_one_with_more_steps(tmp_path):
    words = ["evaluate_every=2", "patience=1", "lr=1e-12", "warmup=0", "schedule=constant"]
    first = trained(tmp_path, *words, "steps=20").stdout
    assert "finished at step 20" not in first
    config = (tmp_path / "config.json").read_text()
    again = trained(tmp_path, *words, "steps=30")
    assert again.stdout == first
    assert "patience" in again.stderr
    assert "continues" not in again.stderr
    assert (tmp_path / "config.json").read_text() == config


def test_only_checkpoints_are_averaged_not_steps_that_were_evaluated(tmp_path):
    folder = RunFolder(tmp_path)
    folder.claim({"training": {"checkpoint_every": 5, "steps": 22, "evaluate_at": [18]}})
    for step in (10, 15, 18, 20, 22):
        saved(folder.step_file(step), step, float(step))
    assert average_checkpoints(folder, 3)["x"].tolist() == [pytest.approx(19.0)] * 3  # 15, 20 and the last step
    with pytest.raises(ValueError, match=r"keeps 4 checkpoints.* 5"):
        average_checkpoints(folder, 5)


def test_a_run_of_an_older_version_lacks_keys_and_goes_on(tmp_path):
    assert trained(tmp_path, "steps=2").returncode == 0
    values = json.loads((tmp_path / "config.json").read_text())
    del values["model"]["norm_type"], values["training"]["z_loss"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "norm_type" in trained(tmp_path, "steps=2", "norm_type=rms").stderr
    assert trained(tmp_path, "steps=2").returncode == 0


@pytest.mark.parametrize("key", FREE_KEYS)
def test_where_a_run_is_computed_makes_it_no_other_run(tmp_path, key):
    folder = RunFolder(tmp_path)
    folder.claim({"training": {key: "here", "lr": 1.0}})
    folder.claim({"training": {key: "there", "lr": 1.0}})
    with pytest.raises(ValueError, match=r"training.lr: 1.0 there, 2.0 now"):
        folder.claim({"training": {key: "there", "lr": 2.0}})


def test_measurements_that_were_lost_are_said_and_leave_no_hole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.warns(UserWarning, match="8 bytes"):
        metrics = Metrics(path, 20)
    metrics.append({"step": 2})
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    path.write_bytes(path.read_bytes().replace(b"1", b"\xb1") + b'{"st')  # damaged, and half written
    with pytest.warns(UserWarning, match="jsonl:1"):
        assert RunFolder(tmp_path).metrics() == [{"step": 2}]


def test_a_link_in_a_run_folder_is_not_followed(tmp_path):
    """A run folder that somebody else made may point at any file of the user."""
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "metrics.jsonl").symlink_to("../precious")
    with pytest.raises(ValueError, match=r"metrics\.jsonl.*link"):
        Metrics(tmp_path / "run" / "metrics.jsonl", 0)
    assert (tmp_path / "precious").read_text() == "precious"
    for name in (".lock", "steps"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match=f"{name}.*link"), RunFolder(tmp_path / "run").lock():
            pass
        (tmp_path / "run" / name).unlink()
    assert not (tmp_path / "elsewhere").exists()


def test_a_linked_run_folder_is_a_run_folder(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with RunFolder(tmp_path / "run").lock():
        Metrics(tmp_path / "run" / "metrics.jsonl", 0).close()
    assert (tmp_path / "disk" / "metrics.jsonl").exists()


def test_an_attention_that_was_edited_makes_another_run(tmp_path):
    file = tmp_path / "mine.py"
    code = "from attnlab.mechanisms.softmax import Softmax\n\n\nclass Mine(Softmax):\n    pass\n"
    file.write_text(code)
    first = resolve_recipe("synthetic", {"attention": f"{file}:Mine"})
    again = resolve_recipe("synthetic", {"attention": f"{file}:Mine"})
    assert (kept := first.name()) == again.name()
    file.write_text(code + "\n# edited\n")
    assert again.name() != kept
    assert again.values()["code"] != {}
    file.write_text(code)
    assert again.name() == kept


def test_a_preset_brings_its_data_unless_another_is_said():
    assert resolve_recipe("translation", {"model": "iwslt14"}).data.data == "iwslt14"
    assert resolve_recipe("translation", {"model": "iwslt14", "data": "multi30k"}).data.data == "multi30k"
    assert resolve_recipe("language", {"model": "wikitext103"}).data.data == "wikitext-103"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch_examples=0"], "batch_examples must"),
        (["period=0", "schedule=cosine"], "period must"),
        (["evaluate_at=50"], "steps=4, got 50"),
        (["keep_last=-1"], "keep_last must"),
        (["eps=inf"], "eps=inf: the number is too large or not finite"),
        (["warmup_start=-1"], "warmup_start must"),
        (["min_lr=-1"], "min_lr must"),
        (["min_lr=1"], "min_lr must"),
        (["clip=nan"], "clip=nan: the number is too large or not finite"),
        (["beam=0"], "beam must"),
        (["length_penalty=99"], "length_penalty must"),
        (["average=2", "keep_last=1"], "average=2 is more than 1"),
        (["attention=coda", "alpha=3"], "alpha=3"),
        (["attention=sigmoid", "offset=nan"], "offset=nan"),
    ],
)
def test_values_that_mean_nothing_are_refused_before_anything_runs(tmp_path, words, message):
    done = trained(tmp_path, "steps=4", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_model_that_does_not_fit_in_memory_is_refused_with_its_size(tmp_path):
    words = [word for word in LEXICON if not word.startswith("feed_forward")]
    wide = ["feed_forward=10000000000000", "steps=1", "device=cpu", f"out={tmp_path / 'run'}"]
    done = run_attnlab("train", "synthetic", *words, *wide)
    assert done.returncode == 2
    assert re.search(r"memory.* [\d,]{15,} parameters .*GiB", done.stderr)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_validation_that_was_interrupted_is_made_when_the_run_goes_on(tmp_path, monkeypatch):
    values = dict(word.split("=") for word in LEXICON) | {"steps": "12", "evaluate_every": "5", "checkpoint_every": "5"}
    started = {"device": "cpu", "report": lambda values: None, "note": print}
    _, whole = start_run(resolve_recipe("synthetic", values), out=str(tmp_path / "whole"), **started)
    with monkeypatch.context() as patch:
        patch.setattr("attnlab.training.loop.evaluate", lambda *a, should_stop, **k: None)  # as if Ctrl-C came then
        folder, outcome = start_run(resolve_recipe("synthetic", values), out=str(tmp_path / "cut"), **started)
    assert (outcome.finished, outcome.step, folder.position()["unevaluated"]) == (False, 5, True)
    folder, outcome = start_run(resolve_recipe("synthetic", values), out=str(tmp_path / "cut"), **started)
    assert outcome.finished
    rows = [[{k: v for k, v in row.items() if k != "tokens_per_second"} for row in o.history] for o in (whole, outcome)]
    assert rows[0] == rows[1]
    one, other = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_validation_stops_between_two_batches_when_asked(tmp_path):
    values = dict(word.split("=") for word in LEXICON) | {"steps": "1"}
    folder, _ = start_run(
        resolve_recipe("synthetic", values), out=str(tmp_path), device="cpu", report=lambda values: None, note=print
    )
    run, accelerator = open_run(folder.path, device="cpu"), Accelerator(cpu=True)
    asked = iter([False, True, True, True, True])
    given = (run.model, run.task, run.recipe.training, accelerator)
    assert train.evaluate(*given, should_stop=lambda: next(asked)) is None
    assert train.evaluate(*given, should_stop=lambda: False)["valid_loss"] > 0


def test_two_processes_stop_together_go_on_together_and_share_a_small_validation_set(tmp_path):
    """One validation batch for two processes; Ctrl-C reaches both, not at once; one process alone is refused."""
    words = ["steps=4000", "evaluate_every=5", "checkpoint_every=5", "log_every=5", "warmup=10"]
    out, told = tmp_path / "run", []

    def interrupt(pids):
        if (out / "last.safetensors").exists() and not told:
            for pid in pids:
                os.kill(pid, signal.SIGINT)
                told.append(pid)
                time.sleep(0.01)

    pair = run_pair(tmp_path, "train", "synthetic", *LEXICON, *words, "device=cpu", f"out={out}", watch=interrupt)
    assert pair[0].returncode == 130, pair
    step = RunFolder(out).position()["step"]
    assert 0 < step < 4000
    assert RunFolder(out).position()["processes"] == 2
    alone = trained(out, *words)
    assert alone.returncode == 2
    assert "by 2 process(es), but now there are 1" in alone.stderr
