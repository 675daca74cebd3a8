"""Sums over visible keys: the linear form of NON, by chunks, equals its definition, and keeps no pair."""

import pytest
import torch

from attnlab.mechanisms import attention, visible_sums
from attnlab.mechanisms.laws import LAWS, judge_law


@pytest.mark.parametrize("law", LAWS)
def test_laws_hold_of_the_linear_form(law, monkeypatch):
    """With chunks of two keys, so that seven keys are several."""
    monkeypatch.setattr(visible_sums, "CHUNK", 2)
    finding = judge_law(law, lambda layer: attention("non", heads=3, head_dim=6, layer=layer))
    assert finding.holds is not False, finding


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_long_rows_equal_the_definition(dtype, tolerance, causal):
    """Grouped heads, padding, fewer queries than keys; in bf16 it is nearer to float64 than the definition is."""
    q, k, v = torch.randn(2, 6, 150, 16), torch.randn(2, 3, 171, 16) + 3, torch.randn(2, 3, 171, 16)
    mask = torch.arange(171) >= torch.tensor([[[[40]]], [[[0]]]])
    inputs, direction = [x.to(dtype).requires_grad_() for x in (q, k, v)], torch.randn(2, 6, 150, 16)
    results = {}
    for impl, kind in (("auto", dtype), ("reference", dtype), ("exact", torch.float64)):
        mechanism = attention("non", heads=6, head_dim=16, impl="reference" if impl == "exact" else impl)
        context, _ = mechanism(*(x.to(kind) for x in inputs), mask, causal=causal)
        results[impl] = [context.detach(), *torch.autograd.grad(context, inputs, direction.to(kind))]
    for mine, theirs, exact in zip(*results.values(), strict=True):
        error, allowed = (float((x.double() - exact).norm() / exact.norm()) for x in (mine, theirs))
        assert error < tolerance
        assert error <= allowed + 1e-6


def test_no_pairs_are_kept():
    q = torch.randn(1, 2, 1024, 8, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        attention("non", heads=2, head_dim=8)(q, q, q, causal=True)
    assert max(sizes) <= 2 * 1024 * visible_sums.CHUNK
