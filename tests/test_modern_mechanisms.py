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


def erf_gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def test_dcmha_composes_scores_and_weights():
    rank, trial = 2, make("dcmha")
    parameters, expected = as_numpy(trial.mechanism), np.zeros((2, HEADS, LENGTH, LENGTH))

    def compose_at(part, vector, tokens):
        """The matrix that composes heads at one pair, from its query's and its key's input; part 0: S, 1: P."""
        matrix = parameters["base"][part].copy()
        for side, x in zip(("of_query", "of_key"), tokens, strict=True):
            inward, gate = (parameters[f"{side}.{name}.weight"].reshape(2, -1, len(x)) for name in ("inward", "gate"))
            rows = (erf_gelu(inward[part] @ x) @ parameters[f"{side}.outward"][part]).reshape(2, rank, HEADS)
            for u, w in zip(*rows, strict=True):
                matrix += np.outer(u / np.sqrt((u**2).mean() + 1e-6), w)
            matrix += np.diag(np.tanh(gate[part] @ x))
        return vector @ matrix

    for b, i in np.ndindex(2, LENGTH):
        pairs = [(trial.x[b, i].numpy(), trial.y[b, j].numpy()) for j in range(i + 1)]
        scores = np.stack([dot(trial.q, trial.k, b, h, i) for h in range(HEADS)], -1)  # (j,h)
        scores = np.stack([compose_at(0, s, tokens) for s, tokens in zip(scores, pairs, strict=True)])
        weights = softmax(scores, 0)
        expected[b, :, i, : i + 1] = np.stack([compose_at(1, w, t) for w, t in zip(weights, pairs, strict=True)], -1)
    assert_weights(trial, expected)


def test_multi_token_is_a_sum_over_queries_keys_and_heads():
    heads, queries, keys = 4, 3, 5
    trial = make("multi-token", heads, queries=queries, keys=keys, group=2)
    parameters, logits = as_numpy(trial.mechanism), trial.q.numpy() @ trial.k.mT.numpy() / math.sqrt(SIZE)
    weights, expected = np.zeros(logits.shape), np.zeros(logits.shape)
    for b, h, i in np.ndindex(2, heads, LENGTH):
        z = np.zeros(i + 1)
        for j, before, shift in np.ndindex(i + 1, queries, keys):
            row, column = i - before, j + shift - keys // 2
            if 0 <= column <= row:  # visible to the former query
                z[j] += parameters["kernel"][h, 0, queries - 1 - before, shift] * logits[b, h, row, column]
        weights[b, h, i, : i + 1] = softmax(z)
    for h in range(heads):
        first = 2 * (h // 2)
        mixer = parameters["mixer"][h // 2, h % 2]
        expected[:, h] = mixer[0] * weights[:, first] + mixer[1] * weights[:, first + 1]
    assert_weights(trial, expected)
    context = expected @ trial.v.numpy()
    y = context / np.sqrt((context**2).mean(-1, keepdims=True) + 1e-5) * parameters["norm.weight"]
    gate = expit(y @ parameters["gate.weight"].T + parameters["gate.bias"])
    np.testing.assert_allclose(trial.output(causal=True).detach(), y * gate, atol=1e-11)


def test_multi_token_starts_as_softmax():
    trial = make("softmax")
    started = attention("multi-token", heads=HEADS, head_dim=SIZE, norm=False).double()
    torch.testing.assert_close(started(trial.q, trial.k, trial.v, causal=True)[0], trial.output(causal=True))


@pytest.mark.parametrize(
    ("options", "named"), [({"keys": 4}, "odd"), ({"group": 2}, "group"), ({"queries": 0}, "queries")]
)
def test_what_multi_token_refuses(options, named):
    with pytest.raises(ValueError, match=named):
        attention("multi-token", heads=HEADS, head_dim=SIZE, **options)


def test_selective_masks_former_tokens_for_later_ones():
    trial = make("selective")
    expected = np.zeros((2, HEADS, LENGTH, LENGTH))
    for b in range(2):
        total = np.zeros(LENGTH)  # F of the current query
        for i in range(LENGTH):
            for h in range(HEADS):
                expected[b, h, i, : i + 1] = softmax(dot(trial.q, trial.k, b, h, i) - total[: i + 1])
            votes = np.maximum(dot(trial.q, trial.k, b, 0, i), 0)
            total[1:i] += votes[1:i]  # neither the first key nor the token itself
    assert_weights(trial, expected)
    assert np.abs(expected - make("softmax").weights(causal=True).numpy()).max() > 0.1


def test_selective_gives_hidden_tokens_no_vote():
    trial, mask = make("selective"), torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)
    mask[..., [0, 4]] = False
    kept = [1, 2, 3, 5, 6]
    fewer = trial.select_queries(kept).select_keys(kept).output(causal=True)
    torch.testing.assert_close(trial.output(mask, causal=True)[:, :, kept], fewer)
