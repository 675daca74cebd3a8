"""coda+dagpam and realformer+dagpam: CODA or RealFormer over positive and negative heads, combined as in daGPAM."""

import pytest
import torch

from attnlab.mechanisms import attention

H, D = 3, 5


def stack(name, layers, **options):
    return [attention(name, heads=H, head_dim=D, layer=n, **options).double().eval() for n in range(layers)]


def through(mechanisms, inputs, mask):
    """Weights of each layer, the carry threaded."""
    carry, found = None, []
    for mechanism, (q, k) in zip(mechanisms, inputs, strict=True):
        weights, carry = mechanism.weights(q, k, mask, carry)
        found.append(weights)
    return found, carry


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    pairs = [tuple(torch.randn(2, H, n, D, dtype=torch.float64) for n in (4, 7)) for _ in range(3)]
    return pairs, torch.rand(2, 1, 4, 7) < 0.7


@pytest.mark.parametrize("name", ["coda+dagpam", "realformer+dagpam"])
def test_it_is_the_base_with_twice_the_heads(name, inputs):
    """Written out: queries one after the other, keys twice, then (1 + λ⁺)P⁺ − λ⁻P⁻."""
    pairs, mask = inputs
    mechanisms = stack(name, 3, initial=(0.3, 0.7), tied=False)
    found, carry = through(mechanisms, pairs, mask)
    base, before = name.split("+")[0], None
    for mechanism, (q, k), weights in zip(mechanisms, pairs, found, strict=True):
        plain = attention(base, heads=2 * H, head_dim=D, layer=mechanism.layer).double().eval()
        plain.load_state_dict({key: x for key, x in mechanism.state_dict().items() if key.startswith("sigma")})
        heads, keys = [], []
        for h in range(H):
            heads += [q[:, h], q[:, h].clamp(min=0) @ mechanism.negative[h]]
            keys += [k[:, h], k[:, h]]
        both, before = plain.weights(torch.stack(heads, 1), torch.stack(keys, 1), mask, before)
        torch.testing.assert_close(weights, 1.3 * both[:, 0::2] - 0.7 * both[:, 1::2])
    torch.testing.assert_close(carry, before)
    assert mechanisms[0].carry_heads == carry.shape[1] == 2 * H


def test_without_a_negative_part_the_signs_of_realformer_do_not_meet(inputs):
    pairs, mask = inputs
    found, _ = through(stack("realformer+dagpam", 3, initial=0.0, fixed=True), pairs, mask)
    expected, _ = through(stack("realformer", 3), pairs, mask)
    torch.testing.assert_close(found, expected)


def test_negative_heads_of_coda_reach_the_positive_ones(inputs):
    """Through σ: with λ = 0 the weights still move with W⁻, from the second layer on."""
    pairs, mask = inputs
    mechanisms = stack("coda+dagpam", 3, initial=0.0, fixed=True)
    before, _ = through(mechanisms, pairs, mask)
    with torch.no_grad():
        mechanisms[0].negative *= -2
    after, _ = through(mechanisms, pairs, mask)
    torch.testing.assert_close(after[0], before[0])
    assert not torch.allclose(after[1], before[1])


def test_the_noise_of_a_seed_is_drawn_at_evaluation_too():
    mechanism = attention("coda+dagpam", heads=H, head_dim=D).eval()
    q = torch.randn(1, H, 4, D)
    mechanism.sample_seed = 7
    noisy = mechanism.weights(q, q)[0]
    torch.testing.assert_close(noisy, mechanism.weights(q, q, noise=7)[0])
    mechanism.sample_seed = None
    assert not torch.allclose(noisy, mechanism.weights(q, q)[0])


@pytest.mark.parametrize("name", ["dagpam", "coda+dagpam", "realformer+dagpam"])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_dropout_falls_on_each_branch(name, impl):
    """With one key of value 1 the context is the dropped weight: 0, 2(1+λ), −2λ, or their sum."""
    mechanism = attention(name, heads=1, head_dim=1, initial=3.0, dropout=0.5, impl=impl).train()
    x = torch.ones(2000, 1, 1, 1)
    assert sorted(mechanism(x, x, x)[0].detach().round(decimals=4).unique().tolist()) == [-6.0, 0.0, 2.0, 8.0]
