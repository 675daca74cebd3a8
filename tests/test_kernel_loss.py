"""The kernels of the loss: equal to torch's cross-entropy with label smoothing, and its gradient."""

import pytest
import torch
from kernel_cases import DEVICE, OPERATOR_TESTS
from torch.nn import functional as F

pytest.importorskip("triton")
from attnlab.training import loss_kernel
from attnlab.training.loss_kernel import target_losses

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
SHARES, FACTORS = [0.0, 0.1, 0.3], [0.0, 1e-2, 1e-3]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(loss_kernel, "BLOCK", 32)


def draw(words, dtype, ignored):
    torch.manual_seed(words)
    logits = 9 * torch.randn(12, words + 5, device=DEVICE).to(dtype)[:, 2 : 2 + words]
    targets = torch.randint(words, (12,), device=DEVICE)
    targets[[0, 5, 11]] = ignored
    shares, factors = (torch.tensor(x, device=DEVICE) for x in (SHARES, FACTORS))
    return logits.requires_grad_(), targets, shares, factors


@pytest.mark.parametrize("ignored", [0, -100])
@pytest.mark.parametrize("words", [2, 32, 101])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_smoothed_cross_entropy_with_a_z_loss(dtype, words, ignored):
    logits, targets, shares, factors = draw(words, dtype, ignored)
    grad = torch.randn(12, device=DEVICE)
    losses, _ = target_losses(logits, targets, shares, factors, ignored)
    (got,) = torch.autograd.grad(losses, logits, grad)
    exact = logits.detach().double().requires_grad_()
    parts = []
    for x, y, share, factor in zip(exact.split(4), targets.split(4), SHARES, FACTORS, strict=True):
        nll = F.cross_entropy(x, y, ignore_index=ignored, reduction="none", label_smoothing=share)
        parts.append(nll + factor * x.logsumexp(-1).square() * (y != ignored))
    expected = torch.cat(parts)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(expected, exact, grad.double())
    torch.testing.assert_close(got.double(), slope, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 2e-3)


def test_it_obeys_torchs_rules_for_operators():
    logits, targets, shares, factors = draw(37, torch.float32, 0)
    torch.library.opcheck(target_losses.opaque, (logits, targets, shares, factors, 0), test_utils=OPERATOR_TESTS)
