"""The copy studies at smoke scale show what they are for; cases trained side by side are those trained in turn."""

from dataclasses import replace

import pytest
import torch

from attnlab.scheduling import scheduler
from attnlab.studies.snell2021.copying import Copying, each_grown_in, fig3, section62
from attnlab.studies.snell2021.heads import fig6
from attnlab.studies.snell2021.prediction import prediction
from attnlab.studies.study import Setting

CPU = torch.device("cpu")


@pytest.fixture
def setting(tmp_path):
    with scheduler("local", jobs=2, device="cpu") as on:
        yield Setting("smoke", (0, 1, 2), CPU, tmp_path / "work" / "item", on=on)


def shares(findings):
    """How many of the seeds learnt, by row."""
    return {cell.row: cell.mean for cell in findings.cells if cell.share}


def test_cases_side_by_side_are_those_in_turn(setting, tmp_path):
    base = Copying(data="subset", length=3, types=5, width=8, steps=4, every=2, examples=8, held_out=8)
    cases = {"five": base, "seven": replace(base, types=7)}
    in_turn = replace(setting, on=None, folder=tmp_path / "in-turn")
    together, alone = (dict(each_grown_in(each, cases, (0, 1))) for each in (setting, in_turn))
    assert list(together) == list(alone) == ["five", "seven"]
    for name, grown in alone.items():
        for weight, x in grown.weights.items():
            torch.testing.assert_close(together[name].weights[weight], x)
        torch.testing.assert_close(together[name].measures["accuracy"], grown.measures["accuracy"])
    assert not torch.equal(
        together["five"].weights["readout.bias"][0], together["seven"].weights["readout.bias"][0, :7]
    )


def test_figure_3_has_a_distribution_that_is_learnt_and_one_that_is_not(setting):
    found = fig3(setting)
    learnt = shares(found)
    assert set(learnt.values()) >= {0.0, 1.0}, learnt
    assert set(found.figures) == {"accuracy", "attention"}


def test_copying_is_learnt_and_a_permutation_is_not(setting):
    assert shares(section62(setting)) == {"copy": 1.0, "permutation function": 0.0}


@pytest.mark.slow
def test_one_good_head_among_bad_ones(setting):
    found = fig6(setting)
    assert not [cell for cell in found.cells if cell.not_run], found.remarks
    learnt = shares(found)
    assert learnt.keys() == {"all bad", "one good", "random"}
    assert learnt["one good"] >= learnt["all bad"]


def test_a_score_from_counts_is_held_against_what_the_seeds_did(setting):
    found = prediction(setting)
    learnt = shares(found)
    assert {learnt["8 of 12"], learnt["permutations of two sets, 0.5"]} == {0.0, 1.0}, learnt
    scores = {cell.row: cell.mean for cell in found.cells if cell.column == "score, gain − common"}
    assert scores["8 of 12"] > scores["8 of 8"] > scores["permutations of two sets, 0.5"]
