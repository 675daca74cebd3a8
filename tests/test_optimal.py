"""The optimal attention: hand-computed minima, scipy's, and the certificate that comes with each."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from attnlab.analysis import optimal as room
from attnlab.analysis.optimal import TOLERANCE, Optimum, optimal_attention


def loss(alpha, gamma, target, bias=0.0):
    """−log softmax(Σ_l α_l γ_l + γ_s)_y, as eq. 27 writes it, of one problem."""
    return -torch.log_softmax(alpha @ gamma.double() + bias, -1)[target]


def problems(*batch, length=7, words=11, scale=3.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    gamma = scale * torch.randn(*batch, length, words, generator=draw, dtype=torch.float64)
    return gamma, torch.randint(words, batch, generator=draw), torch.randn(*batch, words, generator=draw)


def test_the_papers_counterexample():
    """Eq. 30: β is largest at the first position, which gets nothing."""
    gamma = torch.tensor([[0.0, 0.0, 0.0], [0.0, -10.0, 5.0], [0.0, 5.0, -10.0]])
    assert gamma.softmax(-1)[:, 0].argmax() == 0
    weights, gap = optimal_attention(gamma, torch.tensor(0))
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64), rtol=0, atol=1e-7)
    assert weights[0] == 0.0
    assert 0.0 <= gap <= TOLERANCE


def test_an_uneven_minimum_by_hand():
    """z = (0, −1 + 2α, −α): the slope 2e^{z₁} − e^{z₂} is 0 where −α − (−1 + 2α) = ln 2."""
    gamma = torch.tensor([[0.0, 1.0, -1.0], [0.0, -1.0, 0.0]], dtype=torch.float64)
    alpha = (1 - math.log(2)) / 3
    weights, _ = optimal_attention(gamma, torch.tensor(0))
    torch.testing.assert_close(weights, torch.tensor([alpha, 1 - alpha], dtype=torch.float64), rtol=0, atol=1e-5)


def test_of_two_words_the_best_position_takes_all():
    """With two words the loss rises with one difference of logits, so the minimum is where β is largest."""
    gamma, target, _ = problems(23, words=2)
    weights, _ = optimal_attention(gamma, target)
    beta = gamma.softmax(-1).gather(-1, target[:, None, None].expand(23, 7, 1))[..., 0]
    assert torch.equal(weights.argmax(-1), beta.argmax(-1))
    assert weights.amax(-1).min() > 0.99


@pytest.mark.parametrize("scale", [0.3, 3.0, 20.0])
def test_scipy_finds_no_better(scale):
    gamma, target, bias = problems(5, scale=scale)
    weights, gap = optimal_attention(gamma, target, bias)
    for g, y, b, ours, bound in zip(gamma, target, bias, weights, gap, strict=True):
        sums_to_1 = {"type": "eq", "fun": lambda a: a.sum() - 1.0}
        theirs = minimize(
            lambda a, g=g, y=y, b=b: float(loss(torch.from_numpy(a), g, y, b)),
            np.full(7, 1 / 7),
            method="SLSQP",
            bounds=[(0.0, 1.0)] * 7,
            constraints=[sums_to_1],
            options={"ftol": 1e-14, "maxiter": 1000},
        )
        assert float(loss(ours, g, y, b)) == pytest.approx(theirs.fun, abs=1e-6)
        assert float(loss(ours, g, y, b)) - float(bound) <= theirs.fun + 1e-9


@pytest.mark.parametrize(
    ("length", "words", "scale"),
    [(1, 5, 1.0), (2, 2, 10.0), (61, 3, 10.0), (17, 101, 100.0), (17, 101, 1e4), (31, 13, 1e-3), (5, 7, 0.0)],
)
def test_every_size_and_scale_is_solved(length, words, scale):
    gamma, target, bias = problems(41, length=length, words=words, scale=scale)
    weights, gap = optimal_attention(gamma, target, bias)
    assert gap.max() <= TOLERANCE
    assert weights.min() >= 0.0
    torch.testing.assert_close(weights.sum(-1), torch.ones(41, dtype=torch.float64))


def test_the_gap_is_what_it_says():
    """max_l ⟨∇f(α), α − e_l⟩ by autograd; and no weights anywhere are better by more than that."""
    gamma, target, bias = (x[0] for x in problems(1))
    weights, gap = optimal_attention(gamma, target, bias)
    at = weights.clone().requires_grad_()
    slope = torch.autograd.grad(loss(at, gamma, target, bias), at)[0]
    torch.testing.assert_close(gap, (slope @ weights) - slope.min(), rtol=1e-3, atol=1e-12)
    others = torch.distributions.Dirichlet(torch.full((7,), 0.3, dtype=torch.float64)).sample((500,))
    least = min(float(loss(alpha, gamma, target, bias)) for alpha in others)
    assert float(loss(weights, gamma, target, bias)) <= least + float(gap)


def test_masked_positions_have_no_influence():
    gamma, target, bias = problems(13)
    lengths = torch.randint(1, 8, (13,), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) < lengths[:, None]
    weights, _ = optimal_attention(gamma.masked_fill(~mask[..., None], math.nan), target, bias, mask)
    assert not weights[~mask].any()
    for k, length in enumerate(lengths.tolist()):
        alone, _ = optimal_attention(gamma[k, :length], target[k], bias[k])
        torch.testing.assert_close(weights[k, :length], alone, rtol=0, atol=1e-9)


def test_what_changes_no_probability_changes_no_weight():
    gamma, target, bias = problems(13)
    weights, _ = optimal_attention(gamma, target, bias)
    order = torch.randperm(7)
    for same, expected in (
        (optimal_attention(gamma + torch.randn(13, 7, 1), target, bias), weights),
        (optimal_attention(gamma + bias[:, None], target), weights),
        (optimal_attention(gamma[:, order], target, bias), weights[:, order]),
    ):
        torch.testing.assert_close(same.weights, expected, rtol=0, atol=1e-4)


def test_one_sentence_serves_all_its_targets(monkeypatch):
    gamma, _, _ = problems(3)
    target, bias = torch.randint(11, (3, 5)), torch.randn(3, 5, 11)
    weights, gap = optimal_attention(gamma[:, None], target, bias)
    assert weights.shape == (3, 5, 7)
    assert gap.shape == (3, 5)
    alone, _ = optimal_attention(gamma[2], target[2, 4], bias[2, 4])
    torch.testing.assert_close(weights[2, 4], alone, rtol=0, atol=1e-9)
    monkeypatch.setattr(room, "MAX_LOGITS", 7 * 11 * 2)  # two problems at a time
    torch.testing.assert_close(optimal_attention(gamma[:, None], target, bias).weights, weights, rtol=0, atol=1e-9)


def test_nothing_to_solve():
    empty = optimal_attention(torch.zeros(0, 3, 5), torch.zeros(0, dtype=torch.long))
    assert isinstance(empty, Optimum)
    assert empty.weights.shape == (0, 3)


def test_a_minimum_that_is_not_reached_is_no_result(monkeypatch):
    gamma, target, _ = problems(13)
    monkeypatch.setattr(room, "MAX_STEPS", 2)
    with pytest.raises(ArithmeticError, match=r"of 13 gaps .* 2 steps"):
        optimal_attention(gamma, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": torch.zeros(3)}, "gamma must"),
        ({"gamma": torch.zeros(3, 0)}, "at least 1 of each"),
        ({"target": torch.tensor(5)}, "target must be between 0 and 4"),
        ({"target": torch.tensor(-1)}, "target must be between 0 and 4"),
        ({"bias": torch.zeros(3)}, r"bias must be \(…, 5\)"),
        ({"mask": torch.ones(3)}, "mask must be bool"),
        ({"mask": torch.tensor([False] * 3)}, "at least one True"),
        ({"gamma": torch.full((3, 5), math.inf)}, "not finite"),
        ({"gamma": torch.zeros(2, 3, 5), "target": torch.zeros(7, dtype=torch.long)}, "broadcast"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        optimal_attention(**{"gamma": torch.zeros(3, 5), "target": torch.tensor(0)} | change)


def test_a_target_of_numbers_is_refused():
    with pytest.raises(TypeError, match="indices"):
        optimal_attention(torch.zeros(3, 5), torch.tensor(0.0))
