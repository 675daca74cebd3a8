"""benchmarks/faults.py in short: nothing is lost, and no damage ends in a traceback, a wrong result, or code run."""

import sys
from pathlib import Path

import pytest
import torch

from attnlab.records import record as records
from attnlab.training import run_folder


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import faults

    short = (*(x for x in faults.fuzzing.SETTINGS if "steps" not in x), "steps=8")
    monkeypatch.setattr(faults.fuzzing, "SETTINGS", short)
    yield faults
    for name in ("faults", "fuzzing", "measuring"):
        sys.modules.pop(name, None)


def test_damaged_checkpoints_lose_nothing(faults, tmp_path):
    tally = faults.damage_checkpoints(tmp_path / "run", 60, seed=1)
    assert tally.is_clean(), tally.examples


def test_damaged_inputs_are_refused_or_read_right(faults, tmp_path):
    for tally in faults.fuzz_inputs(tmp_path, 200, seed=1):
        assert tally.is_clean(), tally.examples
        assert tally.counts["tried"] > 5


def test_damage_is_noticed_by_the_benchmark(faults, tmp_path, monkeypatch):
    """Without checksums, the benchmark must find wrong checkpoints and records."""
    monkeypatch.setattr(run_folder, "_compute_checksum", lambda tensors, state: "")
    assert not faults.damage_checkpoints(tmp_path / "run", 20, seed=1).is_clean()
    monkeypatch.setattr(records, "_compute_checksum", lambda x: 0)
    monkeypatch.setattr(faults.fuzzing, "KINDS", {faults.fuzzing.Records: 1.0})
    (tally,) = faults.fuzz_inputs(tmp_path, 25, seed=1)
    assert tally.counts["wrong"]


def test_records_without_checksums_still_load(tmp_path, monkeypatch):
    """Those that were saved before there were checksums."""
    record = records.Record([], tokens={"source": torch.arange(6).view(2, 3)})
    monkeypatch.setattr(records.zlib, "crc32", lambda *_: None)
    record.save(tmp_path / "old.safetensors")
    text = (tmp_path / "old.safetensors").read_bytes().replace(b'\\"crc32\\": null', b'\\"older\\": null')
    (tmp_path / "old.safetensors").write_bytes(text)
    monkeypatch.undo()
    assert torch.equal(records.Record.load(tmp_path / "old.safetensors").tokens["source"], record.tokens["source"])
