"""The copy studies at smoke scale show what they are for; seeds trained as one are those trained alone."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from inline_scheduler import InlineScheduler
from item_runs import KnownRows, make_setting, run_item
from scipy.stats import spearmanr

from attnlab.experiments.ledger import Ledger
from attnlab.experiments.plan import Workplace
from attnlab.experiments.seed_run import SeedRun
from attnlab.studies.snell2021.copying import CopyExperiment, _make_share, fig3, mixtures, read_seeds, section62
from attnlab.studies.snell2021.heads import CONDITIONS, Combination, fig6
from attnlab.studies.snell2021.prediction import choose_weight, describe_rank, describe_verdicts, prediction

BASE = CopyExperiment(data="subset", length=3, types=5, width=8, steps=4, every=2, examples=8, held_out=8)
SEEDS = (0, 1, 2)
BASE_OF_FIG3 = CopyExperiment(length=8, types=8, width=64, steps=70, examples=32, lr=8e-3)


def shares(findings):
    """How many of the seeds learnt, by row."""
    return {cell.row: cell.mean for cell in findings.cells if cell.share}


# --- rows of seeds ---


def test_seeds_trained_as_one_have_the_rows_of_those_trained_alone(tmp_path):
    """At smoke scale each case is one population, at small scale each seed is a job."""
    cases = {"five": BASE, "seven": replace(BASE, types=7)}
    together, alone = InlineScheduler(), InlineScheduler()
    by_case = run_item(lambda setting: read_seeds(setting, cases, (0, 1)), tmp_path / "smoke", together)
    by_seed = run_item(lambda setting: read_seeds(setting, cases, (0, 1)), tmp_path / "small", alone, scale="small")
    assert len([name for name in together.names if "and 1 more, training" in name]) == 2
    assert (len(together.names), len(alone.names)) == (6, 4)
    assert list(by_case) == list(by_seed) == ["five", "seven"]
    for name, results in by_seed.items():
        assert results.seeds == by_case[name].seeds == (0, 1)
        assert results.steps == by_case[name].steps == (0, 2, 4)
        assert results.finite.all()
        for measure, curves in results.measures.items():
            assert curves.shape == (2, 3)
            torch.testing.assert_close(by_case[name].measures[measure], curves)
    keys = [{row.key for row in Ledger(tmp_path / out / "ledger.jsonl").rows()} for out in ("smoke", "small")]
    assert keys[0] == keys[1]
    assert not any((tmp_path / "smoke" / "work" / "populations").iterdir())


def test_seeds_that_were_trained_but_not_measured_are_not_trained_again(tmp_path, monkeypatch):
    place, runs = Workplace.at(tmp_path), [SeedRun(BASE, seed, together=True) for seed in (0, 1)]
    runs[0].train_together(runs[1:], place)  # and then the command is killed
    monkeypatch.setattr("attnlab.experiments.seed_run.train_population", lambda *a, **k: pytest.fail("trained again"))
    on = InlineScheduler()
    results = run_item(lambda setting: read_seeds(setting, {"five": BASE}, (0, 1)), tmp_path, on)
    assert on.names == [run.name for run in runs]
    assert results["five"].measures["accuracy"].shape == (2, 3)


@dataclass(frozen=True, kw_only=True)
class OneBreaks(CopyExperiment):
    def model(self, seed):
        model = super().model(seed)
        if seed == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        return model


def test_a_seed_that_diverges_is_marked_in_its_row_and_left_out(tmp_path):
    case = OneBreaks(**vars(BASE))
    results = run_item(lambda setting: read_seeds(setting, {"five": case}, SEEDS), tmp_path)["five"]
    assert results.finite.tolist() == [True, False, True]
    rows = Ledger(tmp_path / "ledger.jsonl").rows()
    assert {row.seed: row.values["is_finite"] for row in rows} == {0: True, 1: False, 2: True}
    assert len(_make_share("fig3", "five", results, None, ()).values) == 2


def test_a_seed_that_fails_is_named_and_tried_again(tmp_path, monkeypatch):
    def read(setting):
        return read_seeds(setting, {"five": BASE}, (0, 1))

    with monkeypatch.context() as patch:
        patch.setattr(SeedRun, "take_measure", lambda self, place: {}[self.seed])
        with pytest.raises(ValueError, match="five: KeyError"):
            run_item(read, tmp_path)
    assert all(row.failed for row in Ledger(tmp_path / "ledger.jsonl").rows())
    assert run_item(read, tmp_path)["five"].seeds == (0, 1)


# --- the items ---


def test_figure_3_has_a_distribution_that_is_learnt_and_one_that_is_not(tmp_path):
    found = run_item(fig3, tmp_path, seeds=(0,))
    learnt = shares(found)
    assert set(learnt.values()) >= {0.0, 1.0}, learnt
    assert set(found.figures) == {"accuracy", "attention"}


def test_mixtures_are_given_more_updates(tmp_path):
    """Accuracy and attention are told apart: here longer training brings the one without the other."""

    def make_curves(run):
        experiment = run.experiment
        learnt = 1.0 if experiment.steps > 100 or experiment.data != "mixture" else 0.1
        attention = 0.95 if experiment.data != "mixture" else 0.2
        curves = {"accuracy": [0.0, learnt], "attention": [0.0, attention]}
        return {"measures": curves, "steps": [0, experiment.steps], "is_finite": True}

    rows = KnownRows(make_curves)
    found = mixtures(make_setting(tmp_path, seeds=SEEDS, rows=rows))
    means = {(cell.row, cell.column.split(" ")[3]): cell.mean for cell in found.cells}
    assert [mean for (row, _), mean in means.items() if row.startswith("mixture")] == [0.0, 0.0]
    assert [mean for (row, _), mean in means.items() if row.startswith("the same")] == [1.0, 0.0]
    assert [mean for (row, _), mean in means.items() if row.startswith("permutations")] == [1.0, 1.0]
    assert all(cell.verdict == "no verdict" for cell in found.cells)
    assert rows.asked[0].key == SeedRun(replace(BASE_OF_FIG3, data="mixture"), 0, True).key  # fig3's own run


@pytest.mark.slow
def test_copying_is_learnt_and_a_permutation_is_not(tmp_path):
    assert shares(run_item(section62, tmp_path, seeds=SEEDS)) == {"copy": 1.0, "permutation function": 0.0}


def test_backbones_heads_and_streams_are_numbered_from_0():
    assert Combination(backbone=0, combinations=((0,), (1,)), streams=(0, 100)).combinations[0] == (0,)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "prefix"), [("lstm", ""), ("gru", "GRU: ")])
def test_one_good_head_among_bad_ones(tmp_path, form, prefix):
    found = run_item(fig6, tmp_path, seeds=SEEDS, options={"form": form})
    assert not [cell for cell in found.cells if cell.not_run], found.remarks
    learnt = shares(found)
    assert learnt.keys() == {f"{prefix}{name}" for name in CONDITIONS}
    assert learnt[f"{prefix}one good"] > 0.5
    assert len(found.figures) == 1


def test_a_form_without_its_rows_is_not_run(tmp_path):
    """A drawn page shows one form if the ledger has only that one, also after an interruption."""
    values = {"steps": [0, 50], "is_finite": True, "measures": {"accuracy": [0.1, 0.9], "attention": [0.1, 0.9]}}

    def measure(run):
        if type(run.experiment) is not Combination:
            raise ValueError("not measured")
        reached = run.experiment.combinations[run.seed][0] % 2
        return values | {"measures": {"accuracy": [0.1, 0.96 if reached else 0.9]}}

    setting = make_setting(tmp_path, seeds=SEEDS, rows=KnownRows(measure))
    setting.rows.running = False
    found = fig6(setting)
    claims = {cell.row for cell in found.cells if cell.not_run and cell.has_claim}
    assert claims == {"GRU: one good − all bad", "GRU: random − all bad"}
    assert shares(found)["all bad"] == 0.0
    assert len(found.cells) == 10
    assert set(found.figures) == {"accuracy"}

    def measure_some(run):
        if run.seed >= 5:
            raise ValueError("not measured")
        return values

    setting = make_setting(tmp_path, seeds=SEEDS, rows=KnownRows(measure_some))
    setting.rows.running = False
    reason = "heads alone on backbone 0: 5 of 18 runs are measured"
    assert {cell.not_run for cell in fig6(setting).cells} == {reason, f"GRU: {reason}"}


def test_a_form_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="form must be lstm or gru, got 'grru'"):
        fig6(make_setting(tmp_path, options={"form": "grru"}))


@pytest.mark.slow
def test_a_score_from_counts_is_compared_with_what_the_seeds_did(tmp_path):
    found = run_item(prediction, tmp_path, seeds=SEEDS)
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
    assert choose_weight(gains, commons, shares) == 2.0
    assert choose_weight(gains, -commons, shares[::-1]) == 1.0


def test_a_rank_correlation_has_an_interval():
    draw = np.random.default_rng(3)
    scores = draw.normal(size=40)
    shares = scores + draw.normal(size=40)
    rank, low, high = (float(x.strip("[],")) for x in describe_rank(scores, shares).split()[1:])
    assert rank == pytest.approx(spearmanr(scores, shares).statistic, abs=0.005)
    z, margin = np.arctanh(rank), 1.96 * 1.03 / np.sqrt(37)  # Fisher's, of ranks
    assert (low, high) == pytest.approx((np.tanh(z - margin), np.tanh(z + margin)), abs=0.02)


def test_a_rank_correlation_that_there_is_not_is_a_reason():
    for scores, shares in (([1, 2, 3, 4], [0, 1, 2, 3]), ([1] * 5, [0, 0.2, 0.5, 0.7, 1]), ([1, 2, 3, 4, 5], [0] * 5)):
        assert describe_rank(np.array(scores), np.array(shares)).startswith("no Spearman (fewer than 5 distributions")


def test_of_few_distributions_there_is_no_interval():
    assert describe_rank(np.arange(5), np.arange(5) / 4) == "Spearman 1.00"


def test_verdicts_are_told_from_the_likely_ones_on():
    verdicts, scores = np.array(["unlikely", *["likely"] * 5]), np.array([-1, 0.1, 0.2, 0.3, 0.4, 0.5])
    told = describe_verdicts(verdicts, scores, np.array([0.05, 1, 0.95, 0.9, 0.85, 0.8]))
    assert "likely 5, learnt by 80% to 100% of the seeds, Spearman -1.00; unlikely 1, learnt by 5% to 5% of" in told
