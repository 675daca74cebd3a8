"""Benchmarks store each row when it is measured, and a later run adds the rows that a file lacks."""

import json
import sys
from pathlib import Path

import pytest

ABOUT = {"hardware": "a machine", "torch": "2.11", "triton": None, "commit": "one"}


@pytest.fixture(autouse=True)
def find_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))


def open_sheet(folder, resume=False, **changes):
    import measuring

    return measuring.Sheet(str(folder), "x", ABOUT | changes, lambda row: [row["name"]], resume)


def read(folder, name="x"):
    content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return content["about"], content["rows"]


def test_rows_of_an_earlier_run_stay_with_their_commit(tmp_path):
    first = open_sheet(tmp_path)
    for name in "ab":
        first.add({"name": name, "ms": 1.0})
    second = open_sheet(tmp_path, commit="two")
    assert second.lacks({"name": "a"})
    second.add({"name": "a", "ms": 2.0})
    about, rows = read(tmp_path)
    assert about["commit"] == "two"
    assert rows == [{"commit": "one", "name": "b", "ms": 1.0}, {"name": "a", "ms": 2.0}]


def test_resuming_lacks_what_failed_and_what_is_new(tmp_path):
    first = open_sheet(tmp_path)
    first.add({"name": "a", "ms": 1.0})
    first.add({"name": "b", "not_run": "out of memory"})
    second = open_sheet(tmp_path, resume=True)
    assert [second.lacks({"name": name}) for name in "abc"] == [False, True, True]


def test_rows_of_another_machine_are_refused(tmp_path):
    open_sheet(tmp_path).add({"name": "a"})
    with pytest.raises(SystemExit, match=r"measured with hardware a machine, and this is another: move the file, or"):
        open_sheet(tmp_path, hardware="another")


def run_mechanisms(monkeypatch, folder, *more):
    """Run the tiny benchmark of host times; return its rows by mechanism."""
    import mechanisms

    given = ["mechanisms.py", "--tiny", "--part", "host", "--out", str(folder), *more]
    monkeypatch.setattr(sys, "argv", given)
    mechanisms.main()
    return {row["mechanism"]: row for row in read(folder, next(folder.glob("*-host.json")).stem)[1]}


def test_a_benchmark_that_was_cut_off_is_resumed(monkeypatch, tmp_path):
    import measuring

    monkeypatch.setattr(measuring, "host_milliseconds", lambda step: step() and next(clock))
    clock = iter([1.0, 2.0])  # the peer and softmax, then it is cut off
    with pytest.raises(RuntimeError, match="StopIteration"):
        run_mechanisms(monkeypatch, tmp_path, "--only", "softmax,dot")
    clock = iter([10.0, 30.0])
    rows = run_mechanisms(monkeypatch, tmp_path, "--only", "softmax,dot", "--resume")
    assert {name: row["host_ms"] for name, row in rows.items()} == {
        "softmax": 2.0,
        "softmax by torch": 10.0,
        "dot": 30.0,
    }
    assert rows["softmax"]["times_peer"] == 2.0
    assert rows["dot"]["times_peer"] == 3.0
    clock = iter([])
    assert run_mechanisms(monkeypatch, tmp_path, "--only", "softmax,dot", "--resume") == rows
