"""IBM Model 1 with a Dirichlet prior on θ: mean field equals slow transcriptions, and its bound is one."""

import itertools
import json
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import scipy.sparse as sparse
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.special import digamma
from test_ibm1 import corpus, slow_links
from torch.distributions import Dirichlet, kl_divergence

from attnlab.aligning.ibm1_aligner import FAST_ALIGN, WordModel, name_folder
from attnlab.counting.ibm1 import FORMAT, Ibm1, fit_ibm1, maximise_theta, trans


def slow_mean_field(pairs, iterations, null, diagonal, prior):
    """θ and the bound before each iteration, in nats a target word, with dictionaries and torch's own divergence."""
    pairs = [(x, y) for x, y in pairs if x and y]
    together = defaultdict(set)
    for x, y in pairs:
        for i in [*x, "NULL"] if null else x:
            together[i].update(y)
    theta = defaultdict(lambda: 1.0 / (1 + max(o for _, y in pairs for o in y)))
    divergence, history = 0.0, []
    for _ in range(iterations):
        links, log_likelihood = slow_links(pairs, theta, null, diagonal)
        history.append((log_likelihood - divergence) / sum(len(y) for _, y in pairs))
        theta, divergence = {}, 0.0
        for i, types in together.items():
            row = np.array([links[i, o] + prior for o in types])
            theta |= {(i, o): float(np.exp(digamma(g) - digamma(row.sum()))) for o, g in zip(types, row, strict=True)}
            divergence += dirichlet_divergence(row, prior)
    return theta, history


def dirichlet_divergence(row, prior):
    if len(row) == 1:
        return 0.0  # one type: θ is 1 for certain, which torch has no distribution for
    after = torch.from_numpy(row)
    return float(kl_divergence(Dirichlet(after), Dirichlet(torch.full_like(after, prior))))


def log_evidence(pairs, prior):
    """log ∫ p(y|x,θ) p(θ) dθ without NULL and λ = 0: every way to link the words, each in closed form (Pólya)."""
    types = defaultdict(set)
    for x, y in pairs:
        for i in x:
            types[i].update(y)
    words = [(x, o) for x, y in pairs for o in y]
    total = 0.0
    for chosen in itertools.product(*(x for x, _ in words)):
        links = Counter(zip(chosen, (o for _, o in words), strict=True))
        log_p = -sum(math.log(len(x)) for x, _ in words)
        for i in types:
            own = [links[i, o] for o in types[i]]
            log_p += math.lgamma(prior * len(own)) - math.lgamma(prior * len(own) + sum(own))
            log_p += sum(math.lgamma(prior + n) - math.lgamma(prior) for n in own)
        total += math.exp(log_p)
    return math.log(total)


@pytest.mark.parametrize("prior", [0.01, 0.7, 3.0])
@pytest.mark.parametrize(("null", "diagonal"), [("uniform", 0.0), (0.0, 0.0), (0.08, 4.0)])
def test_mean_field_equals_a_slow_transcription(null, diagonal, prior):
    pairs = corpus(3, number=37, types=(31, 29))  # few of the types occur together
    model = fit_ibm1(pairs, null=null, diagonal=diagonal, prior=prior, iterations=4, tolerance=0.0)
    theta, history = slow_mean_field(pairs, 4, null, diagonal, prior)
    found = {(i if i < 31 else "NULL", o): p for (i, o), p in model.theta.todok().items()}
    assert found == pytest.approx(theta, rel=1e-9)
    assert model.log_likelihood == pytest.approx(history)


def test_the_m_step_by_hand():
    """ψ(x + 1) = ψ(x) + 1/x. Row 0: n + a = 2, 3, in all 5; row 1 has no cell; row 2, of one type, is certain."""
    links = sparse.csr_array((np.array([1.0, 2.0, 7.0]), np.array([0, 4, 1]), np.array([0, 2, 2, 3])), shape=(3, 5))
    theta, divergence = maximise_theta(links, 1.0)
    assert theta == pytest.approx([math.exp(-1 / 2 - 1 / 3 - 1 / 4), math.exp(-1 / 3 - 1 / 4), 1.0])
    own = math.log(24 / 1) - math.log(1 * 2) - 1 * (1 / 2 + 1 / 3 + 1 / 4) - 2 * (1 / 3 + 1 / 4)
    assert divergence == pytest.approx(own)


def test_without_a_prior_the_m_step_is_that_of_maximum_likelihood():
    links = sparse.csr_array(np.random.default_rng(0).random((7, 11)))
    theta, divergence = maximise_theta(links, 0.0)
    assert np.array_equal(theta, trans(links).data)
    assert divergence == 0.0


def test_a_prior_is_forgotten_where_there_is_much_to_count():
    links = sparse.csr_array(np.random.default_rng(1).random((7, 11)))
    few, many = (np.abs(maximise_theta(links * n, 0.01)[0] - trans(links).data).max() for n in (1.0, 1e7))
    assert many < 1e-6 < few


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("null", ["uniform", 0.1, 0.0])
@pytest.mark.parametrize("prior", [0.002, 0.01, 1.0])
def test_the_bound_never_falls_and_rows_are_positive_and_sum_to_less_than_1(learnt, null, prior):
    how = {"null": null, "diagonal": 2.0, "learn_diagonal": learnt, "prior": prior}
    model = fit_ibm1(corpus(5), **how, iterations=30, tolerance=0.0)
    gains = np.diff(model.log_likelihood[1:])  # even θ, before the first iteration, has no bound
    assert (gains > -1e-12).all()
    assert gains[0] > 0.01
    assert (model.theta.data > 0).all()
    assert (model.theta.sum(1) < 1.0).all()
    assert (model.diagonal != 2.0) == learnt


