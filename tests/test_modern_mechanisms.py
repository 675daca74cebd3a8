"""Mechanisms that read more than q, k and v, against definitions written out in numpy, one entry at a time."""

import math

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

from attnlab.mechanisms import attention
from attnlab.mechanisms.law_trial import make_trial

HEADS, SIZE, LENGTH = 3, 6, 7


def make(name, heads=HEADS, **options):
    """A trial in float64, with perturbed parameters: keys are those of the queries' own tokens."""
    return make_trial(lambda layer: attention(name, heads=heads, head_dim=SIZE, layer=layer, **options))


def as_numpy(module):
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


def assert_weights(trial, expected, **options):
    np.testing.assert_allclose(trial.weights(causal=True, **options).detach().numpy(), expected, atol=1e-12)


def dot(q, k, b, h, i):
    """The logits of one query on the keys that it sees, (i+1,)."""
    return (k[b, h, : i + 1] @ q[b, h, i]).numpy() / math.sqrt(SIZE)


def test_differential_v2_subtracts_its_second_query():
    trial = make("differential-v2")
    w, expected = as_numpy(trial.mechanism)["subtraction.weight"], np.zeros((2, HEADS, LENGTH, LENGTH))
    queries = trial.q.view(2, HEADS, 2, LENGTH, SIZE)
    for b, h, i in np.ndindex(2, HEADS, LENGTH):
        first, second = (softmax(dot(queries[:, :, part], trial.k, b, h, i)) for part in (0, 1))
        expected[b, h, i, : i + 1] = first - expit(trial.x[b, i].numpy() @ w[h]) * second
    assert_weights(trial, expected)


def test_value_gated_weighs_each_key_by_its_gate():
    trial = make("value-gated")
    w, expected = as_numpy(trial.mechanism)["gate.weight"], np.zeros((2, HEADS, LENGTH, LENGTH))
    for b, h, i in np.ndindex(2, HEADS, LENGTH):
        gates = expit(trial.y[b, : i + 1].numpy() @ w[h])
        expected[b, h, i, : i + 1] = softmax(dot(trial.q, trial.k, b, h, i)) * gates
    assert_weights(trial, expected)


@pytest.mark.parametrize("on", ["all", "values"])
def test_knocking_heads_projects_queries_keys_and_values(on):
    trial = make("knocking-heads", on=on)
    shared = as_numpy(trial.mechanism)
    assert len(shared) == (3 if on == "all" else 1)
    q, k, v = (x.numpy() for x in (trial.q, trial.k, trial.v))
    q, k = q @ shared.get("shared_query", np.eye(SIZE)), k @ shared.get("shared_key", np.eye(SIZE))
    weights = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(SIZE), -1)
    np.testing.assert_allclose(trial.output().detach(), weights @ (v @ shared["shared_value"]), atol=1e-12)


def test_knocking_heads_starts_as_softmax():
    trial = make("softmax")
    started = attention("knocking-heads", heads=HEADS, head_dim=SIZE).double()
    torch.testing.assert_close(started(trial.q, trial.k, trial.v)[0], trial.output())


def test_xsa_removes_the_part_along_the_own_value():
    trial = make("xsa")
    trial.v[0, 0, 3] = 0.0
    context, output = trial.context(causal=True).numpy(), trial.output(causal=True).numpy()
    for b, h, i in np.ndindex(2, HEADS, LENGTH):
        y, v = context[b, h, i], trial.v[b, h, i].numpy()
        along = (y @ v) / (v @ v) * v if (b, h, i) != (0, 0, 3) else 0.0
        np.testing.assert_allclose(output[b, h, i], y - along, atol=1e-12)


def test_xsa_has_finite_gradients_at_a_value_of_zero():
    xsa = attention("xsa", heads=1, head_dim=2)
    q, k = torch.randn(2, 1, 1, 3, 2)
    v = torch.tensor([[0.0, 0.0], [1e-30, 0.0], [3.0, 4.0]]).view(1, 1, 3, 2).requires_grad_()
    xsa(q, k, v, causal=True)[0].square().sum().backward()
    assert v.grad.isfinite().all()
    with pytest.raises(ValueError, match="self-attention"):
        xsa(q, k[:, :, :2], v[:, :, :2])
