"""Rates by hand, links from maps by a slow transcription, and files of links."""

import itertools

import numpy as np
import pytest
import torch
from properties import given, st

from attnlab.analysis.alignment import (
    NOWHERE,
    CorpusAlignment,
    aer,
    assign_rows,
    choose_words,
    precision,
    recall,
    score,
    word_maps,
)
from attnlab.tasks.links import format_links, read_gold

LINKS = st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=9)
CORPUS = st.lists(st.tuples(LINKS, LINKS, LINKS), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("links", "sure", "possible", "rates"),
    [
        # |A| = 3, |S| = 2, |A∩S| = 1, |A∩P| = 2: 1 − (1 + 2)/(3 + 2), 2/3, 1/2
        ({(0, 0), (1, 1), (2, 2)}, {(0, 0), (3, 3)}, {(0, 0), (3, 3), (1, 1)}, (2 / 5, 2 / 3, 1 / 2)),
        # what is sure is possible, also where it is not said again
        ({(0, 0), (1, 1)}, {(0, 0)}, {(1, 1)}, (0.0, 1.0, 1.0)),
        ({(0, 1)}, {(1, 0)}, {(1, 0)}, (1.0, 0.0, 0.0)),
        # only possible links and nothing sure: 1 − (0 + 1)/(2 + 0)
        ({(0, 0), (5, 5)}, {(4, 4)}, {(0, 0)}, (1 - 1 / 3, 1 / 2, 0.0)),
        # a corpus counts all pairs together: |A| = 3, |S| = 3, |A∩S| = 2, |A∩P| = 2
        ([{(0, 0)}, {(0, 0), (1, 2)}], [{(0, 0)}, {(0, 0), (1, 1)}], [set(), set()], (1 - 4 / 6, 2 / 3, 2 / 3)),
        ([[], [(0, 0)]], [[(2, 1)], [(0, 0)]], [[], []], (1 - 2 / 3, 1.0, 1 / 2)),
        ([(0, 0), (1, 1)], [(0, 0)], [(0, 0)], (1 - 2 / 3, 1 / 2, 1.0)),  # one pair, as lists
    ],
)
def test_rates_by_hand(links, sure, possible, rates):
    assert (aer(links, sure, possible), precision(links, sure, possible), recall(links, sure, possible)) == (
        pytest.approx(rates)
    )


@given(CORPUS)
def test_without_possible_links_aer_is_one_minus_f1(corpus):
    links, sure, _ = (list(side) for side in zip(*corpus, strict=True))
    proposed, right = sum(map(len, links)), sum(map(len, sure))
    found = sum(len(a & s) for a, s in zip(links, sure, strict=True))
    if proposed and right:
        p, r = found / proposed, found / right
        f1 = 2 * p * r / (p + r) if found else 0.0
        assert aer(links, sure, sure) == pytest.approx(1 - f1)


@given(CORPUS)
def test_rates_are_shares_and_more_possible_links_never_hurt(corpus):
    links, sure, possible = (list(side) for side in zip(*corpus, strict=True))
    if any(links) or any(sure):
        assert 0 <= aer(links, sure, possible) <= aer(links, sure, sure) <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: aer(set(), set(), set()), "aer is undefined"),
        (lambda: precision(set(), {(0, 0)}, set()), "precision is undefined"),
        (lambda: recall({(0, 0)}, set(), {(0, 0)}), "recall is undefined"),
        (lambda: aer([{(0, 0)}, {(0, 0)}], [{(0, 0)}], [{(0, 0)}]), "2, 1 and 1 sets"),
        (lambda: aer([{(0, 0)}, {(0, 0, 1)}], [set()] * 2, [set()] * 2), "pair 1"),
        (lambda: aer({("a", "b")}, set(), set()), "two integers"),
        (lambda: score([{(0, 0)}], [{(0, 0)}], [set()], bootstrap=-1), "bootstrap must .* got -1"),
    ],
)
def test_what_cannot_be_scored_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_bootstrap_is_over_sentence_pairs():
    """Two kinds of pairs, right and wrong: AER is 1 − k/n, k binomial; its 95 % points by the normal approximation."""
    n = 400
    right = np.random.default_rng(1).random(n) < 0.7
    links = [{(0, 0)} if ok else {(1, 1)} for ok in right]
    made = score(links, [{(0, 0)}] * n, [set()] * n, bootstrap=4000)
    share = right.mean()
    margin = 1.96 * np.sqrt(share * (1 - share) / n)
    assert made.aer == pytest.approx(1 - share)
    assert made.intervals["aer"] == pytest.approx((1 - share - margin, 1 - share + margin), abs=0.006)
    assert made.intervals["precision"] == pytest.approx((share - margin, share + margin), abs=0.006)
    assert made == score(links, [{(0, 0)}] * n, [set()] * n, bootstrap=4000)
    assert score(links, [{(0, 0)}] * n, [set()] * n, bootstrap=0).intervals == {}
    assert f"AER {100 * (1 - share):.2f} [" in str(made)


def test_a_corpus_without_sure_links_has_no_recall():
    made = score([{(0, 0)}, set()], [set(), set()], [{(0, 0)}, set()], bootstrap=50)
    assert made.precision == 1.0
    assert np.isnan(made.recall)
    assert "recall" not in made.intervals
    assert "recall nan" in str(made)