@pytest.mark.parametrize("prior", [0.01, 0.5, 2.0])
def test_the_bound_is_below_the_evidence_and_equal_to_it_where_links_are_certain(prior):
    open_pairs = [([0, 1], [0, 1]), ([0, 2], [0, 2]), ([1, 2, 2], [1, 3])]
    certain = [([0], [0, 1, 0]), ([1], [2, 2]), ([0], [2])]
    for pairs, at_most in ((open_pairs, 0.5), (certain, 1e-12)):
        model = fit_ibm1(pairs, null=0, prior=prior, iterations=200, tolerance=0.0)
        bound = model.log_likelihood[-1] * sum(len(y) for _, y in pairs)
        assert -1e-12 < (log_evidence(pairs, prior) - bound) / abs(bound) < at_most


def test_it_stops_by_the_bound_and_not_at_the_first_which_may_lie_below_even_theta():
    model = fit_ibm1(corpus(6), prior=0.01, tolerance=1e-2)
    assert model.log_likelihood[1] < model.log_likelihood[0]
    gains = np.diff(model.log_likelihood[1:])
    assert model.converged
    assert len(gains) > 2
    assert (gains[:-1] >= 1e-2).all()
    assert gains[-1] < 1e-2
    assert not fit_ibm1(corpus(6), prior=0.01, tolerance=0.0, iterations=3).converged


def test_a_rare_word_no_longer_collects_what_others_explain():
    """0 and 1 have five translations each; 2 occurs once, with 0 and 1, and only it explains 10.

    By maximum likelihood 2 shares itself out until all it takes is worth the same: u = v + θ(0|0) = w + θ(5|1), where
    u + v + w = 1, and θ(0|0) is about 1/5: v = w ≈ 0.26 beats it.
    """
    often = [([i], [5 * i + k]) for i in (0, 1) for k in range(5)] * 4
    once = ([0, 1, 2], [0, 5, 10])
    likeliest, bayes = (fit_ibm1([*often, once], null=0, prior=a, tolerance=1e-9, iterations=100) for a in (0.0, 0.01))
    own = likeliest.theta.toarray()
    assert own[2, 10] == pytest.approx(own[2, 0] + own[0, 0], abs=1e-3)
    assert own[2, 0] == pytest.approx(0.26, abs=0.005)
    assert likeliest.links(*once) == {(2, 0), (2, 1), (2, 2)}
    assert bayes.links(*once) == {(0, 0), (1, 1), (2, 2)}
    assert bayes.theta.toarray()[2, 10] > 0.9


def test_the_prior_is_written_and_a_file_from_before_it_is_maximum_likelihood(tmp_path):
    model = fit_ibm1(corpus(10), prior=0.01, iterations=5)
    model.save(tmp_path / "new")
    again = Ibm1.load(tmp_path / "new")
    assert again.prior == 0.01
    assert again.log_likelihood == model.log_likelihood
    with safe_open(tmp_path / "new", "pt") as file:
        parts, about = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[FORMAT])  # noqa: SIM118
    del about["prior"]
    save_file(parts, tmp_path / "old", metadata={FORMAT: json.dumps(about)})
    assert Ibm1.load(tmp_path / "old").prior == 0.0


def test_words_are_modelled_by_likelihood_and_with_the_diagonal_as_fast_align_does():
    text = [["a", "b"], ["a"]], [["x", "y"], ["x"]]
    assert WordModel.train(*text).model.prior == 0.0
    assert WordModel.train(*text, diagonal=True).model.prior == 0.01
    assert WordModel.train(*text, diagonal=True, prior=0.5).model.prior == 0.5


def test_what_is_trained_in_another_way_has_another_folder():
    text = [["a", "b"], ["a"]], [["x", "y"], ["x"]]
    names = {(d, p): name_folder(*text, diagonal=d, prior=p) for d in (False, True) for p in (None, 0, 0.01, 0.5)}
    assert names[False, None] == names[False, 0]
    assert names[True, None] == names[True, 0.01]
    assert len(set(names.values())) == 6


def test_the_diagonal_is_fast_aligns_with_its_own_numbers():
    assert FAST_ALIGN == {"null": 0.08, "diagonal": 4.0, "learn_diagonal": True, "prior": 0.01}
    text = [["a", "b", "c"], ["c", "a"]] * 3, [["x", "y", "z"], ["z", "x"]] * 3
    made, plain = (WordModel.train(*text, diagonal=diagonal).model for diagonal in (True, False))
    assert (made.null, made.prior) == (0.08, 0.01)
    assert made.diagonal not in (0.0, 4.0)  # learnt
    assert (plain.null, plain.diagonal, plain.prior) == ("uniform", 0.0, 0.0)


@pytest.mark.parametrize("prior", [-0.01, 0.0019, math.nan, math.inf, 1e7, "0.01"])
def test_a_prior_that_is_none_is_refused(prior):
    with pytest.raises(ValueError, match="prior"):
        fit_ibm1([([0], [1])], prior=prior)
