"""What the studies of trained models share: corpora, runs measured once, rows of variants."""

from pathlib import Path

import pytest
import torch

from attnlab.experiments.corpora import StudyCorpus, artificial_text, chosen, grounds
from attnlab.experiments.study import Setting
from attnlab.experiments.trained import FAILED, Measure, Trained, cell, difference
from attnlab.experiments.variants import Variant, Variants
from attnlab.experiments.verdicts import Cell
from attnlab.training import runs

CPU = torch.device("cpu")
TINY = {
    "data": "lexicon", "examples": "60", "held_out": "7", "layers": "1", "width": "8", "heads": "2",
    "feed_forward": "8", "steps": "3", "batch_examples": "13", "warmup": "0", "evaluate_every": "3",
}  # fmt: skip
OWN = StudyCorpus("own", "Own pairs", "synthetic", {"smoke": TINY}, tags=("other data",))
PAPER = StudyCorpus("paper", "Their pairs", "synthetic", {"full": TINY}, asked="a day")
SOFTMAX, CODA = (Variant(name, name.title(), {"attention": name}) for name in ("softmax", "coda"))
NAMES = ("softmax", "coda", "bad")


def steps_of(run):
    return {"steps": run.folder.position()["step"], "seed": run.recipe.training.seed}


STEPS = Measure("steps", steps_of)


def setting(folder, scale="smoke", seeds=(0, 1, 2), **options):
    return Setting(scale, seeds, CPU, folder / "work" / "item", options=options)


def variants(ground, some=(SOFTMAX, CODA)):
    return Variants("item", ground, some, STEPS, NAMES)


# --- what can be run ---


def test_a_row_says_why_it_is_not_run(tmp_path):
    def reason(corpus, scale, **options):
        return corpus.on(setting(tmp_path, scale, **options)).why_not()

    assert reason(OWN, "smoke") == ""
    assert reason(OWN, "full") == "this row is run at scale smoke"
    assert reason(OWN, "smoke", data="paper") == "left out by data=paper"
    assert reason(PAPER, "full") == "a day: it is run where data=paper asks for it"
    assert reason(PAPER, "full", data="paper,own") == ""


def test_data_that_are_not_there_are_a_reason_and_not_an_error(tmp_path):
    (tmp_path / "nothing").mkdir()
    missing = StudyCorpus("ptb", "PTB", "language", {"smoke": {"data": "ptb"}})
    where = Setting("smoke", (0,), CPU, tmp_path / "work" / "item", data_dir=str(tmp_path / "nothing"))
    assert "ptb.valid.txt[.gz] is not there" in missing.on(where).why_not()


def test_the_papers_data_have_a_row_at_every_scale_and_stand_ins_at_their_own(tmp_path):
    def rows(scale):
        return [ground.corpus.name for ground in grounds([OWN, PAPER], setting(tmp_path, scale), ["own", "paper"])]

    assert rows("smoke") == ["own", "paper"]
    assert rows("small") == rows("full") == ["paper"]
    with pytest.raises(ValueError, match=r"data: there is no 'onw' \(did you mean 'own'\?\); there are own, paper"):
        grounds([OWN], setting(tmp_path, data="onw"), ["own", "paper"])
    assert chosen(setting(tmp_path, attention="c,a"), "attention", "abc") == ["a", "c"]


def test_tags_say_what_was_cut_down(tmp_path):
    assert OWN.on(setting(tmp_path)).tags == ("other data", "other model", "smaller scale")
    assert OWN.on(setting(tmp_path, "full")).tags == ("other data",)


def test_the_artificial_text_has_three_different_parts_and_stays(tmp_path):
    files = artificial_text(tmp_path)
    texts = {part: Path(files[part]).read_text() for part in ("data", "valid", "test")}
    assert len(set(texts.values())) == 3
    assert texts["data"].count("\n") == 1200
    assert artificial_text(tmp_path) == files


# --- what was run ---


