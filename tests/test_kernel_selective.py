"""The kernel that sums what selective attention subtracts: equal to the definition, every gradient too."""

import pytest
import torch
from properties import given, settings, st

from attnlab.mechanisms import attention, by_rows
from attnlab.mechanisms.laws import judge_law
from attnlab.mechanisms.mechanism import visible
from attnlab.mechanisms.selective import compute_masking

pytest.importorskip("triton")
from gpu_compile import assert_compiles
from kernel_cases import OPERATOR_TESTS, assert_fused, fill_memory_with_nan

from attnlab.mechanisms.kernels import selective as kernel

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31), rows=st.integers(1, 40), former=st.integers(0, 40), later=st.integers(0, 9),
    causal=st.booleans(), mask=st.sampled_from([None, "keys", "pairs", "one"]),
)  # fmt: skip
def test_sums_and_gradients_are_those_of_the_definition(seed, rows, former, later, causal, mask):
    """A band of queries, with keys before it and, if it is not causal, after it."""
    torch.manual_seed(seed)
    keys = former + rows + (0 if causal else later)
    z = torch.randn(2, 1, rows, keys, device=DEVICE, requires_grad=True)
    before = torch.rand(2, 1, 1, keys, device=DEVICE, requires_grad=True)
    shape = {None: None, "keys": (2, 1, 1, keys), "pairs": (2, 1, rows, keys), "one": (rows, keys)}[mask]
    seen = None if shape is None else torch.rand(shape, device=DEVICE) < 0.7
    found = kernel.sum_masking(z, seen, before, causal, former)
    own = torch.arange(former, former + rows, device=DEVICE)
    masking = compute_masking(z, visible(z, z.mT, seen, causal=causal), own)
    summed = masking.cumsum(-2) + before
    expected = masking - summed, summed[:, :, -1:]
    directions = [torch.randn_like(x) for x in expected]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)
    gradients = (torch.autograd.grad(x, (z, before), directions) for x in (found, expected))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=5e-5, rtol=5e-5)


def test_bands_have_the_gradients_of_the_definition(monkeypatch):
    monkeypatch.setattr(by_rows, "LOGITS", 4 * 2 * 7)
    build = lambda layer: attention("selective", heads=3, head_dim=6, layer=layer, impl="fused")  # noqa: E731
    assert judge_law("gradients are right", build, dtype=torch.float32, device=DEVICE).holds


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("dtype", "mask", "causal"), [(torch.float16, "none", True), (torch.float32, "full", False)])
def test_one_band_equals_the_definition(kept, dtype, mask, causal, monkeypatch):
    """Several tiles, grouped keys, and memory that starts as NaN. kept: all heads fit into a band, not only one."""
    monkeypatch.setattr(by_rows, "LOGITS", 2 * 4 * 70 * 70 if kept else 2 * 70 * 70)
    fill_memory_with_nan(monkeypatch)
    assert_fused("selective", 2, 4, 70, 70, 8, dtype, mask, causal, shared=2)


@pytest.mark.parametrize("kept", [True, False])
def test_one_band_is_a_proper_operator(kept):
    q = torch.randn(1, 2, 3, 16, device=DEVICE, requires_grad=True)
    k, v = (torch.randn(1, 1, 5, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    mask, seed = torch.rand(1, 1, 1, 5, device=DEVICE) < 0.8, torch.tensor(3, device=DEVICE)
    torch.library.opcheck(
        kernel.select_tokens.opaque, (q, k, v, mask, seed, True, 0.3, 0.1, kept), test_utils=OPERATOR_TESTS
    )


def test_dropout_is_the_same_in_both_passes(monkeypatch):
    """The gradient of V is the sum of the weights that the forward pass kept."""
    monkeypatch.setattr(by_rows, "LOGITS", 8 * 1 * 16)
    mechanism = attention("selective", heads=2, head_dim=16, impl="fused", dropout=0.3).train()
    q, k = torch.randn(2, 1, 2, 16, 16, device=DEVICE)
    v = torch.eye(16, device=DEVICE).expand(1, 2, 16, 16).clone().requires_grad_()
    context = mechanism(q, k, v, causal=True)[0]
    found = torch.autograd.grad(context.sum(), v)[0]
    torch.testing.assert_close(found, context.detach().sum(2)[..., None] + 0 * v, atol=2e-5, rtol=1e-4)


def test_it_is_a_proper_operator():
    z = torch.randn(1, 1, 3, 5, device=DEVICE, requires_grad=True)
    before, mask = torch.rand(1, 1, 1, 5, device=DEVICE), torch.rand(1, 1, 1, 5, device=DEVICE) < 0.8
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.sum_masking.opaque, (z, mask, before, True, 2), test_utils=tests)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import selective
for kernel in (selective._sum_masking, selective._sum_masking_backward):
    tile = dict(selective.TILE)
    options = {"num_warps": tile.pop("num_warps")}
    fixed = tile | {"MASKED": 1, "CAUSAL": True, "CONTINUED": True}
    types = dict.fromkeys(("before", "fade", "after", "dfade", "dafter", "dbefore"), "*fp32") | {"mask": "*u8"}
    types |= {"z": "*bf16", "dz": "*bf16", "first": "*i32"} | dict.fromkeys(fixed, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
"""


def test_kernels_compile_for_a_gpu_that_is_not_here():
    assert_compiles(COMPILE)
