"""Rows that see nothing, on every backend of torch's fused attention that the device has: 0, with finite gradients."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlab.mechanisms import attention
from attnlab.mechanisms.softmax import match_layout

CPU = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
CUDA = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
CASES = [pytest.param("cpu", backend, id=f"cpu-{backend.name.lower()}") for backend in CPU]
CASES += [pytest.param("cuda", b, id=f"cuda-{b.name.lower()}", marks=pytest.mark.gpu) for b in CUDA]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("device", "backend"), CASES)
@pytest.mark.parametrize("name", ["softmax", "dagpam"])
@pytest.mark.parametrize("causal", [False, True])
def test_blind_rows(name, device, backend, causal):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    mechanism = attention(name, heads=4, head_dim=16).to(device=device, dtype=dtype)
    q, k, v = (torch.randn(2, 4, 72, 16, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    mask = torch.ones(2, 1, 72, 72, dtype=torch.bool, device=device)
    mask[0, :, 5], mask[1, :, :7] = False, False
    try:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    except RuntimeError:
        assert (device, backend) == ("cuda", SDPBackend.FLASH_ATTENTION)  # the one that takes no mask at all
        return
    with sdpa_kernel(backend):
        context, _ = mechanism(q, k, v, mask, causal=causal)
    assert (context[0, :, 5] == 0).all()
    assert (context[1, :, :7] == 0).all()
    assert (context[0, :, 6] != 0).any()
    gradients = torch.autograd.grad(context.float().square().sum(), [q, k, v, *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    with torch.no_grad():
        expected = mechanism.weights(q, k, mask, causal=causal)[0] @ v
    torch.testing.assert_close(context, expected, atol=2e-2 if device == "cuda" else 1e-5, rtol=2e-2)


def by_tokens(x):
    """The same numbers with the memory layout (b,n,h,d)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_a_gradient_gets_the_layout_that_it_must_have():
    x = torch.randn(2, 3, 5, 7)
    assert match_layout(x.stride(), x) is x
    turned = match_layout(x.stride(), by_tokens(x))
    assert turned.stride() == x.stride()
    assert torch.equal(turned, x)
    one = torch.randn(1, 3, 5, 7)
    assert match_layout((999, *one.stride()[1:]), one) is one  # an axis of size 1 has no stride


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA)
def test_gradients_do_not_depend_on_layouts_that_were_met_before(backend):
    softmax = attention("softmax", heads=16, head_dim=64)
    leaves = [torch.randn(1, 16, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    found = []
    for layouts in itertools.product([torch.Tensor.contiguous, by_tokens], repeat=4):
        q, k, v, grad = (make(x).detach() for make, x in zip(layouts, leaves, strict=True))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(backend):
            context, _ = softmax(*inputs, causal=True)
        found.append(torch.autograd.grad(context, inputs, grad))
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
