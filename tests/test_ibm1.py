"""IBM Model 1: the count table and EM equal slow transcriptions of their equations."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.optimize import minimize_scalar

from attnlab.analysis.symmetrise import grow_diag_final_and
from attnlab.counting import cooccurrence
from attnlab.counting.cooccurrence import WordPairs
from attnlab.counting.ibm1 import Ibm1, alpha, beta, count_cooccurrences, fit_ibm1, link_prior, trans


def corpus(seed=0, number=97, types=(13, 11), longest=7):
    """Random pairs, some with an empty side."""
    draw = np.random.default_rng(seed)
    return [tuple(draw.integers(n, size=draw.integers(longest + 1)).tolist() for n in types) for _ in range(number)]


def slow_counts(pairs):
    """Eq. 16, word by word."""
    table = defaultdict(float)
    for x, y in pairs:
        for i in x:
            for o in y:
                table[i, o] += 1.0 / len(x)
    return table


def slow_prior(length, words, null, diagonal, t):
    """δ(·|t) with NULL last, by its definition; t and l from 1."""
    p0 = 1.0 / (length + 1) if null == "uniform" else null
    near = [math.exp(-diagonal * abs(t / words - place / length)) for place in range(1, length + 1)]
    return [(1 - p0) * e / sum(near) for e in near] + [p0]


def slow_links(pairs, theta, null, diagonal):
    """The expected links with dictionaries, and the log-likelihood."""
    links, log_likelihood = defaultdict(float), 0.0
    for x, y in pairs:
        for t, o in enumerate(y, start=1):
            prior = slow_prior(len(x), len(y), null, diagonal, t)
            joint = [p * theta[i, o] if p else 0.0 for i, p in zip([*x, "NULL"], prior, strict=True)]
            log_likelihood += math.log(sum(joint))
            for i, p in zip([*x, "NULL"], joint, strict=True):
                links[i, o] += p / sum(joint)
    return links, log_likelihood


def slow_em(pairs, iterations, null, diagonal):
    """EM with dictionaries; the log-likelihood before each iteration, in nats a target word."""
    pairs = [(x, y) for x, y in pairs if x and y]
    theta, history = defaultdict(lambda: 1.0 / (1 + max(o for _, y in pairs for o in y))), []
    for _ in range(iterations):
        links, log_likelihood = slow_links(pairs, theta, null, diagonal)
        total = defaultdict(float)
        for (i, _), n in links.items():
            total[i] += n
        theta = {(i, o): n / total[i] for (i, o), n in links.items() if total[i]}
        history.append(log_likelihood / sum(len(y) for _, y in pairs))
    return theta, history


def test_the_count_table_by_hand():
    """Figure 1's idea: x = (0 1), y = (0 1) adds 1/2 to four cells; x = (0 2 2), y = (0) adds 1/3 and 2/3."""
    table = count_cooccurrences([([0, 1], [0, 1]), ([0, 2, 2], [0])]).toarray()
    np.testing.assert_allclose(table, [[1 / 2 + 1 / 3, 1 / 2], [1 / 2, 1 / 2], [2 / 3, 0]])


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_count_table_is_that_of_equation_16_however_it_is_cut(chunk, monkeypatch):
    monkeypatch.setattr(cooccurrence.iterate_chunks, "__defaults__", (chunk,))
    pairs = corpus()
    table = count_cooccurrences(iter(pairs))
    assert table.shape == (13, 11)
    assert dict(table.todok()) == pytest.approx(dict(slow_counts(pairs)))
    assert count_cooccurrences(pairs, sizes=(17, 19)).shape == (17, 19)


def test_the_whole_table_counts_the_target_words():
    pairs = corpus(1)
    assert count_cooccurrences(pairs).sum() == pytest.approx(sum(len(y) for x, y in pairs if x))


def test_trans_beta_and_alpha_are_equations_17_to_19():
    pairs = corpus(2)
    table, (x, y) = slow_counts(pairs), ([3, 5, 3, 0], [1, 10, 2])
    translation = trans(count_cooccurrences(pairs))
    assert translation.sum(1) == pytest.approx(np.ones(13))
    row = defaultdict(float)
    for (i, _), n in table.items():
        row[i] += n
    expected = np.array([[table[i, o] / row[i] for i in x] for o in y])
    found = beta(translation, x, y)
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(alpha(found), expected / expected.sum(1, keepdims=True))
    np.testing.assert_allclose(alpha(np.array([[0.0, 0.0, 0.0, 0.0]])), [[0.25] * 4])


