"""The alignment items of kobayashi2020: their arithmetic by hand, their text, and a run at smoke scale."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from inline_scheduler import InlineScheduler
from item_runs import KnownRows, make_setting, run_item

from attnlab.aligning.choice import Candidate
from attnlab.aligning.ibm1_aligner import WordModel
from attnlab.config import compute_digest
from attnlab.experiments.verdicts import list_numbers
from attnlab.studies.kobayashi2020 import STUDY, paper_recipe
from attnlab.studies.kobayashi2020.ibm1_baseline import ELSEWHERE, ibm1
from attnlab.studies.kobayashi2020.measures import GoldCounts, measure_run
from attnlab.studies.kobayashi2020.paper_recipe import (
    alignment_by_paper_recipe,
    compute_bleu,
    make_paper_recipe,
    measure_at_best_bleu,
)
from attnlab.studies.kobayashi2020.plan import MORE_EUROPARL, load_europarl, load_lexicon, read_training_pairs
from attnlab.studies.kobayashi2020.word_alignment import (
    PUBLISHED,
    PUBLISHED_LAYERS,
    alignment,
    make_recipe,
    measure_chance,
    mechanisms,
)
from attnlab.tasks.translation import Translation
from attnlab.training.runs import open_run, start_run


def counts(*right):
    """Of each pair one link of one sure link, right or wrong: AER is the share of wrong ones."""
    return np.array([[1, 1, ok, ok] for ok in right])


def made(errors, norms):
    """A model of 2 layers and 2 heads with the same maps for every method and setting."""
    every = {
        Candidate(by, way, *place): errors[place]
        for by in ("weight", "norm")
        for way in ("awo", "awi")
        for place in errors
    }
    return GoldCounts(2, 2, every, norms, 0.0)


ERRORS = {
    (0, "mean"): counts(1, 1, 0, 0), (1, "mean"): counts(1, 0, 0, 0), (0, 0): counts(1, 1, 1, 0),
    (0, 1): counts(0, 0, 0, 0), (1, 0): counts(1, 0, 0, 0), (1, 1): counts(1, 1, 0, 0),
}  # fmt: skip
NORMS = {(0, "mean"): 2.0, (1, "mean"): 3.0, (0, 0): 1.0, (0, 1): 4.0, (1, 0): 3.0, (1, 1): 2.0}


def test_what_is_kept_of_a_run_says_the_same():
    model = made(ERRORS, NORMS)
    again = GoldCounts.from_json(json.loads(json.dumps(model.to_json())))
    assert again.norms == NORMS
    assert all(again.make_rows(way) == model.make_rows(way) for way in ("awo", "awi"))


def test_the_rows_of_the_table_by_hand():
    rows = made(ERRORS, NORMS).make_rows("awo")
    assert rows["norm, layer mean"] == pytest.approx((50 + 75) / 2)
    assert rows["weight, best layer"] == 50
    assert rows["norm, best head"] == 25
    assert rows["norm, layer of the highest norm"] == 75
    assert rows["norm, head of the highest norm"] == 100
    # AER 25 100 75 50 against norms 1 4 3 2: the same order, and points on a line
    assert rows["heads: Spearman's ρ of AER and norm"] == pytest.approx(1.0)
    assert rows["heads: Pearson's r of AER and norm"] == pytest.approx(1.0)


def test_two_fold_choice_scores_each_half_by_the_choice_of_the_other():
    """Layer 0 is right in one half of the pairs, layer 1 in the other: each is chosen where it does not help."""
    half = np.random.default_rng(0).permutation(10) % 2
    errors = {(0, "mean"): counts(*(half == 0)), (1, "mean"): counts(*(half == 1))}
    model = made(errors | {place: counts(*half) for place in NORMS if place[1] != "mean"}, NORMS)
    assert min(model.list_layer_errors("norm", "awi")) == 50
    assert model.choose_two_fold("norm", "awi") == 100


def test_the_published_means_are_those_of_the_published_layers():
    """Layer mean and best layer follow from the figure: the two sources agree to their rounding."""
    for (by, way), layers in PUBLISHED_LAYERS.items():
        assert np.mean(layers) == pytest.approx(PUBLISHED[f"{by}, layer mean", way], abs=0.11)
        assert min(layers) == pytest.approx(PUBLISHED[f"{by}, best layer", way], abs=0.75)


@pytest.fixture
def data(tmp_path):
    """A Europarl and a gold set of a few lines, in the layout of ATTNLAB_DATA."""
    folder = tmp_path / "data"
    pairs = {
        "train": [("Das ist ein Haus.", "That is a house."), ("Vielen Dank.", "Thanks."), ("Ja.", "Thank you .")],
        "valid": [("Vielen Dank.", "Thank you.")],
        "test": [("Nein.", "No.")],
    }
    for part, lines in pairs.items():
        for side, language in enumerate(("de", "en")):
            path = folder / "europarl" / f"en-de.{part}.{language}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line[side]}\n" for line in lines))
    gold = folder / "gold-alignments" / "de-en"
    gold.mkdir(parents=True)
    for name, text in (("de", "vielen dank .\n"), ("en", "thank you .\n"), ("talp", "1-2 2p1 3-3\n")):
        (gold / f"de-en.{name}").write_text(text)
    return folder


def test_pairs_with_a_side_in_the_gold_set_are_removed(data, tmp_path):
    corpus = load_europarl(make_setting(tmp_path, data_dir=str(data)).place)
    assert read_training_pairs(corpus) == ([["das", "ist", "ein", "haus", "."]], [["that", "is", "a", "house", "."]])
    assert "1 training pairs after removing 2" in corpus.remark
    assert corpus.source == [["vielen", "dank", "."]]
    assert corpus.gold.sure == [{(0, 1), (2, 2)}]
    assert corpus.gold.possible == [{(0, 1), (2, 2), (1, 0)}]
    valid = tmp_path / "work" / "europarl-de-en" / "valid.de"
    assert valid.read_text() == "vielen dank .\n"  # only training text is cleared


def test_the_full_run_is_the_papers_model_on_separate_subwords(data, tmp_path):
    full = make_setting(tmp_path, "full", data_dir=str(data))
    made = make_recipe("coda", 3, full)
    assert (made.model.layers, made.model.heads, made.model.width, made.model.feed_forward) == (6, 4, 512, 1024)
    assert (made.model.attention, made.training.seed) == ("coda", 3)
    training = made.training
    assert (training.steps, training.batch_tokens, training.accumulate) == (5000, 16_384, 1)
    assert (training.lr, training.warmup, training.schedule, training.label_smoothing) == (7e-4, 2000, "cosine", 0.1)
    assert (made.data.vocabulary, made.data.joint, made.data.subwords) == (10_000, False, "bpe")
    assert Translation.config_type is type(made.data)


def test_the_papers_recipe_is_the_authors(data, tmp_path):
    full = make_setting(tmp_path, "full", data_dir=str(data))
    made, plain = make_paper_recipe("softmax", 3, full), make_recipe("softmax", 3, full)
    assert (made.model.dropout, made.model.activation_dropout, made.model.attention_dropout) == (0.1, 0.0, 0.0)
    training = made.training
    assert (training.lr, training.schedule, training.warmup) == (1e-3, "inverse-sqrt", 4000)
    assert (training.optimiser, training.weight_decay, training.label_smoothing) == ("adam", 0.0, 0.1)
    assert (training.steps, training.batch_tokens, training.evaluate_at[-1]) == (10_000, 16_384, 10_000)
    files = {key: value.replace("europarl-de-en", "europarl-480k-de-en") for key, value in asdict(plain.data).items()
             if key.startswith(("src", "tgt", "valid_", "test_"))}  # fmt: skip
    assert made.data == replace(plain.data, **files)


def test_the_papers_recipe_trains_on_three_times_the_pairs(data, tmp_path):
    for language, line in (("de", "Guten Tag."), ("en", "Good day.")):
        (data / "europarl" / f"en-de.more.{language}").write_text(f"{line}\n")
    place = make_setting(tmp_path, "full", data_dir=str(data)).place
    corpus = load_europarl(place, MORE_EUROPARL)
    assert read_training_pairs(corpus)[1] == [["that", "is", "a", "house", "."], ["good", "day", "."]]
    assert "2 training pairs after removing 2" in corpus.remark
    assert corpus.data == make_paper_recipe("softmax", 0, make_setting(tmp_path, "full")).data


@pytest.mark.parametrize("run", [alignment, mechanisms, ibm1, alignment_by_paper_recipe])
def test_without_the_data_nothing_is_run_and_it_is_said_why(run, tmp_path):
    (tmp_path / "nothing").mkdir()
    cells = list(run_item(run, tmp_path, scale="full", data_dir=str(tmp_path / "nothing")).cells)
    assert cells
    assert all("does not exist" in cell.not_run for cell in cells if cell.row not in ELSEWHERE)


def test_a_trained_model_aligns_far_better_than_chance_and_is_not_trained_twice(tmp_path):
    """Chance is about 80 %."""
    found = run_item(alignment, tmp_path)
    values = {(cell.row, cell.column): cell.values for cell in found.cells}
    assert values["a random source word", "AER"][0] > 70
    assert values["norm, best layer", "AWO"][0] < 40
    assert values["weight, best layer", "AWO"][0] < 40
    assert values["norm, layer mean", "AWI"][0] == pytest.approx(
        (values["norm, layer 1", "AWI"][0] + values["norm, layer 2", "AWI"][0]) / 2
    )
    assert all(cell.item == "alignment" for cell in found.cells)
    idle = InlineScheduler()
    again = {(cell.row, cell.column): cell.values for cell in run_item(alignment, tmp_path, idle).cells}
    assert again == values
    assert idle.names == []
    corpus = load_lexicon(5_000)
    (folder,) = (tmp_path / "work" / "runs").iterdir()
    one = measure_run(open_run(folder, device="cpu"), corpus.source, corpus.target, corpus.gold)
    assert one.make_rows("awo")["norm, best layer"] == values["norm, best layer", "AWO"][0]


@pytest.mark.slow  # five seconds or more on an idle core
def test_the_checkpoint_of_the_best_bleu_is_aligned(tmp_path, monkeypatch):
    """The item from nothing; then again with a BLEU that prefers the first checkpoint."""
    busy = InlineScheduler()
    found = run_item(alignment_by_paper_recipe, tmp_path, busy)
    values = {(cell.row, cell.column): cell.values for cell in found.cells}
    assert all(cell.item == "alignment-paper-recipe" for cell in found.cells)
    assert values["norm, best layer", "AWO"][0] < 40
    (row,) = (row for row in make_setting(tmp_path).place.open_ledger().rows() if "best_step" in row.values)
    scores = {each["step"]: each["bleu"] for each in row.values["bleu"]}
    assert list(scores) == [60, 120]
    assert row.values["best_step"] == max(scores, key=scores.get)
    (folder,) = (tmp_path / "work" / "runs").iterdir()
    assert not (folder / "steps").exists()  # they are deleted once the row is written
    idle = InlineScheduler()
    again = run_item(alignment_by_paper_recipe, tmp_path, idle)
    assert {(cell.row, cell.column): cell.values for cell in again.cells} == values
    assert idle.names == []

    corpus, place = load_lexicon(5_000), make_setting(tmp_path / "other").place
    recipe = make_paper_recipe("softmax", 0, make_setting(tmp_path / "other"))
    start_run(recipe, out=str(tmp_path / "run"), device="cpu", report=lambda values: None, note=lambda line: None)
    run = open_run(tmp_path / "run", device="cpu")
    assert compute_bleu(open_run(tmp_path / "run", device="cpu", weights="at:120")) == pytest.approx(scores[120])
    monkeypatch.setattr(paper_recipe, "compute_bleu", lambda run: -int(run.weights.removeprefix("at:")))
    first = measure_at_best_bleu("smoke", run, place)
    assert first["best_step"] == 60
    early = open_run(tmp_path / "run", device="cpu", weights="at:60")
    expected = measure_run(early, corpus.source, corpus.target, corpus.gold)
    assert GoldCounts.from_json(first).make_rows("awi") == expected.make_rows("awi")


def test_the_papers_recipe_adds_cells_and_no_published_numbers(tmp_path):
    """Rows of both recipes are compared with the same numbers, and have keys of their own."""
    full = make_setting(tmp_path, "full", running=False)
    one, two = (list(run(full).cells) for run in (alignment, alignment_by_paper_recipe))
    assert len(one) == len(two)
    assert list_numbers(one) == list_numbers([*one, *two]) != set()
    assert [cell.published for cell in one] == [cell.published for cell in two]
    recipes = [make("softmax", 0, full) for make in (make_recipe, make_paper_recipe)]
    assert compute_digest(recipes[0]) != compute_digest(recipes[1])


def known_setting(folder, attention, *failing):
    """Three seeds of each attention; coda with seed s has layer 1 right in s of 4 pairs, other attention in none."""

    def make_values(run):
        name, seed = run.trained.model.attention, run.seed
        if (name, seed) in failing:
            raise ValueError("it diverged")
        right = [int(name == "coda" and place < seed) for place in range(4)]
        return made(ERRORS | {(1, "mean"): counts(*right)}, NORMS).to_json() | {"remark": "A text."}

    return make_setting(folder, seeds=(2, 3, 4), rows=KnownRows(make_values), options={"attention": attention})


def test_other_attention_is_compared_with_the_first_within_each_seed(tmp_path):
    found = mechanisms(known_setting(tmp_path, "sigmoid,coda"))
    cells = {(cell.row, cell.column): cell for cell in found.cells}
    assert cells["coda: norm, best layer", "AWO"].values == (50, 25, 0)  # layer 0 has 50
    assert cells["coda − sigmoid: norm, layer mean", "AWI"].values == (-25.0, -37.5, -50.0)  # 100 and 50, 25, 0
    assert cells["sigmoid: heads: Spearman's ρ of AER and norm", "AWO"].correlation
    assert not any("softmax" in row or "sigmoid − sigmoid" in row for row, _ in cells)
    assert "Trained on a card, torch 2." in found.remarks
    with pytest.raises(ValueError, match="no attention is called 'cod'"):
        mechanisms(make_setting(tmp_path, options={"attention": "softmax,cod"}))


def test_a_run_that_fails_costs_its_own_values_and_no_others(tmp_path):
    asked = tmp_path, "softmax,coda"
    two = ("coda", 3), ("softmax", 4)
    found = mechanisms(known_setting(*asked, *two))
    cells = {(cell.row, cell.column): cell.values for cell in found.cells}
    assert cells["coda: norm, best layer", "AWO"] == (50, 0)
    assert cells["coda − softmax: norm, layer mean", "AWO"] == (-25.0,)
    assert {"coda, seed 3, has no values: it diverged", "softmax, seed 4, has no values: it diverged"} < set(
        found.remarks
    )
    left = mechanisms(known_setting(*asked, *two, ("coda", 2)))
    none = {cell.row: cell for cell in left.cells}["coda − softmax: norm, layer mean"]
    assert "no seed in common" in none.not_run
    four = *two, ("coda", 2), ("coda", 4)
    left = mechanisms(known_setting(*asked, *four))
    assert {cell.row.split(":")[0] for cell in left.cells} == {"softmax"}
    assert sum("has no values: it diverged" in remark for remark in left.remarks) == 4
    with pytest.raises(ValueError, match=r"it diverged \(6 of 6 runs failed\)"):
        mechanisms(known_setting(*asked, *four, ("softmax", 2), ("softmax", 3)))


def test_attention_whose_output_is_no_sum_is_refused_before_anything_is_trained(tmp_path):
    idle = InlineScheduler()
    with pytest.raises(ValueError, match="attention=nap"):
        run_item(mechanisms, tmp_path, idle, options={"attention": "softmax,nap"})
    assert idle.names == []


def test_ibm1_is_trained_in_four_ways_and_both_directions(tmp_path, monkeypatch):
    asked, train = [], WordModel.train.__func__

    def noted(cls, source, target, **how):
        asked.append((source[0], how))
        return train(cls, source, target, **how)

    monkeypatch.setattr(WordModel, "train", classmethod(noted))
    run_item(ibm1, tmp_path)
    ways = [{"diagonal": diagonal, "prior": prior} for diagonal in (False, True) for prior in (0.0, 0.01)]
    assert [how for _, how in asked] == [how for way in ways for how in (way, way)]
    assert len({tuple(first) for first, _ in asked[::2]} & {tuple(first) for first, _ in asked[1::2]}) == 0
    assert STUDY.items["alignment-ibm1"].edition == 2


@pytest.mark.slow  # five seconds or more on an idle core
def test_ibm1_needs_no_attention(tmp_path):
    values = {(cell.row, cell.column): cell.values for cell in run_item(ibm1, tmp_path).cells if cell.values}
    assert values["IBM Model 1", "source → target"][0] < 12
    chance = measure_chance("smoke", make_setting(tmp_path).place, 0)["aer"]
    assert values["IBM Model 1, diagonal", "intersection"][0] < chance / 3


def test_the_items_are_there():
    assert {"alignment", "alignment-ibm1", "alignment-mechanisms"} <= set(STUDY.items)
