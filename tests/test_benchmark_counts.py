"""Benchmarks count the least work of each mechanism, and refuse a machine that cannot run them."""

import sys
from pathlib import Path

import pytest
import torch

from attnlab.mechanisms import MECHANISMS

SPEEDS = {"products": 1e12, "bytes": 1e12, "instructions": 1e12}


@pytest.fixture(autouse=True)
def find_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))


def test_mechanisms_without_a_count_have_no_floor():
    import floors

    without = {name for name in MECHANISMS if floors.find_floor_ms(name, (1, 2, 64, 8), SPEEDS) is None}
    assert without == {"nap", "entmax15", "sparsemax", "uniform"}
    assert floors.count_work("./mine.py:Mine", 2, 8) is None


@pytest.mark.parametrize("keys", [1, 3, 7, 9, float("inf")])
def test_pairs_are_those_that_a_window_shows(keys):
    import floors

    assert floors.count_pairs(7, keys) == sum(min(i, keys) for i in range(1, 8))


def test_a_window_and_a_linear_form_take_time_in_proportion_to_the_length():
    import floors

    def grow(name):
        long, longer = (floors.find_floor_ms(name, (1, 2, n, 64), SPEEDS) for n in (2**14, 2**15))
        return longer / long

    assert grow("sliding-window") == pytest.approx(2, rel=1e-2)
    assert grow("non") == pytest.approx(2, rel=1e-2)
    assert grow("softmax") == pytest.approx(4, rel=1e-2)


@pytest.mark.parametrize("part", ["start", "command"])
def test_parts_that_measure_a_gpu_refuse_a_cpu(part, monkeypatch, capsys):
    import population

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["population.py", "--part", part])
    with pytest.raises(SystemExit):
        population.main()
    assert f"--part {part} needs a GPU" in capsys.readouterr().err
