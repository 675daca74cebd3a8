"""Dropout on a CPU: it drops what torch's drops, independently, and its gradient is its mask."""

import pytest
import torch
from torch import nn

from attnlab.models.dropout import Dropout

RATES = [0.1, 0.3, 0.5, 0.937]


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("drop", [nn.Dropout, Dropout], ids=["torch", "ours"])
def test_drops_at_its_rate_and_keeps_the_mean(drop, rate):
    torch.manual_seed(3)
    y = drop(rate)(ones(101, 103, 37))
    dropped, deviation = (y == 0).double().mean(), (rate * (1 - rate) / y.numel()) ** 0.5
    assert abs(dropped - rate) < 4 * deviation
    assert abs(y.double().mean() - 1) < 4 * deviation / (1 - rate)
    torch.testing.assert_close(y[y != 0].unique(), torch.tensor([1 / (1 - rate)]), rtol=2e-4, atol=0)


@pytest.mark.parametrize("distance", range(1, 9))
def test_entries_are_independent(distance):
    """Of neighbours, of entries of one word, and of the two halves of what the generator gives."""
    torch.manual_seed(5)
    kept = (Dropout(0.3)(ones(400_009)) != 0).double() - 0.7
    correlation = (kept[distance:] * kept[:-distance]).mean() / (0.3 * 0.7)
    assert abs(correlation) < 4 / len(kept) ** 0.5


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1009])
def test_every_entry_of_any_size_is_dropped_now_and_then(size):
    torch.manual_seed(7)
    drop = Dropout(0.5)
    kept = torch.stack([drop(ones(size)) != 0 for _ in range(64)])
    assert kept.any(0).all()
    assert (~kept).any(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_is_the_mask(dtype):
    torch.manual_seed(11)
    x = torch.randn(13, 17, 19, dtype=dtype).transpose(0, 2).requires_grad_()
    y = Dropout(0.3)(x)
    (mask,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert torch.equal(x * mask, y)
    assert set(mask.unique().tolist()) == {0.0, mask.max().item()}


def test_a_seed_gives_a_mask_and_the_next_call_another():
    drop = Dropout(0.3)
    torch.manual_seed(13)
    first, second = drop(ones(1009)), drop(ones(1009))
    torch.manual_seed(13)
    assert torch.equal(first, drop(ones(1009)))
    assert not torch.equal(first, second)


def test_nothing_is_dropped_in_evaluation_or_at_rate_zero_and_all_at_one():
    x = torch.randn(5, 7)
    assert torch.equal(Dropout(0.3).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros(5, 7))
    assert Dropout(0.3)(torch.empty(0, 5)).shape == (0, 5)
