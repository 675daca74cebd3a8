"""Mechanisms that choose which keys count, and how much, by a rule of their own: each against its equation in loops.

Softpick, stick-breaking, scalable softmax, the learnt sink, the sliding window, ALiBi and cosine attention.
"""

import math

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from small_models import LM, made

from attnlab.mechanisms import attention
from attnlab.mechanisms.law_trial import shake_parameters

HEADS, SIZE, LENGTH = 3, 5, 7
OPTIONS = {
    "softpick": {}, "stick-breaking": {}, "stick-breaking, remainder": {"remainder": True}, "ssmax": {},
    "sink": {"initial": 1.5}, "sliding-window": {"size": 3}, "sliding-window, sinks": {"size": 2, "sinks": 2},
    "alibi": {}, "cosine": {},
}  # fmt: skip


def built(case, **options):
    name = case.partition(",")[0]
    return shake_parameters(attention(name, heads=HEADS, head_dim=SIZE, **OPTIONS.get(case, {}), **options))


def softpick(mechanism, head, s, keys, query):
    return np.maximum(np.exp(s) - 1, 0) / (np.abs(np.exp(s) - 1).sum() + 1e-8)


def stick_breaking(mechanism, head, s, keys, query):
    left, weights = 1.0, np.zeros(len(s))
    for j in reversed(range(len(s))):
        if keys[j] < query:
            weights[j] = left * expit(s[j])
            left *= 1 - expit(s[j])
    return weights + left * (keys == query) * mechanism.remainder


def ssmax(mechanism, head, s, keys, query):
    power = len(s) ** (float(mechanism.s[head].detach()) * s)  # n^(s z), as the paper writes it
    return power / power.sum()


def sink(mechanism, head, s, keys, query):
    return softmax([*s, float(mechanism.sink[head].detach())])[:-1]


def sliding_window(mechanism, head, s, keys, query):
    near = np.array([abs(query - j) < mechanism.size or n < mechanism.sinks for n, j in enumerate(keys)])
    weights = np.zeros(len(s))
    weights[near] = softmax(s[near])
    return weights


def alibi(mechanism, head, s, keys, query):
    return softmax(s - [1 / 16, 1 / 256, 1 / 4][head] * np.abs(query - keys))


def cosine(mechanism, head, s, keys, query):
    return softmax(math.exp(float(mechanism.log_factor[head].detach())) * s)


