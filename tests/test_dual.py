"""Two signs on a cascade: the base with positive and negative heads side by side, put together as daGPAM does."""

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
        plain.load_state_dict(mechanism.inner.state_dict())
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


def test_dropout_and_the_seed_of_noise_are_the_base_s():
    mechanism = attention("coda+dagpam", heads=H, head_dim=D, dropout=0.25)
    assert mechanism.dropout == mechanism.inner.dropout == 0.25
    mechanism.sample_seed = 7
    assert mechanism.inner.sample_seed == 7
    q = torch.randn(1, H, 4, D)
    mechanism.eval()
    noisy = mechanism.weights(q, q)[0]
    torch.testing.assert_close(noisy, mechanism.weights(q, q, noise=7)[0])
    mechanism.sample_seed = None
    assert not torch.allclose(noisy, mechanism.weights(q, q)[0])


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["coda+dagpam", "realformer+dagpam"])
def test_the_base_s_kernels_serve(name):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = {impl: attention(name, heads=2, head_dim=16, layer=1, impl=impl).to(device).eval()
              for impl in ("fused", "reference")}  # fmt: skip
    layers["fused"].load_state_dict(layers["reference"].state_dict())
    q, k, v = (torch.randn(1, 2, n, 16, device=device) for n in (5, 7, 7))
    carry = torch.randn(1, 4, 5, 7, device=device)
    results = [layer(q, k, v, None, carry) for layer in layers.values()]
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
