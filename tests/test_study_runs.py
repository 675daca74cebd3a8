"""What the studies of trained models share: corpora, runs measured once, rows of variants."""

from pathlib import Path

import pytest
from item_runs import KnownRows, make_setting, run_item

from attnlab.experiments import plan
from attnlab.experiments.corpora import (
    StudyCorpus,
    list_grounds,
    name_artificial_text,
    select_names,
    write_artificial_text,
)
from attnlab.experiments.ledger import Ledger
from attnlab.experiments.plan import Measure
from attnlab.experiments.variants import Variant, Variants
from attnlab.experiments.verdicts import Cell

TINY = {
    "data": "lexicon", "examples": "60", "held_out": "7", "layers": "1", "width": "8", "heads": "2",
    "feed_forward": "8", "steps": "3", "batch_examples": "13", "warmup": "0", "evaluate_every": "3",
}  # fmt: skip
OWN = StudyCorpus("own", "Own pairs", "synthetic", {"smoke": TINY}, tags=("other data",))
PAPER = StudyCorpus("paper", "Their pairs", "synthetic", {"full": TINY}, asked="a day")
SOFTMAX, CODA = (Variant(name, name.title(), {"attention": name}) for name in ("softmax", "coda"))
NAMES = ("softmax", "coda", "bad")


def steps_of(run, place):
    return {"steps": run.folder.position()["step"], "seed": run.recipe.training.seed}


STEPS = Measure("steps", steps_of)


def setting(out, scale="smoke", **options):
    return make_setting(out, scale, options=options)


def variants(corpus, out, scale="smoke", seeds=(0, 1, 2), some=(SOFTMAX, CODA), **options):
    """Train what is missing, and return the rows."""
    return run_item(
        lambda setting: Variants("item", corpus.at(setting), some, STEPS, NAMES),
        out, scale=scale, seeds=seeds, options=options,
    )  # fmt: skip


# --- what can be run ---


def test_a_row_says_why_it_is_not_run(tmp_path):
    def reason(corpus, scale, **options):
        return corpus.at(setting(tmp_path, scale, **options)).explain_absence()

    assert reason(OWN, "smoke") == ""
    assert reason(OWN, "full") == "this row runs at scale smoke"
    assert reason(OWN, "smoke", data="paper") == "excluded by data=paper"
    assert reason(PAPER, "full") == "a day: data=paper runs it"
    assert reason(PAPER, "full", data="paper,own") == ""


def test_data_that_are_not_there_are_a_reason_and_not_an_error(tmp_path):
    (tmp_path / "nothing").mkdir()
    missing = StudyCorpus("ptb", "PTB", "language", {"smoke": {"data": "ptb"}})
    where = make_setting(tmp_path, data_dir=str(tmp_path / "nothing"))
    assert "ptb.valid.txt[.gz] does not exist" in missing.at(where).explain_absence()


def test_the_papers_data_have_a_row_at_every_scale_and_stand_ins_at_their_own(tmp_path):
    def rows(scale):
        return [ground.corpus.name for ground in list_grounds([OWN, PAPER], setting(tmp_path, scale), ["own", "paper"])]

    assert rows("smoke") == ["own", "paper"]
    assert rows("small") == rows("full") == ["paper"]
    with pytest.raises(ValueError, match=r"data: .*'onw' \(did you mean 'own'\?\); .* own, paper"):
        list_grounds([OWN], setting(tmp_path, data="onw"), ["own", "paper"])
    assert select_names(setting(tmp_path, attention="c,a"), "attention", "abc") == ["a", "c"]


def test_tags_say_what_was_cut_down(tmp_path):
    assert OWN.at(setting(tmp_path)).tags == ("other data", "other model", "smaller scale")
    assert OWN.at(setting(tmp_path, "full")).tags == ("other data",)


def test_the_artificial_text_has_three_different_parts_and_stays(tmp_path):
    write_artificial_text(tmp_path)
    files = name_artificial_text(tmp_path)
    texts = {part: Path(files[part]).read_text() for part in ("data", "valid", "test")}
    assert len(set(texts.values())) == 3
    assert texts["data"].count("\n") == 1200
    Path(files["valid"]).write_text("mine\n")
    write_artificial_text(tmp_path)
    assert Path(files["valid"]).read_text() == "mine\n"


# --- what is run ---


def steps(values):
    return values["steps"]


def fail(*args, **options):
    pytest.fail("trained or measured again")


def test_runs_are_trained_once_and_shared_by_items(tmp_path, monkeypatch):
    first = variants(OWN, tmp_path)
    assert first.list_values(CODA) == [{"steps": 3, "seed": seed} for seed in (0, 1, 2)]
    assert len(list((tmp_path / "work" / "runs").iterdir())) == 6
    assert {(row.recipe["model"]["attention"], row.seed) for row in Ledger(tmp_path / "ledger.jsonl").rows()} == {
        (name, seed) for name in ("softmax", "coda") for seed in (0, 1, 2)
    }
    monkeypatch.setattr(plan, "train_alone", fail)
    monkeypatch.setattr(plan, "open_run", fail)
    assert variants(OWN, tmp_path).measured == first.measured
    drawn = OWN.at(make_setting(tmp_path, seeds=(0, 1, 2), running=False))
    assert Variants("item", drawn, (SOFTMAX, CODA), STEPS, NAMES).measured == first.measured


