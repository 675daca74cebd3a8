"""Agreement, Kendall's τ, baselines and ξ: each equals a slow transcription of its equation, and scipy."""

import math

import pytest
import torch
from properties import given, settings, st
from scipy.stats import kendalltau

from attnlab.analysis import agreement as room
from attnlab.analysis.agreement import (
    agreement,
    contextualise_agreement,
    kendall,
    random_baseline,
    shuffle_rows,
    shuffled_baseline,
)


def slow_agreement(u, v, top=0.05):
    """Eq. 10, position by position, with ⌈top·L⌉ as the authors' code has it."""
    best = max(range(len(u)), key=lambda j: (u[j], -j))
    return sum(v[j] > v[best] for j in range(len(v))) < math.ceil(top * len(u))


def ragged(rows=13, longest=47, values=None):
    """Padded rows of lengths 1 … longest with NaN in their padding, in two leading axes."""
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, longest + 1, (rows, 3), generator=draw)
    mask = torch.arange(longest) < lengths[..., None]
    u, v = (
        torch.randint(values, (rows, 3, longest), generator=draw).float()
        if values
        else torch.randn(rows, 3, longest, generator=draw)
        for _ in range(2)
    )
    return u.masked_fill(~mask, torch.nan), v.masked_fill(~mask, torch.nan), mask


def row_by_row(function, u, v, mask):
    return [
        function(a[m].tolist(), b[m].tolist()) for a, b, m in zip(*(x.flatten(0, 1) for x in (u, v, mask)), strict=True)
    ]


@pytest.mark.parametrize("values", [None, 5], ids=["distinct", "with ties"])
@pytest.mark.parametrize("top", [0.05, 0.1, 0.31])
def test_agreement_is_equation_10(values, top):
    u, v, mask = ragged(values=values)
    slow = row_by_row(lambda a, b: slow_agreement(a, b, top), u, v, mask)
    assert agreement(u, v, top, mask).flatten().tolist() == slow
    assert 0 < sum(slow) < len(slow)


def test_agreement_by_hand():
    u = torch.tensor([0.1, 0.7, 0.2])
    assert agreement(u, torch.tensor([1.0, 2.0, 0.0]))  # the best of u is the best of v
    assert not agreement(u, torch.tensor([3.0, 2.0, 0.0]))  # one is above it, and ⌈0.05·3⌉ = 1
    assert agreement(u, torch.tensor([3.0, 2.0, 0.0]), top=0.5)  # one above, fewer than 1.5
    assert agreement(u, torch.zeros(3))  # ties agree
    assert not agreement(torch.tensor([5.0, 5.0]), torch.tensor([0.0, 1.0]))  # the first maximum chooses
    assert agreement(torch.tensor([5.0, 5.0]), torch.tensor([1.0, 0.0]))


def test_the_count_is_strictly_below_the_share():
    """Of 20 positions 5 % is one: rank 1 agrees, rank 2 does not. Of 21 it is 1.05: rank 2 agrees."""
    for length, agreeing in ((20, 1), (21, 2), (40, 2), (41, 3), (60, 3)):
        v = torch.arange(length).float()
        ranks = [bool(agreement(torch.eye(length)[length - 1 - k], v)) for k in range(5)]
        assert ranks == [True] * agreeing + [False] * (5 - agreeing), length


def test_the_share_is_exact_where_floats_are_not():
    """0.07 · 100 is 7.000000000000001 in floats; the eighth place is not among the first 7 %."""
    v = torch.arange(100).float()
    assert agreement(torch.eye(100)[93], v, top=0.07)
    assert not agreement(torch.eye(100)[92], v, top=0.07)


def test_padding_has_no_influence():
    u, v, mask = ragged()
    loud = [x.nan_to_num(1e30) for x in (u, v)]
    assert torch.equal(agreement(u, v, mask=mask), agreement(*loud, mask=mask))
    tau = kendall(u, v, mask)
    torch.testing.assert_close(tau, kendall(*loud, mask), equal_nan=True)
    assert torch.equal(tau.isnan(), mask.sum(-1) < 2)


def test_a_row_without_positions():
    u, v, mask = torch.randn(2, 3), torch.randn(2, 3), torch.tensor([[True] * 3, [False] * 3])
    assert not agreement(u, v, mask=mask)[1]
    assert kendall(u, v, mask)[1].isnan()


def test_shapes_broadcast():
    u, v = torch.randn(5, 1, 11), torch.randn(7, 11)
    assert agreement(u, v).shape == kendall(u, v).shape == (5, 7)
    assert agreement(u, v)[3, 4] == agreement(u[3, 0], v[4])
    assert torch.equal(agreement(u * 100, (v * 100).long()), agreement(u, (v * 100).long()))


