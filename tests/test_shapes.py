"""Any shape, grouped heads, fewer queries than keys: mix equals weights times values, and rows stand alone."""

import pytest
import torch
from properties import given, settings, st

from attnlab.mechanisms import MECHANISMS, attention
from attnlab.mechanisms.law_trial import make_trial


@pytest.mark.parametrize("name", MECHANISMS)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31), b=st.integers(1, 3), groups=st.integers(1, 3), each=st.integers(1, 3),
    i=st.integers(1, 9), more=st.integers(0, 5), half=st.integers(1, 5), causal=st.booleans(), masked=st.booleans(),
)  # fmt: skip
def test_any_shape(name, seed, b, groups, each, i, more, half, causal, masked):
    h, j = groups * each, i + more

    def build(layer):
        return attention(name, heads=h, head_dim=2 * half, layer=layer)

    trial = make_trial(build, batch=b, queries=i, keys=j, groups=groups, seed=seed)
    mask = torch.rand(b, 1, i, j) < 0.6 if masked else None
    weights = trial.weights(mask, causal=causal)
    assert weights.shape == (b, h, i, j)
    torch.testing.assert_close(trial.context(mask, causal=causal), weights @ trial.values.repeat_interleave(each, 1))
    rows = slice(max(0, i // 2 - trial.mechanism.lookback), i // 2 + 1)
    seen = None if mask is None else mask[:, :, rows]
    alone = trial.select_queries(rows).output(seen, causal=causal, at=torch.arange(j - i, j)[rows])
    torch.testing.assert_close(alone[:, :, -1], trial.output(mask, causal=causal)[:, :, i // 2])


@pytest.mark.parametrize("name", ["nap", "non", "sigmoid", "softmax", "dagpam"])
def test_long_rows_in_float16(name):
    """Sums over 2,048 keys are made in float32: near the float64 weights, with finite gradients."""
    mechanism = attention(name, heads=1, head_dim=64)
    q, k = torch.randn(1, 1, 1, 64).half().requires_grad_(), torch.randn(1, 1, 2048, 64).half()
    weights = mechanism.half().weights(q, k)[0]
    weights.float().square().sum().backward()
    expected = mechanism.double().weights(q.detach().double(), k.double())[0]
    assert (weights.double() - expected).norm() / expected.norm() < 0.01
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "dagpam", "coda", "nap"])
def test_tensors_without_heads_are_refused_in_one_line(name):
    mechanism = attention(name, heads=2, head_dim=4)
    x = torch.randn(3, 5, 4)
    with pytest.raises(ValueError, match=r"must be \(batch, heads, length, size\), got \(3, 5, 4\), \(3, 5, 4\)"):
        mechanism(x, x, x)
