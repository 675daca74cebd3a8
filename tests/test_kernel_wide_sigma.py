"""σ of CODA where its weights exceed a multiprocessor's memory: by bands of rows, equal to the definition."""

import pytest
import torch
from cascade_cases import Case, shaken
from kernel_cases import DEVICE

from attnlab.mechanisms.coda import apply_head_net

pytest.importorskip("triton")
from attnlab.mechanisms.kernels import coda, wide_sigma
from attnlab.mechanisms.kernels.pairs import read_mask

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]


@pytest.mark.parametrize(
    "options", [{}, {"variant": "paper", "alpha": 2}, {"variant": "paper", "residual": False}], ids=str
)
@pytest.mark.parametrize(("mask", "causal"), [("keys", True), ("full", False)])
def test_sigma_wider_than_a_multiprocessor(options, mask, causal, monkeypatch):
    """By bands of two rows, which see ever more keys: 40 heads, and NaN in what is hidden."""
    mechanism, case = shaken("coda", 40, 4, **options), Case(2, 40, 7, 11, 4, mask, causal)
    parameters = [parameter.detach() for parameter in mechanism.sigma.parameters()]
    net = (*parameters[:2], *(parameters[2:4] if len(parameters) == 6 else (None, None)), *parameters[-2:])
    width, own = len(mechanism.sigma[0].weight), mechanism.variant == "code"
    monkeypatch.setattr(wide_sigma, "ACTIVATIONS", 2 * 11 * 2 * width)
    seen = mechanism.visible(*case.qkv[:2], case.mask, causal=causal)
    s, carry, grad = (
        torch.randn(2, 40, 7, 11, device=DEVICE).masked_fill(~seen, hidden) for hidden in (torch.nan, torch.nan, 0)
    )
    inputs = [x.masked_fill(~seen, 0.0).requires_grad_() for x in (s, carry)]
    z = inputs[0] + inputs[1] if mechanism.residual else inputs[0]
    z = z + apply_head_net(mechanism.sigma, z if own else inputs[1], seen)
    form = (own, mechanism.residual, False, torch.float32)
    shown = read_mask(case.mask, causal, *case.qkv[:2])
    found = s.clone()
    wide_sigma.collide(found, carry, net, shown, None, 1, *form)
    torch.testing.assert_close(found.masked_fill(~seen, 0.0), z.masked_fill(~seen, 0.0), atol=2e-5, rtol=2e-5)
    expected = torch.autograd.grad(z, [inputs[1], *mechanism.sigma.parameters()], grad)
    dcarry = torch.zeros_like(carry)
    dnet = wide_sigma.collide_backward(s, carry, net, shown, grad, dcarry, *form)
    torch.testing.assert_close(dcarry, expected[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(dnet[0], torch.cat([x.flatten() for x in expected[1:]]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_wide_sigma_in_a_layer(causal, monkeypatch):
    """With noise: where a query stands counts from the last key if causal."""
    monkeypatch.setattr(coda, "MOST_HEADS", 2)
    mechanism = shaken("coda", 3, 4)
    mechanism.sample_seed = (3 << 32) | 977
    Case(1, 3, 2, 5, 4, causal=causal, groups=1).assert_same(mechanism, torch.float32)