@pytest.mark.parametrize("values", [None, 3], ids=["distinct", "with ties"])
@pytest.mark.filterwarnings("ignore:One or more sample arguments is too small")
def test_kendall_is_scipys(values):
    u, v, mask = ragged(values=values)
    theirs = row_by_row(lambda a, b: kendalltau(a, b).statistic, u, v, mask)
    ours = kendall(u, v, mask)
    torch.testing.assert_close(ours.flatten(), torch.tensor(theirs, dtype=torch.float64), equal_nan=True)
    assert ours.dtype == torch.float64


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-1, 1)), min_size=2, max_size=17))
@settings(max_examples=50, deadline=None)
def test_kendall_is_symmetric_and_follows_only_the_order(pairs):
    u, v = torch.tensor(pairs, dtype=torch.float64).T
    torch.testing.assert_close(kendall(u, v), kendall(v, u), equal_nan=True)
    torch.testing.assert_close(kendall(u, v), -kendall(u.exp(), -v), equal_nan=True)
    assert kendall(u, u).isnan() or kendall(u, u) == 1.0


def test_kendall_in_small_pieces_is_the_same(monkeypatch):
    u, v, mask = ragged(values=5)
    whole = kendall(u, v, mask)
    for budget in (1, 47 * 5, 47 * 47 * 2 + 1):
        monkeypatch.setattr(room, "PAIRS_AT_ONCE", budget)
        torch.testing.assert_close(kendall(u, v, mask), whole, rtol=0, atol=0, equal_nan=True)


def test_infinite_scores_are_ordered_too():
    u, v = torch.tensor([-math.inf, -math.inf, 0.0]), torch.tensor([0.0, 1.0, 2.0])
    assert kendall(u, v) == pytest.approx(2 / math.sqrt(6))
    assert agreement(u, v)
    assert agreement(torch.full((3,), -math.inf), torch.tensor([2.0, 1.0, 0.0]))


def test_the_random_baseline_is_the_mean_chance_of_a_place():
    """⌈.05·L⌉/L of 1, 20, 21 and 41 positions: 1, 1/20, 2/21, 3/41."""
    assert random_baseline([1, 20, 21, 41]) == pytest.approx((1 + 1 / 20 + 2 / 21 + 3 / 41) / 4)
    assert random_baseline(torch.tensor([100]), top=0.07) == pytest.approx(0.07)


def test_shuffling_comes_to_the_random_baseline():
    u, v, mask = ragged(rows=31)
    expected = float(random_baseline(mask.sum(-1)))
    found = float(shuffled_baseline(u, v, mask=mask, seed=1, repeats=400))
    error = math.sqrt(expected * (1 - expected) / (31 * 3 * 400))
    assert abs(found - expected) < 4 * error
    assert shuffled_baseline(u, v, mask=mask, seed=1) == shuffled_baseline(u, v, mask=mask, seed=1)


def test_shuffling_moves_only_what_a_row_holds():
    _, v, mask = ragged()
    moved = shuffle_rows(v, mask, seed=3)
    assert torch.equal(moved.isnan(), ~mask)
    sort = lambda x: x.nan_to_num(1e9).sort(-1).values  # noqa: E731
    assert torch.equal(sort(moved), sort(v))
    assert not torch.equal(moved.nan_to_num(), v.nan_to_num())
    many = torch.stack([shuffle_rows(torch.arange(3), seed=k) for k in range(3000)])
    shares = torch.stack([(many == k).double().mean(0) for k in range(3)])
    assert (shares - 1 / 3).abs().max() < 0.04  # every value in every place alike


def test_the_contextualised_agreement_is_the_first_performance_above():
    curve, performance = [0.1, 0.3, 0.3, 0.5, 0.2], [10.0, 20.0, 30.0, 40.0, 50.0]
    assert contextualise_agreement(curve, performance, 0.05) == 10.0
    assert contextualise_agreement(curve, performance, 0.1) == 20.0  # strictly above
    assert contextualise_agreement(torch.tensor(curve), torch.tensor(performance), 0.4) == 40.0
    assert contextualise_agreement(curve, performance, 0.5) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: agreement(torch.zeros(3), torch.zeros(5)), "broadcast"),
        (lambda: agreement(torch.zeros(3), torch.zeros(1)), "same number"),
        (lambda: agreement(torch.zeros(2, 0), torch.zeros(2, 0)), "at least 1"),
        (lambda: agreement(torch.tensor(1.0), torch.zeros(3)), "scalar"),
        (lambda: agreement(torch.zeros(3), torch.zeros(3), top=0.0), "top must"),
        (lambda: agreement(torch.tensor([torch.nan]), torch.zeros(1)), "u is NaN"),
        (lambda: kendall(torch.zeros(1), torch.tensor([torch.nan])), "v is NaN"),
        (lambda: random_baseline([]), "non-empty"),
        (lambda: random_baseline([3, 0]), "at least 1"),
        (lambda: shuffled_baseline(torch.zeros(3), torch.zeros(3), repeats=0), "repeats"),
        (lambda: shuffled_baseline(torch.zeros(3), torch.zeros(3), mask=torch.zeros(3) > 0), "hides every position"),
        (lambda: contextualise_agreement([1.0], [1.0, 2.0], 0.5), r"\(1,\) and \(2,\)"),
        (lambda: contextualise_agreement([math.nan], [1.0], 0.5), "NaN"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(TypeError, match="bool"):
        agreement(torch.zeros(3), torch.zeros(3), mask=torch.ones(3))