def slow_word_map(x, rows, keys):
    """mean over the rows of I of Σ over the pieces of J, by loops."""
    count_rows, count_keys = max(rows) + 1, max(keys) + 1
    made = torch.full((count_rows, count_keys), -torch.inf, dtype=x.dtype)
    for target, source in itertools.product(range(count_rows), range(count_keys)):
        mine = [i for i, row in enumerate(rows) if row == target]
        theirs = [j for j, key in enumerate(keys) if key == source]
        if theirs:
            total = sum(float(x[i, j]) for i in mine for j in theirs)
            made[target, source] = total / len(mine) if mine else 0.0
    return made


def test_word_maps_are_those_of_loops():
    """Two examples of different lengths; a target word without a row, a source word without a piece."""
    maps = torch.randn(2, 7, 5, dtype=torch.float64)
    rows = [[0, 0, 1, 3, 3, 3, NOWHERE], [0, 1, 2, 3, NOWHERE, NOWHERE, NOWHERE]]
    keys = [[0, 0, 2, 3, 4], [1, 0, 3, NOWHERE, NOWHERE]]
    made = word_maps(maps, torch.tensor(rows), torch.tensor(keys))
    assert made.shape == (2, 4, 5)
    for k in range(2):
        slow = slow_word_map(maps[k], rows[k], keys[k])
        torch.testing.assert_close(made[k, :, : slow.shape[1]], slow)
        assert (made[k, :, slow.shape[1] :] == -torch.inf).all()


def test_no_link_where_a_special_token_is_best_and_negative_weights_count():
    """Columns: words 0, 1 and 2 (which has no piece), then </s> as 3. Rows by hand."""
    maps = torch.tensor([[[0.2, 0.5, 0.3], [-0.1, -0.4, -0.2], [0.1, 0.2, 0.7]]])
    keys, rows = torch.tensor([[0, 1, 3]]), torch.tensor([[0, 1, 2]])
    best, value = choose_words(maps, rows, keys, words=3)
    assert best.tolist() == [[1, 0, NOWHERE]]
    assert value[0, :2].tolist() == pytest.approx([0.5, -0.1])


def test_rows_are_of_what_is_predicted_or_of_what_is_read():
    """The decoder reads <s> a a b and predicts a a b </s>."""
    labels = torch.tensor([[0, 0, 1, NOWHERE]])
    assert assign_rows(labels, "awo").tolist() == [[0, 0, 1, NOWHERE]]
    assert assign_rows(labels, "awi").tolist() == [[NOWHERE, 0, 0, 1]]
    with pytest.raises(ValueError, match=r"awo .* or awi"):
        assign_rows(labels, "input")


def test_aligned_keeps_pairs_apart():
    made = CorpusAlignment.empty([2, 0, 3])
    made.set_links(2, np.array([4, NOWHERE, 1, 9]), np.array([0.5, 0.6, 0.7, 0.8]))  # the last is padding
    made.set_links(0, np.array([3]), np.array([0.25]))  # nothing is known of the second word
    assert made.links() == [{(3, 0)}, set(), {(4, 0), (1, 2)}]
    assert made.scores()[2] == pytest.approx({(4, 0): 0.5, (1, 2): 0.7})
    assert len(made) == 3


FILES = {
    "a.talp": "1-1 2p2\n\n3-1\n",
    "a.txt": "0-0 1p1\n\n2-0\n",
    "a.wa": "0001 1 1 S\n1 2 2 P 0.7\n\n3 3 1\n2 0 1 S\n",
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_says_the_same(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    gold = read_gold(tmp_path / name, [(3, 2), (1, 1), (3, 2)])
    assert gold.sure == [{(0, 0)}, frozenset(), {(2, 0)}]
    assert gold.possible == [{(0, 0), (1, 1)}, frozenset(), {(2, 0)}]


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.talp", "0-1\n", {}, r"a.talp:1: source word 0.*--gold-base 0"),
        ("a.txt", "0-2\n", {}, r"a.txt:1: target word 2.*--gold-base 1"),
        ("a.txt", "", {}, "a.txt: the file is empty"),
        ("a.txt", "0-0\n0-0\n", {}, "2 lines for 1 sentence pairs"),
        ("a.txt", "0-0 1~1\n", {}, "a.txt:1: '1~1' must be a link"),
        ("a.naacl", "1 1\n", {}, "a.naacl:1: a line must be"),
        ("a.naacl", "1 1 1 X\n", {}, "S .sure. or P .possible., got 'X'"),
        ("a.naacl", "7 1 1\n", {}, "sentence must be from 1 to 1"),
        ("a.txt", "0-0\n", {"form": "giza"}, "unknown alignment format 'giza'"),
        ("a.txt", "0-0\n", {"base": 2}, "must be 0 or 1, got 2"),
    ],
)
def test_a_bad_file_is_named_with_its_line(name, text, options, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_gold(tmp_path / name, [(2, 2)], **options)


def test_the_base_can_be_said(tmp_path):
    (tmp_path / "a.txt").write_text("1-2\n")
    assert read_gold(tmp_path / "a.txt", [(2, 2)], base=1).sure == [{(0, 1)}]
    (tmp_path / "a.naacl").write_text("1 0 1\n")
    assert read_gold(tmp_path / "a.naacl", [(2, 2)], base=0).sure == [{(0, 1)}]


@given(LINKS)
def test_what_is_written_is_read_back(tmp_path_factory, links):
    path = tmp_path_factory.mktemp("links") / "a.txt"
    path.write_text(format_links(links) + "\n")
    assert read_gold(path, [(5, 7)]).sure == [links]
    path.write_text(format_links(dict.fromkeys(links, 0.12345678), scores=True) + "\n")
    assert read_gold(path, [(5, 7)]).sure == [links]
