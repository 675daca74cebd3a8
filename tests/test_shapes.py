"""Any shape, grouped heads, fewer queries than keys: mix equals weights times values, and rows stand alone."""

import pytest
import torch
from properties import given, settings, st

from attnlab.mechanisms import MECHANISMS, attention


@pytest.mark.parametrize("name", MECHANISMS)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31), b=st.integers(1, 3), groups=st.integers(1, 3), each=st.integers(1, 3),
    i=st.integers(1, 9), more=st.integers(0, 5), half=st.integers(1, 5), causal=st.booleans(), masked=st.booleans(),
)  # fmt: skip
def test_any_shape(name, seed, b, groups, each, i, more, half, causal, masked):
    torch.manual_seed(seed)
    h, j, d = groups * each, i + more, 2 * half
    mechanism = attention(name, heads=h, head_dim=d, layer=1).double().eval()
    q = torch.randn(b, h, i, d, dtype=torch.float64)
    k, v = torch.randn(2, b, groups, j, d, dtype=torch.float64)
    carry = torch.randn(b, mechanism.carry_heads, i, j, dtype=torch.float64) if mechanism.carries else None
    mask = torch.rand(b, 1, i, j) < 0.6 if masked else None
    weights, _ = mechanism.weights(q, k, mask, carry, causal=causal)
    context, _ = mechanism.mix(q, k, v, mask, carry, causal=causal)
    assert weights.shape == (b, h, i, j)
    torch.testing.assert_close(context, weights @ v.repeat_interleave(each, 1))
    at = torch.arange(j - i, j)
    row = slice(i // 2, i // 2 + 1)
    own = None if carry is None else carry[:, :, row]
    seen = None if mask is None else mask[:, :, row]
    alone, _ = mechanism(q[:, :, row], k, v, seen, own, causal=causal, at=at[row])
    torch.testing.assert_close(alone, mechanism(q, k, v, mask, carry, causal=causal)[0][:, :, row])


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