ROWS = {
    "softpick": softpick, "stick-breaking": stick_breaking, "ssmax": ssmax, "sink": sink,
    "sliding-window": sliding_window, "alibi": alibi, "cosine": cosine,
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_the_equation(case, causal):
    mechanism, name = built(case), case.partition(",")[0]
    q, k = torch.randn(2, 2, HEADS, LENGTH, SIZE, dtype=torch.float64)
    mask = torch.rand(2, 1, LENGTH, LENGTH) < 0.8
    weights = mechanism.weights(q, k, mask, causal=causal)[0].detach().numpy()
    for b, h, i in np.ndindex(2, HEADS, LENGTH):
        keys = np.array([j for j in range(LENGTH) if mask[b, 0, i, j] and (j <= i or not causal)], dtype=int)
        x, y, expected = q[b, h, i].numpy(), k[b, h].numpy()[keys], np.zeros(LENGTH)
        norm = np.linalg.norm(x) * np.linalg.norm(y, axis=1) if name == "cosine" else math.sqrt(SIZE)
        if len(keys):
            expected[keys] = ROWS[name](mechanism, h, y @ x / norm, keys, i)
        np.testing.assert_allclose(weights[b, h, i], expected, atol=1e-7 if name == "alibi" else 1e-12)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("static", [None, 11], ids=["growing", "static"])
def test_cached_decoding_equals_the_full_pass(case, static):
    model = made(LM, case.partition(",")[0], attention_options=OPTIONS[case])
    tokens = torch.randint(1, 23, (2, 7))
    state = model.start(static=static)
    steps = [model.step(chunk, state) for chunk in tokens.split([2, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(tokens), rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_logits_in_half_precision_give_finite_numbers(case, dtype):
    mechanism = built(case).to(dtype)
    q, k, v = (20 * torch.randn(3, 2, HEADS, LENGTH, SIZE)).to(dtype)
    for keys in (k, -q):
        context, _ = mechanism(q, keys, v, causal=True)
        assert context.dtype == dtype
        assert context.isfinite().all()


def weights_of(name, q, k, **options):
    mechanism = attention(name, heads=HEADS, head_dim=SIZE, **options).double()
    return mechanism.weights(q, k, causal=True)[0].detach()


def test_neutral_options_give_softmax():
    q, k = torch.randn(2, 2, HEADS, LENGTH, SIZE, dtype=torch.float64)
    expected = weights_of("softmax", q, k)
    torch.testing.assert_close(weights_of("sink", q, k, initial=-1e4), expected)
    torch.testing.assert_close(weights_of("sliding-window", q, k, size=LENGTH), expected)
    torch.testing.assert_close(weights_of("sliding-window", q, k, size=1, sinks=LENGTH), expected)
    last = weights_of("ssmax", q, k, initial=1 / math.log(LENGTH))[:, :, -1]
    torch.testing.assert_close(last, expected[:, :, -1], rtol=1e-6, atol=1e-6)


def test_a_sink_of_zero_is_softmax_off_by_one():
    q, k = torch.randn(2, 2, HEADS, LENGTH, SIZE, dtype=torch.float64)
    torch.testing.assert_close(weights_of("sink", q, k), weights_of("softmax1", q, k))


def test_the_sink_is_that_of_gpt_oss():
    modelling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    mechanism = built("sink")
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, SIZE, dtype=torch.float64)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 1, mechanism.sink.detach().flatten()
    hidden = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)
    expected, _ = modelling.eager_attention_forward(module, q, k, v, hidden, mechanism.scale)
    torch.testing.assert_close(mechanism(q, k, v, causal=True)[0].detach(), expected.transpose(1, 2))


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 16, 20])
def test_the_slopes_of_alibi_are_those_of_bloom(heads):
    modelling = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    slopes = attention("alibi", heads=heads, head_dim=4).slopes.flatten()
    expected = modelling.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slopes, expected)


def test_softpick_of_negative_logits_is_nothing_and_still_has_gradients():
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([-1e4, -2.0, 3.0], dtype=torch.float64).view(1, 1, 3, 1)
    pick = attention("softpick", heads=1, head_dim=1)
    assert pick.weights(q, k[:, :, :2])[0].abs().max() == 0
    weights, _ = pick.weights(q, k)
    assert weights.flatten().tolist() == pytest.approx([0, 0, (math.e**3 - 1) / (math.e**3 - 1 + 1 + 1 - math.e**-2)])
    weights.sum().backward()
    assert q.grad.abs().item() > 0


def test_padding_does_not_sharpen_scalable_softmax():
    mechanism = built("ssmax")
    q, k = torch.randn(2, 1, HEADS, LENGTH, SIZE, dtype=torch.float64)
    mask = torch.arange(LENGTH) < 4
    padded = mechanism.weights(q, k, mask)[0][..., :4]
    torch.testing.assert_close(padded, mechanism.weights(q, k[:, :, :4])[0])


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("sliding-window", {"size": 0}, "size"), ("sliding-window", {"size": 2.5}, "size"),
        ("sliding-window", {"sinks": -1}, "sinks"), ("softpick", {"eps": 0.0}, "eps"),
        ("ssmax", {"initial": -1.0}, "initial"), ("sink", {"initial": math.inf}, "initial"),
        ("cosine", {"initial": 101.0}, "initial"), ("stick-breaking", {"remainder": "yes"}, "remainder"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(name, options, word):
    with pytest.raises(ValueError, match=word):
        attention(name, heads=2, head_dim=4, **options)
