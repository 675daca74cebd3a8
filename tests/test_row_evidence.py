"""Whether rows stand for what they read or predict, decided without gold links: by hand, by models, and by the text."""

import math

import numpy as np
import pytest
from aligned_text import cli, write_pairs

from attnlab.aligning import AlignmentRequest, SelectionGold, align
from attnlab.aligning.choice import Candidate, Reading
from attnlab.aligning.row_evidence import MINIMUM, RowEvidence, WordIds, compare_settings, measure_evidence
from attnlab.analysis.alignment import CorpusAlignment, aer
from attnlab.tasks.links import Gold
from attnlab.tasks.synthetic import Synthetic, SyntheticConfig
from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe

QUICK = {"steps": "150", "batch_examples": "32", "evaluate_every": "150", "compile": "no", "lr": "5e-3", "warmup": "20"}
SMALL = {"data": "lexicon", "examples": "3000", "layers": "2", "width": "32", "heads": "2", "feed_forward": "32"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A Transformer trained as in the tour, for a shorter time."""
    folder, recipe = (
        tmp_path_factory.mktemp("runs") / "tour",
        resolve_recipe("synthetic", QUICK | SMALL | {"dropout": "0"}),
    )
    runs.start_run(recipe, out=str(folder), device="cpu", report=lambda _: None, note=lambda _: None)
    return str(folder)


def link(target, links):
    """Links {(source word, target word)} of each pair as a CorpusAlignment."""
    made = CorpusAlignment.empty([*map(len, target)])
    for number, pair in enumerate(links):
        choice = np.full(len(target[number]), -1)
        for source, place in pair:
            choice[place] = source
        made.set_links(number, choice, np.ones(len(choice)))
    return made


def test_the_evidence_is_the_formula_by_hand():
    source, target = [["a", "b"], ["A", "c"], ["7"]], [["x", "y"], ["x"], ["7", "z"]]
    links = link(target, [{(0, 0), (0, 1)}, {(0, 0)}, {(0, 0)}])
    found = measure_evidence(*WordIds.number_words(source, target), links)
    x, y, seven = 2 / 5, 1 / 5, 1 / 5  # shares among the five target words
    first = math.log((1 + 0.7 * x) / 2 / x) + math.log(0.7 * y / 2 / y)  # a is linked to x once elsewhere
    second = math.log((1 + 0.7 * x) / 3 / x)
    third = math.log((0.7 * seven + 0.3) / 1 / seven)
    np.testing.assert_allclose(found, [first / 2, second, third / 2])


def test_true_links_have_more_evidence_than_links_shifted_by_one():
    task = Synthetic(SyntheticConfig(held_out=200))
    sides = [[line.split() for line in read("test")] for read in (task.read_sources, task.read_references)]
    true = list(task.read_alignments("test"))
    shifted = [{(s, t + 1) for s, t in pair if t + 1 < len(y)} for pair, y in zip(true, sides[1], strict=True)]
    for size in (5, 20, 200):
        source, target = (side[:size] for side in sides)
        right, wrong = link(target, true[:size]), link(target, shifted[:size])
        assert compare_settings(source, target, {"awo": right, "awi": wrong}).choose_setting("awi") == "awo"
        assert compare_settings(source, target, {"awo": wrong, "awi": right}).choose_setting("awo") == "awi"


def test_little_text_leaves_the_usual_setting():
    source, target = [["a"]] * 9, [["x"]] * 9
    one = link(target, [{(0, 0)}] * 9)
    same = compare_settings(source, target, {"awi": one, "awo": one})
    assert (same.choose_setting("awi"), same.choose_setting("awo")) == ("awi", "awo")
    assert "does not tell" in same.explain("awi")
    none = compare_settings(source, target, dict.fromkeys(("awi", "awo"), CorpusAlignment.empty([1] * 9)))
    assert none.pairs == 0
    assert "too small" in none.explain("awo")


def test_only_a_clear_difference_overrides_the_usual_setting():
    noise = RowEvidence({"awi": 0.100, "awo": 0.101}, errors=0.05, pairs=5)
    assert noise.choose_setting("awi") == "awi"
    assert "does not tell" in noise.explain("awi")
    source, target = [["a", "b"]] * 9, [["a", "b"]] * 9
    right, wrong = (link(target, [{(word, 0)}] * 9) for word in (0, 1))
    same_everywhere = compare_settings(source, target, {"awo": right, "awi": wrong})
    assert same_everywhere.choose_setting("awi") == "awo"


def test_a_transformer_is_read_as_the_text_says(run, text):
    folder, source, target, gold = text
    read = {
        s: align(run, (source, target), AlignmentRequest(setting=s, device="cpu")) for s in (None, "auto", "awi", "awo")
    }
    errors = {setting: aer(found.aligned.links(), gold, gold) for setting, found in read.items()}
    assert errors["awo"] < 0.4 < 0.7 < errors["awi"]
    assert errors[None] == errors["auto"] == errors["awo"]
    assert any("setting awo" in note and "nats" in note for note in read[None].notes)
    assert not any("setting" in note for setting in ("awi", "awo") for note in read[setting].notes)
    assert "setting awo" in cli(run, folder / "s", folder / "t").stderr


def test_three_pairs_are_read_by_the_rule(run, text):
    _, source, target, _ = text
    found = align(run, (source[:3], target[:3]), AlignmentRequest(device="cpu"))
    assert MINIMUM > 3
    assert any("too small" in note for note in found.notes)
    assert "read by norm, awi" in found.notes[-1]


def test_gold_links_choose_the_setting_too(run, text):
    _, source, target, gold = text
    request = AlignmentRequest(layer="best-on", selection=SelectionGold(Gold(gold, gold)), device="cpu")
    found = align(run, (source, target), request)
    assert "read by norm, awo" in found.notes[-1]
    assert Candidate("norm", "awi", 0, "mean") in Reading(layer="best-on").candidates(1, 2)
