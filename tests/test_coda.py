"""CODA against an independent transcription of facts-coda §1 in numpy: train and eval, self, causal, cross, padding."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch.utils.checkpoint import checkpoint

from attnlab.mechanisms import attention

BATCH, HEADS, SIZE = 2, 4, 5


def leaky(x):
    return np.where(x > 0, x, 0.2 * x)


def sigma(net, x):
    """The net at each (query, key), over the head axis: x (h,i,j)."""
    linears = [part for part in net if isinstance(part, torch.nn.Linear)]
    y = np.moveaxis(x, 0, -1)
    for number, linear in enumerate(linears):
        y = y @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
        y = leaky(y) if number < len(linears) - 1 else y
    return np.moveaxis(y, -1, 0)


def transcription(layers, queries, keys, seen, draws):
    """The cascade through all layers: S + Z_prev + σ(S + Z_prev), noise after the mask, softmax over what is seen."""
    previous, weights = None, []
    for layer, q, k, draw in zip(layers, queries, keys, draws, strict=True):
        made = np.zeros((*q.shape[:3], k.shape[2]))
        handed = np.full(made.shape, -np.inf)
        for b in range(len(q)):
            visible = np.broadcast_to(seen[b, 0], made.shape[2:])
            z = np.einsum("hid,hjd->hij", q[b] / np.sqrt(SIZE), k[b])
            if previous is not None:
                z = z + np.where(visible, previous[b], 0)
                z = z + sigma(layer.sigma, np.where(visible, z, 0))
            handed[b] = np.where(visible, z + draw[b], -np.inf)
            alive = visible.any(-1)
            made[b][:, alive] = softmax(handed[b][:, alive], axis=-1)
        previous = handed
        weights.append(made)
    return weights


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("shape", ["self", "causal", "cross"])
def test_cascade_equals_the_transcription(shape, training):
    i, j = (3, 7) if shape == "cross" else (7, 7)
    layers = [attention("coda", heads=HEADS, head_dim=SIZE, layer=n).double().train(training) for n in range(3)]
    q = torch.randn(3, BATCH, HEADS, i, SIZE, dtype=torch.float64)
    k = torch.randn(3, BATCH, HEADS, j, SIZE, dtype=torch.float64)
    draws = torch.randn(3, BATCH, HEADS, i, j, dtype=torch.float64) * training
    mask = torch.ones(BATCH, 1, 1, j, dtype=torch.bool)
    mask[1, ..., 5:] = False
    seen = mask & torch.ones(i, j, dtype=torch.bool).tril() if shape == "causal" else mask.expand(-1, -1, i, -1)
    expected = transcription(layers, q.numpy(), k.numpy(), seen.numpy(), draws.numpy())
    carry = None
    for n, layer in enumerate(layers):
        noise = draws[n] if training else None
        weights, carry = layer.weights(q[n], k[n], mask, carry, causal=shape == "causal", noise=noise)
        np.testing.assert_allclose(weights.detach().numpy(), expected[n], atol=1e-12)


@pytest.mark.parametrize("residual", [True, False])
def test_the_paper_variant_is_equation_4(residual):
    layer = attention("coda", heads=HEADS, head_dim=SIZE, layer=1, variant="paper", residual=residual).double().eval()
    q, k = torch.randn(2, 1, HEADS, 7, SIZE, dtype=torch.float64)
    previous = torch.randn(1, HEADS, 7, 7, dtype=torch.float64)
    z = (q @ k.mT / np.sqrt(SIZE) + residual * previous)[0].numpy() + sigma(layer.sigma, previous[0].numpy())
    np.testing.assert_allclose(layer.weights(q, k, None, previous)[0][0].detach(), softmax(z, axis=-1), atol=1e-12)
    assert [tuple(p.shape) for p in layer.sigma.parameters()] == [(16, 4), (16,), (4, 16), (4,)]


@pytest.mark.parametrize(("heads", "parameters"), [(4, 420), (8, 1608), (16, 6288), (32, 24864)])
def test_sigma_has_24_h_squared_plus_9_h_parameters(heads, parameters):
    assert sum(p.numel() for p in attention("coda", heads=heads, head_dim=2).parameters()) == parameters


def test_a_dead_mixer_without_noise_is_realformer():
    coda, realformer = (attention(n, heads=HEADS, head_dim=SIZE, layer=1).double() for n in ("coda", "realformer"))
    for parameter in coda.parameters():
        parameter.data.zero_()
    q, k, v = torch.randn(3, 2, HEADS, 7, SIZE, dtype=torch.float64)
    carry = torch.randn(2, HEADS, 7, 7, dtype=torch.float64)
    for got, expected in zip(coda.eval()(q, k, v, None, carry), realformer(q, k, v, None, carry), strict=True):
        torch.testing.assert_close(got, expected)


def test_coda_cs_with_the_same_noise_is_the_first_layer_of_coda():
    coda, cs = (attention(n, heads=HEADS, head_dim=SIZE).double().train() for n in ("coda", "coda-cs"))
    q, k = torch.randn(2, 2, HEADS, 7, SIZE, dtype=torch.float64)
    torch.testing.assert_close(coda.weights(q, k, noise=5)[0], cs.weights(q, k, noise=5)[0])


@pytest.mark.parametrize("name", ["coda", "coda-cs"])
def test_noise_is_fresh_at_every_step_in_training_and_absent_at_evaluation(name):
    mechanism = attention(name, heads=HEADS, head_dim=SIZE)
    q, k = torch.randn(2, 2, HEADS, 7, SIZE)
    first, second = (mechanism.train().weights(q, k)[0] for _ in range(2))
    assert not torch.allclose(first, second)
    torch.testing.assert_close(mechanism.eval().weights(q, k)[0], (q @ k.mT / SIZE**0.5).softmax(-1))


@pytest.mark.parametrize("name", ["coda", "coda-cs"])
def test_checkpointed_training_redraws_the_same_noise(name):
    mechanism = attention(name, heads=HEADS, head_dim=SIZE).train()
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        q = torch.linspace(-1, 1, HEADS * 7 * SIZE).view(1, HEADS, 7, SIZE).requires_grad_()
        arguments = (q, q, q)
        context, _ = checkpoint(mechanism, *arguments, use_reentrant=False) if checkpointed else mechanism(*arguments)
        context.square().sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)