@pytest.mark.parametrize(("null", "diagonal"), [("uniform", 0.0), (0.0, 0.0), (0.08, 4.0), (0.3, 1.7)])
def test_em_equals_a_slow_transcription(null, diagonal):
    pairs = corpus(3)
    model = fit_ibm1(pairs, null=null, diagonal=diagonal, iterations=4, tolerance=0.0)
    theta, _ = slow_em(pairs, 4, null, diagonal)
    found = {(i if i < 13 else "NULL", o): p for (i, o), p in model.theta.todok().items()}
    assert found == pytest.approx({key: p for key, p in theta.items() if p}, abs=1e-12)
    _, history = slow_em(pairs, 4, null, diagonal)
    assert model.log_likelihood == pytest.approx(history)


def test_the_first_iteration_without_null_is_trans_of_the_count_table():
    pairs = [(x, y) for x, y in corpus(4) if x and y]
    theta = fit_ibm1(pairs, null=0, iterations=1).theta.toarray()
    np.testing.assert_allclose(theta[:-1], trans(count_cooccurrences(pairs)).toarray(), atol=1e-15)
    assert not theta[-1].any()


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("null", ["uniform", 0.1])
def test_em_never_lowers_the_likelihood_and_rows_sum_to_1(learnt, null):
    model = fit_ibm1(corpus(5), null=null, diagonal=2.0, learn_diagonal=learnt, iterations=30, tolerance=0.0)
    gains = np.diff(model.log_likelihood)
    assert (gains > -1e-12).all()
    assert gains[0] > 0.01
    assert model.theta.sum(1) == pytest.approx(np.ones(14))
    assert (model.diagonal != 2.0) == learnt


def test_it_stops_when_an_iteration_gains_less_than_the_tolerance():
    model = fit_ibm1(corpus(6), tolerance=1e-2)
    gains = np.diff(model.log_likelihood)
    assert model.converged
    assert (gains[:-1] >= 1e-2).all()
    assert gains[-1] < 1e-2
    assert not fit_ibm1(corpus(6), tolerance=0.0, iterations=3).converged


@pytest.mark.parametrize(("length", "words"), [(1, 1), (3, 7), (11, 2)])
@pytest.mark.parametrize(("null", "diagonal"), [("uniform", 0.0), (0.2, 5.0), (0.0, 100.0)])
def test_the_prior_is_a_distribution_that_prefers_the_diagonal(length, words, null, diagonal):
    prior = link_prior(length, words, null, diagonal)
    for t in range(1, words + 1):
        np.testing.assert_allclose(prior[:, t - 1], slow_prior(length, words, null, diagonal, t))
    assert prior.sum(0) == pytest.approx(np.ones(words))


def monotone(seed, number=211, types=23):
    """Each source word i becomes target word i, in order; the diagonal alone explains nothing."""
    draw = np.random.default_rng(seed)
    sources = [draw.choice(types, size=draw.integers(3, 8), replace=False).tolist() for _ in range(number)]
    return [(x, [*x]) for x in sources]


def test_a_dictionary_is_found_and_both_directions_agree():
    pairs = monotone(7)
    forward, backward = fit_ibm1(pairs), fit_ibm1((y, x) for x, y in pairs)
    for x, y in pairs[:20]:
        diagonal = {(k, k) for k in range(len(x))}
        turned = {(s, t) for t, s in backward.links(y, x)}
        assert forward.links(x, y) == turned == grow_diag_final_and(forward.links(x, y), turned) == diagonal


def test_a_steep_diagonal_is_learnt_where_there_is_one():
    """All words are alike, so only places can tell; NULL takes what no place explains."""
    pairs = [([0] * n, [0] * n) for n in (5, 7)]
    flat = fit_ibm1(pairs, null=0.1, diagonal=3.0, learn_diagonal=True, iterations=20, tolerance=0.0)
    steep = fit_ibm1(monotone(8), null=0.1, diagonal=1.0, learn_diagonal=True)
    assert flat.diagonal == pytest.approx(3.0)  # nothing prefers any λ: it stays
    assert steep.diagonal > 20.0


