"""A number that is not finite stays visible: NaN is never taken for a hidden key, which would give its row weight 0."""

import pytest
import torch

from attnlab.mechanisms import MECHANISMS, attention


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "uniform"])
def test_a_bias_that_is_not_a_number_does_not_hide_its_key(name, impl):
    torch.manual_seed(0)
    mechanism = attention(name, heads=2, head_dim=4, impl=impl).eval()
    q, k, v = (torch.randn(1, h, 5, 4) for h in (mechanism.query_heads, 2, 2))
    x, bias = torch.randn(1, 5, 8), torch.zeros(1, 1, 5, 5)
    bias[0, 0, 3, 1] = torch.nan
    sides = mechanism.query_side(x), mechanism.key_side(x)
    context, _ = mechanism(q, k, v, causal=True, bias=bias, sides=sides)
    assert context[0, :, 3].isnan().all()
    assert context[0, :, :3].isfinite().all()


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_a_query_that_is_not_a_number_has_no_weights(name):
    q, k = torch.randn(2, 1, 2, 5, 4)
    q[0, :, 3] = torch.nan
    weights, _ = attention(name, heads=2, head_dim=4).weights(q, k, causal=True)
    assert weights[0, :, 3, :4].isnan().all()
    assert (weights[0, :, 3, 4] == 0).all()
    assert weights[0, :, :3].isfinite().all()


@pytest.mark.parametrize("name", ["sigmoid", "cog", "softpick", "coda", "coda-cs", "nap", "non"])
def test_kernels_do_not_hide_it_either(name):
    torch.manual_seed(0)
    mechanism = attention(name, heads=2, head_dim=16, impl="fused").eval()
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    bias = torch.zeros(1, 1, 5, 5)
    bias[0, 0, 3, 1] = torch.nan
    context, _ = mechanism(q, k, v, causal=True, bias=bias)
    assert context[0, :, 3].isnan().all()
    assert context[0, :, :3].isfinite().all()


@pytest.mark.parametrize(("q", "k", "v"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_types_that_differ_are_refused_in_one_line(q, k, v):
    types = [torch.bfloat16 if half else torch.float32 for half in (q, k, v)]
    given = [torch.randn(1, 2, 5, 4, dtype=kind) for kind in types]
    for name in ("softmax", "dagpam", "nap"):
        with pytest.raises(TypeError, match=r"^q, k and v must have one type, got .*: cast them"):
            attention(name, heads=2, head_dim=4)(*given)


def test_autocast_may_mix_types():
    q, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention("softmax", heads=2, head_dim=4)(q, q, v)[0].shape == q.shape
