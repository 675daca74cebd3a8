"""Arrays in a temporary file are read as they were written, and its folder is named if it is full."""

import os
import tempfile

import numpy as np
import pytest
from aligned_text import cli

from attnlab.files import StorageError, array_file
from attnlab.files.array_file import ArrayFile


@pytest.mark.parametrize("in_memory", [0, 10, 10**6])
def test_arrays_are_read_in_any_order(in_memory):
    file = ArrayFile(in_memory)
    arrays = [np.arange(35, dtype=np.int32).reshape(5, 7).T, np.zeros((0, 3), np.int32), np.arange(11)]
    places = []
    for each in arrays:
        places.append(file.tell())
        file.write(each)
    for place, each in [*zip(places, arrays, strict=True)][::-1]:
        file.seek(place)
        read = file.read(each.dtype.type, *each.shape)
        assert read.dtype == each.dtype
        assert np.array_equal(read, each)


def test_the_folder_holds_nothing_when_the_arrays_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = ArrayFile()
    file.write(np.zeros(10**6))
    del file
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("kind", ["ibm1", "hmm"])
@pytest.mark.parametrize("lines", [3, 3000])
def test_a_full_disk_is_named_with_what_to_do(kind, lines, tmp_path, monkeypatch):
    """Of a few lines, the last writes fail; of many, those between."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(array_file, "TemporaryFile", lambda: open("/dev/full", "r+b"))  # noqa: SIM115
    for name in "st":
        (tmp_path / name).write_text("a b c\nd e\na d f\n" * lines)
    failed = cli(kind, "s", "t")
    assert isinstance(failed.exception, StorageError)
    told = f"cannot write a temporary file in {tempfile.gettempdir()} (TMPDIR=FOLDER chooses another folder): the disk"
    assert str(failed.exception).startswith(told)


def test_without_a_folder_the_variable_is_named(monkeypatch):
    def fail():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(array_file, "gettempdir", fail)
    with pytest.raises(StorageError, match="set TMPDIR=FOLDER"):
        ArrayFile()
