"""Files are written whole or not at all; what a killed process left is removed; a full disk is one clear sentence."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from in_process import run_attnlab
from safetensors.torch import load_file

from attnlab.experiments.ledger import Ledger, Row
from attnlab.files import LOCK, StorageError, remove_stale, replace_file, write_text
from attnlab.training.run_folder import Checkpoint, Metrics, RunFolder, write_checkpoint

TRAIN = ["train", "synthetic", "data=lexicon", "examples=200", "held_out=20", "width=16", "layers=1", "heads=2"]
TRAIN += ["feed_forward=32", "batch_tokens=400", "steps=6", "checkpoint_every=2", "evaluate_every=3", "device=cpu"]


@contextmanager
def largest_file(size):
    """As on a full disk: no file can become larger. The error comes from the system, also inside safetensors."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a", "old")

    def write_half(path):
        with replace_file(path) as scratch:
            scratch.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_is_replaced_as_a_file_is(tmp_path):
    with replace_file(tmp_path / "whole") as scratch:
        (scratch / "inner").mkdir(parents=True)
        (scratch / "inner" / "a").write_text("text")
    assert (tmp_path / "whole" / "inner" / "a").read_text() == "text"
    assert os.listdir(tmp_path) == ["whole"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    code = "import os, sys, pathlib, attnlab.files as f\nwith f.replace_file(pathlib.Path(sys.argv[1])) as scratch:\n"
    code += "    scratch.write_bytes(bytes(9999)); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with (left / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as if it lived
        write_text(tmp_path / "b", "text")
        assert left.exists()
    (tmp_path / ".mine.part").mkdir()  # somebody else's
    remove_stale(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".mine.part", "b"]


def test_a_run_folder_is_cleaned_of_scratch_folders_alone_when_it_is_trained_next(tmp_path):
    kept = [".mine", ".tmpAb3dEf", ".venv-3.11", "steps"]
    for name in (*kept, ".model.json.ab12.part", "steps/.5.safetensors.ab12.part"):
        (tmp_path / name).mkdir()
        if name.endswith(".part"):
            (tmp_path / name / LOCK).touch()
    with RunFolder(tmp_path).lock():
        assert sorted(os.listdir(tmp_path)) == [".lock", *kept]
        assert os.listdir(tmp_path / "steps") == []


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
    ],
)
def test_what_cannot_be_written_is_named_with_what_to_do(tmp_path, monkeypatch, code, advice):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    checkpoint = Checkpoint({"x": torch.zeros(3)}, {"step": 1})
    row = Row(recipe={}, seed=0, measure="m", edition=1)
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    writes = {
        "a.txt": lambda path: write_text(path, "text"),
        "last.safetensors": lambda path: write_checkpoint(checkpoint, path),
        "ledger.jsonl": lambda path: Ledger(path).append(row),
        "metrics.jsonl": lambda path: metrics.sync(),
    }
    for name, write in writes.items():
        with pytest.raises(StorageError, match=rf"{name}: .*{advice}"):
            write(tmp_path / name)
    metrics.close()
    with pytest.raises(OSError, match="error 5"), replace_file(tmp_path / "b"):  # not about space: unchanged
        raise OSError(errno.EIO, "error 5")


def test_a_full_disk_is_one_line_and_the_run_resumes_when_there_is_room(tmp_path):
    assert run_attnlab(*TRAIN, f"out={tmp_path / 'whole'}").returncode == 0
    with largest_file(40_000):
        done = run_attnlab(*TRAIN, f"out={tmp_path / 'cut'}")
    assert done.returncode == 2
    assert "last.safetensors" in done.stderr.splitlines()[-1]
    assert "run the same command again" in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "cut").glob(".*.part"))
    assert run_attnlab(*TRAIN, f"out={tmp_path / 'cut'}").returncode == 0
    one, other = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
