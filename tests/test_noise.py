"""The noise: the published Philox, normal, independent, and a pure function of where it falls."""

import numpy as np
import pytest
import torch
from scipy import stats

from attnlab.mechanisms import attention
from attnlab.mechanisms.noise import gaussian, philox, seed_noise

WORDS = 2**32


@pytest.mark.parametrize("seed", [0, 1, 0x0123456789ABCDEF, 2**63 - 1])
def test_words_are_numpy_s_philox_rounds(seed):
    """Random123's known answer for the zero counter and key, and an arbitrary-precision transcription for the rest."""

    def rounds(counter, key):
        c, (k0, k1) = list(counter), key
        for _ in range(10):
            high0, low0 = divmod(0xD2511F53 * c[0], WORDS)
            high1, low1 = divmod(0xCD9E8D57 * c[2], WORDS)
            c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
            k0, k1 = (k0 + 0x9E3779B9) % WORDS, (k1 + 0xBB67AE85) % WORDS
        return c

    assert rounds([0, 0, 0, 0], (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    counters = np.random.default_rng(0).integers(0, WORDS, (4, 101))
    words = philox(torch.tensor(seed), *torch.from_numpy(counters))
    expected = [rounds([int(x) for x in column], (seed % WORDS, seed // WORDS)) for column in counters.T]
    assert torch.stack(words, -1).tolist() == expected


def test_draws_are_standard_normal_and_uncorrelated():
    draw = gaussian(7, 3, 4, 5, torch.arange(61), 97).double()
    assert stats.kstest(draw.flatten(), "norm").pvalue > 1e-3
    assert draw.mean().abs() < 4 / draw.numel() ** 0.5
    for axis in range(4):
        left, right = draw.narrow(axis, 0, draw.shape[axis] - 1), draw.narrow(axis, 1, draw.shape[axis] - 1)
        assert abs(stats.pearsonr(left.flatten(), right.flatten()).statistic) < 4 / left.numel() ** 0.5


def test_a_draw_depends_on_its_place_alone():
    """Not on the length of the row, the number of rows, the batch or the number of heads."""
    large = gaussian(11, 2, 3, 4, torch.arange(13), 17)
    assert torch.equal(gaussian(11, 2, 2, 3, torch.arange(5, 8), 6), large[:2, :3, 5:8, :6])


@pytest.mark.parametrize("other", [{"seed": 12}, {"seed": 11 | 1 << 32}, {"layer": 3}])
def test_another_seed_or_layer_is_another_draw(other):
    base = {"seed": 11, "layer": 2}
    first, second = (
        gaussian(**(base | change), batch=2, heads=3, rows=torch.arange(19), keys=23) for change in ({}, other)
    )
    assert abs(stats.pearsonr(first.flatten(), second.flatten()).statistic) < 4 / first.numel() ** 0.5


def test_a_row_at_a_time_sees_the_noise_of_the_full_pass():
    coda = attention("coda", heads=3, head_dim=5).double().eval()
    q, k = torch.randn(2, 2, 3, 7, 5, dtype=torch.float64)
    full, _ = coda.weights(q, k, causal=True, noise=9)
    for now in range(7):
        row, _ = coda.weights(q[:, :, now : now + 1], k[:, :, : now + 1], causal=True, noise=9)
        torch.testing.assert_close(row, full[:, :, now : now + 1, : now + 1])


def test_sampled_gives_every_mechanism_its_own_draw_and_takes_it_back():
    model = torch.nn.ModuleList(attention("coda-cs", heads=3, head_dim=5).eval() for _ in range(2))
    q, k = torch.randn(2, 2, 3, 7, 5)
    mean = model[0].weights(q, k)[0]
    with seed_noise(model, 4):
        first, again, second = (model[n].weights(q, k)[0] for n in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, second)
    assert torch.equal(model[0].weights(q, k)[0], mean)


def test_a_seed_out_of_range_is_refused():
    with pytest.raises(ValueError, match="noise seed must be"), seed_noise(torch.nn.ModuleList(), -1):
        pass
