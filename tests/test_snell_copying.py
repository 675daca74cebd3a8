"""The copy studies at smoke scale show what they are for; cases trained side by side are those trained in turn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from attnlab.experiments.schedulers import scheduler
from attnlab.experiments.study import Setting
from attnlab.studies.snell2021.copying import CopyExperiment, each_grown_in, fig3, section62
from attnlab.studies.snell2021.heads import fig6
from attnlab.studies.snell2021.prediction import chosen_weight, prediction, told_rank, told_verdicts

CPU = torch.device("cpu")


@pytest.fixture
def setting(tmp_path):
    with scheduler("local", jobs=2, device="cpu") as on:
        yield Setting("smoke", (0, 1, 2), CPU, tmp_path / "work" / "item", on=on)


def shares(findings):
    """How many of the seeds learnt, by row."""
    return {cell.row: cell.mean for cell in findings.cells if cell.share}


def test_cases_side_by_side_are_those_in_turn(setting, tmp_path):
    base = CopyExperiment(data="subset", length=3, types=5, width=8, steps=4, every=2, examples=8, held_out=8)
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


@pytest.mark.slow
def test_copying_is_learnt_and_a_permutation_is_not(setting):
    assert shares(section62(setting)) == {"copy": 1.0, "permutation function": 0.0}


@pytest.mark.slow
def test_one_good_head_among_bad_ones(setting):
    found = fig6(setting)
    assert not [cell for cell in found.cells if cell.not_run], found.remarks
    learnt = shares(found)
    assert learnt.keys() == {"all bad", "one good", "random"}
    assert learnt["one good"] >= learnt["all bad"]


@pytest.mark.slow
def test_a_score_from_counts_is_held_against_what_the_seeds_did(setting):
    found = prediction(setting)
    learnt = shares(found)
    assert {learnt["8 of 12"], learnt["permutations of two sets, 0.5"]} == {0.0, 1.0}, learnt
    gain, common = ({cell.row: cell.mean for cell in found.cells if cell.column == name} for name in ("gain", "common"))
    assert gain["8 of 12"] > gain["8 of 8"] == pytest.approx(0.0, abs=1e-9)
    assert common["permutations of two sets, 0.5"] > common["8 of 12"]


def test_the_weight_is_chosen_on_one_half():
    """Common ranks the half that chooses, at twice its weight; the other half, which it would not, is not asked."""
    gains, commons = np.zeros(10), np.zeros(10)
    gains[::2], commons[::2], commons[1::2] = (0.5, 0.4, 0.3, 0.2, 0.1), (0.4, 0.3, 0.2, 0.1, 0.0), range(5)
    shares = np.repeat([0.1, 0.2, 0.3, 0.4, 0.5], 2)
    assert chosen_weight(gains, commons, shares) == 2.0
    assert chosen_weight(gains, -commons, shares[::-1]) == 1.0


def test_a_rank_correlation_has_an_interval():
    draw = np.random.default_rng(3)
    scores = draw.normal(size=40)
    shares = scores + draw.normal(size=40)
    rank, low, high = (float(x.strip("[],")) for x in told_rank(scores, shares).split()[1:])
    assert rank == pytest.approx(spearmanr(scores, shares).statistic, abs=0.005)
    z, margin = np.arctanh(rank), 1.96 * 1.03 / np.sqrt(37)  # Fisher's, of ranks
    assert (low, high) == pytest.approx((np.tanh(z - margin), np.tanh(z + margin)), abs=0.02)


def test_a_rank_correlation_that_there_is_not_is_a_reason():
    for scores, shares in (([1, 2, 3, 4], [0, 1, 2, 3]), ([1] * 5, [0, 0.2, 0.5, 0.7, 1]), ([1, 2, 3, 4, 5], [0] * 5)):
        assert told_rank(np.array(scores), np.array(shares)).startswith("no Spearman (fewer than 5 distributions")


def test_of_few_distributions_there_is_no_interval():
    assert told_rank(np.arange(5), np.arange(5) / 4) == "Spearman 1.00"


def test_verdicts_are_told_from_the_likely_ones_on():
    verdicts, scores = np.array(["unlikely", *["likely"] * 5]), np.array([-1, 0.1, 0.2, 0.3, 0.4, 0.5])
    told = told_verdicts(verdicts, scores, np.array([0.05, 1, 0.95, 0.9, 0.85, 0.8]))
    assert "likely 5, learnt by 80% to 100% of the seeds, Spearman -1.00; unlikely 1, learnt by 5% to 5% of" in told