def test_the_learnt_diagonal_makes_the_expected_links_likeliest():
    """λ after two iterations, found again from its definition. The first leaves it: with even θ, p(l|t) = δ(l|t)."""
    pairs = [([0, 1, 0, 2], [0, 2]), ([1, 0, 1, 1], [1, 2]), ([2, 1], [1, 0, 1]), ([1, 2, 2], [3, 2, 1, 0])]
    theta, _ = slow_em(pairs, 1, 0.2, 3.0)

    def lost(slope):
        total = 0.0
        for x, y in pairs:
            for t, o in enumerate(y, start=1):
                before = slow_prior(len(x), len(y), 0.2, 3.0, t)
                joint = [p * theta[i, o] for i, p in zip([*x, "NULL"], before, strict=True)]
                prior = slow_prior(len(x), len(y), 0.2, slope, t)
                total -= sum(q / sum(joint) * math.log(p) for q, p in zip(joint[:-1], prior[:-1], strict=True))
        return total

    model = fit_ibm1(pairs, null=0.2, diagonal=3.0, learn_diagonal=True, iterations=2, tolerance=0.0)
    best = minimize_scalar(lost, bounds=(0.0, 100.0), method="bounded", options={"xatol": 1e-6})
    assert 0.1 < best.x < 99.0
    assert model.diagonal == pytest.approx(best.x, abs=0.01)


def test_a_word_that_is_best_explained_by_null_has_no_link():
    """23 stands in every target, whatever the source."""
    pairs = [(x, [*y, 23]) for x, y in monotone(9)]
    model = fit_ibm1(pairs, iterations=50)
    x, y = pairs[0]
    assert model.posterior(x, y).shape == (len(y), len(x) + 1)
    assert model.posterior(x, y)[-1].argmax() == len(x)
    assert model.links(x, y) == {(k, k) for k in range(len(x))}
    assert model.posterior([], y)[:, 0] == pytest.approx(np.ones(len(y)))  # NULL alone is left


def test_a_model_survives_being_written(tmp_path):
    model = fit_ibm1(corpus(10), null=0.1, diagonal=2.0, learn_diagonal=True, iterations=5)
    model.save(tmp_path / "new" / "m.safetensors")
    again = Ibm1.load(tmp_path / "new" / "m.safetensors")
    assert (again.theta != model.theta).nnz == 0
    for name in ("null", "diagonal", "log_likelihood", "converged"):
        assert getattr(again, name) == getattr(model, name)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m.safetensors"]


def test_what_is_not_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Ibm1.load(tmp_path / "nowhere")
    (tmp_path / "noise").write_bytes(b"\x00\x01 nothing of the kind")
    with pytest.raises(ValueError, match="damaged"):
        Ibm1.load(tmp_path / "noise")
    save_file({"data": torch.zeros(3)}, tmp_path / "other")
    with pytest.raises(ValueError, match="not a fitted"):
        Ibm1.load(tmp_path / "other")


def test_shapes_hold_every_pair_with_words_once():
    pairs = corpus(11)
    seen = {}
    for numbers, x, y in WordPairs.gather(pairs).iterate_shapes(max_cells=30):
        assert len(numbers) == 1 or x.shape[0] * x.shape[1] * y.shape[1] <= 30
        seen |= {n: (a.tolist(), b.tolist()) for n, a, b in zip(numbers.tolist(), x, y, strict=True)}
    assert seen == {n: (x, y) for n, (x, y) in enumerate(pairs) if x and y}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_cooccurrences([([0], [1]), ([0, -2], [1])]), "pair 2.*-2"),
        (lambda: count_cooccurrences([([0], [1]), [0, 1, 2]]), "pair 2"),
        (lambda: count_cooccurrences([([0], ["a"])]), "target is not a sequence"),
        (lambda: count_cooccurrences([([0], [1]), ([0, 1.9], [1])]), "source is not a sequence"),
        (lambda: count_cooccurrences([([5], [1])], sizes=(3, 3)), "sizes"),
        (lambda: beta(trans(count_cooccurrences([([0], [1])])), [1], [0]), "source ids"),
        (lambda: fit_ibm1([([], [1]), ([0], [])]), "both sides"),
        (lambda: fit_ibm1([([0], [1])], null=1.0), "null"),
        (lambda: fit_ibm1([([0], [1])], null="even"), "uniform"),
        (lambda: fit_ibm1([([0], [1])], diagonal=-1.0), "diagonal"),
        (lambda: fit_ibm1([([0], [1])], iterations=0), "iterations"),
        (lambda: fit_ibm1([([0], [1])], tolerance=math.nan), "tolerance"),
        (lambda: fit_ibm1([([0], [1])]).posterior([1], [0]), "source ids"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