def test_a_run_that_diverges_costs_its_own_values_and_is_not_tried_again(tmp_path, monkeypatch):
    bad = Variant("bad", "Bad", {"attention": "softmax", "lr": "1e30"})
    about = {"seeds": (0, 1), "some": (SOFTMAX, bad)}
    found = variants(OWN, tmp_path, **about)
    cell = found.make_level(bad, "steps", steps)
    assert cell.verdict == "not run"
    assert "step" in cell.not_run
    assert found.make_level(SOFTMAX, "steps", steps).values == (3, 3)
    assert found.make_contrast(bad, SOFTMAX, "steps", steps).not_run == cell.not_run
    rows = [row for row in Ledger(tmp_path / "ledger.jsonl").rows() if row.failed]
    assert [(row.seed, row.final, row.recipe["training"]["lr"]) for row in rows] == [(0, True, 1e30), (1, True, 1e30)]
    assert {row.failed for row in rows} >= {cell.not_run}
    monkeypatch.setattr(plan, "train_alone", fail)
    assert variants(OWN, tmp_path, **about).make_level(bad, "steps", steps) == cell


def known_variants(tmp_path, function, some=(SOFTMAX, CODA), corpus=OWN, scale="smoke", **about):
    """Rows of values that are known by hand; nothing is trained."""
    setting = make_setting(tmp_path, scale, rows=KnownRows(function), **about)
    return Variants("item", corpus.at(setting), some, STEPS, NAMES)


def test_a_seed_that_failed_is_left_out_of_both_sides_of_a_contrast_and_said(tmp_path):
    known = {("softmax", 0): 5.0, ("softmax", 1): 7.0, ("coda", 1): 4.0}

    def values(run):
        if (place := (run.trained.model.attention, run.seed)) not in known:
            raise ValueError("it blew up")
        return {"x": known[place]}

    found = known_variants(tmp_path, values, seeds=(0, 1))
    level = found.make_level(CODA, "c", lambda values: values["x"], note="first")
    assert (level.values, level.note) == ((4.0,), "first; 1 of 2 seeds have no value: it blew up")
    signs = (lambda values: values["x"], lambda values: -values["x"])
    gap = found.make_contrast(SOFTMAX, CODA, "c", signs, note="first")
    assert (gap.values, gap.note) == ((11.0,), "first; 1 of 2 seeds have no value: it blew up")


def test_a_value_that_is_infinite_is_none(tmp_path):
    found = known_variants(tmp_path, lambda run: {"x": 4.0 if run.seed else float("inf")}, seeds=(0, 1))
    level = found.make_level(CODA, "c", lambda values: values["x"])
    assert (level.values, level.note) == ((4.0,), "1 of 2 seeds have no value: it is infinite or not a number")
    none = found.make_level(CODA, "c", lambda values: values["x"] * float("inf"))
    assert none.not_run == "it is infinite or not a number"


def test_published_numbers_are_compared_with_ours_only_where_they_are_comparable(tmp_path):
    """On other data, and on a model that was cut down, the sign alone."""
    about = {"function": lambda run: {"seed": run.seed}, "seeds": (0, 1, 2)}
    seed = lambda values: float(values["seed"])  # noqa: E731
    here = known_variants(tmp_path, **about)
    assert here.make_level(CODA, "c", seed, 2.0).published is None
    stand_in = here.make_contrast(CODA, SOFTMAX, "c", (lambda values: 1.0 + values["seed"], seed), 0.5)
    assert (stand_in.published, stand_in.sign, stand_in.values) == (None, 1, (1.0, 1.0, 1.0))
    assert stand_in.note == "+0.50 in the paper"
    assert stand_in.verdict == "same direction"
    official = known_variants(tmp_path, **about, corpus=PAPER, scale="full")
    not_run = official.make_contrast(CODA, SOFTMAX, "c", seed, -0.5)
    assert (not_run.published, not_run.sign, not_run.verdict) == (-0.5, -1, "not run")
    asked = known_variants(tmp_path, **about, corpus=PAPER, scale="full", options={"data": "paper"})
    assert asked.make_contrast(CODA, SOFTMAX, "c", (lambda values: 1.0, lambda values: 1.5), -0.5) == Cell(
        item="item",
        row="Their pairs: Coda − Softmax",
        column="c",
        published=-0.5,
        sign=-1,
        values=(-0.5,) * 3,
        number="",
    )


def test_attention_leaves_rows_out_by_name(tmp_path):
    about = {"function": lambda run: {"steps": 3}, "seeds": (0, 1, 2)}
    some = known_variants(tmp_path, **about, options={"attention": "coda"})
    assert {run.trained.model.attention for run in some.setting.rows.asked} == {"coda"}
    assert some.make_level(SOFTMAX, "c", steps).not_run == "excluded by attention=coda"
    assert some.make_contrast(CODA, SOFTMAX, "c", steps).not_run == "excluded by attention=coda"
    assert len(some.make_level(CODA, "c", steps).values) == 3
    with pytest.raises(ValueError, match="cado"):
        known_variants(tmp_path, **about, options={"attention": "cado"})


def test_a_row_that_the_ledger_lacks_says_which_option_runs_it(tmp_path):
    drawn = make_setting(tmp_path, "full", (0, 1, 2), running=False)
    found = Variants("item", PAPER.at(drawn), (SOFTMAX,), STEPS, NAMES)
    assert found.make_level(SOFTMAX, "c", steps, 2.0).not_run == "a day: data=paper runs it"