def test_runs_are_trained_once_and_shared_by_items(tmp_path, monkeypatch):
    first = variants(OWN.on(setting(tmp_path)))
    assert first.of(CODA) == [{"steps": 3, "seed": seed} for seed in (0, 1, 2)]
    assert len(list((tmp_path / "work" / "runs").iterdir())) == 6
    monkeypatch.setattr(runs, "start_run", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(runs, "open_run", lambda *a, **k: pytest.fail("measured again"))
    assert variants(OWN.on(setting(tmp_path))).trained == first.trained


def test_a_run_that_diverges_costs_its_own_values_and_is_not_tried_again(tmp_path, monkeypatch):
    bad = Variant("bad", "Bad", {"attention": "softmax", "lr": "1e30"})
    where = setting(tmp_path, seeds=(0, 1))
    found = variants(OWN.on(where), (SOFTMAX, bad))
    made = found.level(bad, "steps", lambda x: x["steps"])
    assert made.verdict == "not run"
    assert "step" in made.not_run
    assert found.level(SOFTMAX, "steps", lambda x: x["steps"]).values == (3, 3)
    assert found.contrast(bad, SOFTMAX, "steps", lambda x: x["steps"]).not_run == made.not_run
    assert len(list((tmp_path / "work" / "runs").glob(f"*/{FAILED}"))) == 2
    monkeypatch.setattr(runs, "start_run", lambda *a, **k: pytest.fail("tried again"))
    assert variants(OWN.on(where), (SOFTMAX, bad)).level(bad, "steps", lambda x: x["steps"]) == made


def test_a_seed_that_failed_is_left_out_of_both_sides_of_a_contrast_and_said():
    found = Trained({("a", 0): {"x": 5.0}, ("a", 1): {"x": 7.0}, ("b", 1): {"x": 4.0}}, {("b", 0): "it blew up"})
    about = {"item": "i", "row": "r", "column": "c", "note": "first"}
    made = cell(found, [("b", 0), ("b", 1)], lambda x: x["x"], **about)
    assert (made.values, made.note) == ((4.0,), "first; 1 of 2 seeds have no value: it blew up")
    pairs = [(("a", seed), ("b", seed)) for seed in (0, 1)]
    made = difference(found, pairs, (lambda x: x["x"], lambda x: -x["x"]), **about)
    assert (made.values, made.note) == ((11.0,), "first; 1 of 2 seeds have no value: it blew up")


def test_a_value_that_is_infinite_is_none():
    found = Trained({0: {"x": float("inf")}, 1: {"x": 4.0}}, {})
    about = {"item": "i", "row": "r", "column": "c"}
    made = cell(found, [0, 1], lambda x: x["x"], **about)
    assert (made.values, made.note) == ((4.0,), "1 of 2 seeds have no value: it is infinite or no number")
    assert cell(found, [0], lambda x: x["x"], **about).not_run == "it is infinite or no number"


def test_published_numbers_are_held_against_ours_only_where_they_are_comparable(tmp_path):
    """On other data, and on a model that was cut down, the sign alone."""
    here = variants(OWN.on(setting(tmp_path)))
    seed = lambda x: float(x["seed"])  # noqa: E731
    assert here.level(CODA, "c", seed, 2.0).published is None
    stand_in = here.contrast(CODA, SOFTMAX, "c", (lambda x: 1.0 + x["seed"], seed), 0.5)
    assert (stand_in.published, stand_in.sign, stand_in.values) == (None, 1, (1.0, 1.0, 1.0))
    assert stand_in.note == "+0.50 in the paper"
    assert stand_in.verdict == "same direction"
    official = variants(PAPER.on(setting(tmp_path, "full")))
    not_run = official.contrast(CODA, SOFTMAX, "c", seed, -0.5)
    assert (not_run.published, not_run.sign, not_run.verdict) == (-0.5, -1, "not run")
    asked = variants(PAPER.on(setting(tmp_path, "full", data="paper")))
    assert asked.contrast(CODA, SOFTMAX, "c", (lambda x: 1.0, lambda x: 1.5), -0.5) == Cell(
        item="item", row="Their pairs: Coda − Softmax", column="c", published=-0.5, sign=-1, values=(-0.5,) * 3
    )


def test_attention_leaves_rows_out_by_name(tmp_path):
    some = variants(OWN.on(setting(tmp_path, attention="coda")))
    assert some.level(SOFTMAX, "c", lambda x: x["steps"]).not_run == "left out by attention=coda"
    assert some.contrast(CODA, SOFTMAX, "c", lambda x: x["steps"]).not_run == "left out by attention=coda"
    assert len(some.level(CODA, "c", lambda x: x["steps"]).values) == 3
    with pytest.raises(ValueError, match="attention: there is no 'cado'"):
        variants(OWN.on(setting(tmp_path, attention="cado")))
