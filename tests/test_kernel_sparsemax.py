"""Row kernels of sparsemax and 1.5-entmax: equal to the package `entmax`, every gradient too."""

import pytest
import torch
from properties import given, settings, st

from attnlab.mechanisms import MECHANISMS, attention, by_rows
from attnlab.mechanisms.laws import judge_law
from attnlab.mechanisms.sparsemax import masked_projection

pytest.importorskip("triton")
from gpu_compile import assert_compiles, some_and_all
from kernel_cases import OPERATOR_TESTS, TYPES, assert_dropout, assert_fused

from attnlab.mechanisms.kernels import sparse_pass
from attnlab.mechanisms.kernels import sparsemax as kernel

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {"sparsemax": kernel.SPARSEMAX.value, "entmax15": kernel.ENTMAX.value}
HALF = [("reference", torch.float16), ("reference", torch.bfloat16), ("fused", torch.float16)]
HALF += [("fused", torch.bfloat16)] * (DEVICE == "cuda")  # the interpreter's bf16 is wrong
NAMES = [name for name, kind in MECHANISMS.items() if kind.kernels == {"sparsemax"}]


def assert_same(name, s, mask, dtype=torch.float32, slack=5e-6):
    """Weights and gradient of the kernel against the package in float64."""
    grad = torch.randn_like(s)
    x, y = s.to(dtype).requires_grad_(), s.to(dtype).double().requires_grad_()
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE) if mask is None else mask
    found = kernel.project_rows(x, mask, False, FORMS[name], dtype)
    expected = masked_projection(getattr(pytest.importorskip("entmax"), name), y, seen)
    torch.testing.assert_close(found.double(), expected, atol=slack, rtol=slack)
    slopes = torch.autograd.grad(found, x, grad.to(dtype))[0], torch.autograd.grad(expected, y, grad.double())[0]
    torch.testing.assert_close(slopes[0].double(), slopes[1], atol=40 * slack, rtol=40 * slack)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**31), name=st.sampled_from(NAMES), keys=st.integers(1, 70),
    size=st.sampled_from([0.0, 0.01, 1.0, 30.0]), shift=st.sampled_from([0.0, -50.0]), masked=st.booleans(),
)  # fmt: skip
def test_weights_and_gradients_are_those_of_the_package(seed, name, keys, size, shift, masked):
    """Equal logits, one that takes all, and all between; some rows see nothing."""
    torch.manual_seed(seed)
    s = torch.randn(2, 1, 3, keys, device=DEVICE) * size + shift
    assert_same(name, s, torch.rand(2, 1, 3, keys, device=DEVICE) < 0.5 if masked else None)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_long_rows(name):
    torch.manual_seed(0)
    s = torch.randn(1, 1, 2, 5000, device=DEVICE) * torch.tensor([[0.05], [3.0]], device=DEVICE)
    assert_same(name, s, None)
    assert_same(name, s[..., :100], None, torch.float16, slack=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_bands_have_the_gradients_of_the_definition(name, monkeypatch):
    monkeypatch.setattr(by_rows, "LOGITS", 4 * 2 * 3 * 7)
    build = lambda layer: attention(name, heads=3, head_dim=6, layer=layer, impl="fused")  # noqa: E731
    assert judge_law("gradients are right", build, dtype=torch.float32, device=DEVICE).holds


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_proper_operator(name):
    s, mask = torch.randn(1, 2, 3, 5, device=DEVICE, requires_grad=True), torch.rand(1, 1, 1, 5, device=DEVICE) < 0.8
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.project_rows.opaque, (s, mask, True, FORMS[name], torch.float16), test_utils=tests)


def test_the_product_is_a_proper_operator():
    q, k = (torch.randn(2, 3, n, 5, device=DEVICE, requires_grad=True) for n in (4, 7))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.wide_logits.opaque, (q, k, 0.3), test_utils=tests)
    torch.testing.assert_close(kernel.wide_logits(q, k, 0.3), 0.3 * q @ k.mT)


@pytest.mark.parametrize(("impl", "dtype"), HALF, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_gives_weight_to_the_same_keys(name, impl, dtype):
    """Logits that are rounded to half precision give weight to other keys, so their gradients are others."""
    rounded, found = [(3 * torch.randn(1, 4, 60, 12, device=DEVICE)).to(dtype) for _ in range(4)], []
    for way, wide in ((impl, dtype), ("reference", torch.float64)):
        q, k, v, grad = (x.to(wide).requires_grad_() for x in rounded)
        context = attention(name, heads=4, head_dim=12, impl=way)(q, k, v, causal=True)[0]
        found.append([context, *torch.autograd.grad(context, [q, k, v], grad)])
    for got, exact in zip(*found, strict=True):
        assert (got.double() - exact).norm() / exact.norm() < (2e-3 if dtype == torch.float16 else 1e-2)


def test_rows_that_are_too_long_are_refused(monkeypatch):
    monkeypatch.setattr(kernel, "LONGEST", 8)
    q, bias = torch.randn(1, 2, 9, 4, device=DEVICE), torch.randn(9, 9, device=DEVICE)
    with pytest.raises(ValueError, match="9 keys"):
        attention("entmax15", heads=2, head_dim=4, impl="fused")(q, q, q, bias=bias)
    found, expected = (
        attention("entmax15", heads=2, head_dim=4, impl=impl)(q, q, q, bias=bias)[0] for impl in ("auto", "reference")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "mask", "causal", "shared", "i", "j"),
    [(dtype, "none", True, 1, 70, 70) for dtype in TYPES]
    + [(torch.float32, "full", False, 2, 37, 70), (torch.float32, "keys", True, 1, 70, 3)],
)
def test_attention_without_logits_equals_the_definition(name, dtype, mask, causal, shared, i, j):
    """Several tiles; more queries than keys: the first ones see nothing."""
    assert_fused(name, 2, 4, i, j, 12, dtype, mask, causal, shared)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0.0, 0.1, 30.0])
def test_attention_without_logits_of_flat_and_steep_rows(name, size):
    """Equal logits, many keys of positive weight, and one key that takes all; far from 0."""

    def change(q, k, v):
        return q * size + 5.0, k * size + 5.0, v

    assert_fused(name, 1, 2, 9, 150, 8, torch.float32, change=change)


@pytest.mark.parametrize("name", NAMES)
def test_attention_without_logits_drops_weights(name):
    q, k, v = (torch.randn(1, 2, 24, 24, device=DEVICE, requires_grad=True) for _ in range(3))
    weights = attention(name, heads=2, head_dim=24).to(DEVICE).weights(q, k, causal=True)[0]

    def run(values, seed):
        return sparse_pass.sparse_pass(q, k, values, None, seed, FORMS[name], True, 24**-0.5, 0.25)[0]

    assert_dropout(run, weights, k, q, v, 0.25)


@pytest.mark.parametrize("name", NAMES)
def test_a_bias_takes_the_rows_of_stored_logits(name):
    q, k, v = (torch.randn(2, 3, 9, 6, device=DEVICE) for _ in range(3))
    found = []
    for impl in ("fused", "reference"):
        bias = torch.linspace(-2, 2, 81, device=DEVICE).view(9, 9).requires_grad_()
        context = attention(name, heads=3, head_dim=6, impl=impl)(q, k, v, causal=True, bias=bias)[0]
        found.append([context, *torch.autograd.grad(context.square().sum(), [bias])])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_attention_without_logits_is_a_proper_operator(name):
    q, k, v = (torch.randn(1, 2, n, 4, device=DEVICE, requires_grad=True) for n in (3, 5, 5))
    given_ = (q, k, v, torch.rand(1, 1, 1, 5, device=DEVICE) < 0.8, None, FORMS[name], True, 0.5, 0.0)
    torch.library.opcheck(sparse_pass.sparse_pass.opaque, given_, test_utils=OPERATOR_TESTS)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import sparsemax
for form in (0, 1) if EVERY else (1,):
    for keys in (2000, 16384) if EVERY else (2000,):
        for kernel in (sparsemax._project, sparsemax._differentiate):
            row = sparsemax.choose_row(keys)
            options = {"num_warps": row.pop("num_warps")}
            fixed = row | {"FORM": form} | ({"MASKED": True, "CAUSAL": True} if kernel is sparsemax._project else {})
            types = dict.fromkeys(("s", "out", "p", "dp", "ds"), "*bf16") | {"mask": "*u8"}
            types |= dict.fromkeys(fixed, "constexpr")
            signature = {name: types.get(name, "i32") for name in kernel.arg_names}
            triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
import torch
from attnlab.mechanisms.kernels import sparse_pass
from attnlab.mechanisms.kernels.tiles import choose_pass_tile
works = {"_find_levels": "forward", "_attend": "forward", "_backward_keys": "keys", "_backward_queries": "queries"}
cases = [("bf16", torch.bfloat16, 64), ("bf16", torch.bfloat16, 256), ("fp32", torch.float32, 128)]
for kind, dtype, d in cases if EVERY else ():
    for name, work in works.items():
        kernel, fixed = getattr(sparse_pass, name), choose_pass_tile(torch.empty(1, 1, 64, d, dtype=dtype), work)
        options = {key: fixed.pop(key) for key in ("num_warps", "num_stages") if key in fixed}
        fixed |= {"FORM": 1, "MASKED": 1, "CAUSAL": True, "DROPPED": True, "SHARED": 2}
        fixed = {key: value for key, value in fixed.items() if key in kernel.arg_names}
        types = dict.fromkeys(("q", "k", "v", "out", "mean", "grad", "dq", "dk", "dv"), f"*{kind}")
        types |= dict.fromkeys(("levels", "delta"), "*fp32") | {"mask": "*u8", "dropping": "*i64"}
        types |= dict.fromkeys(("scale", "rate"), "fp32") | dict.fromkeys(fixed, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (kernel, kind, d, made.metadata.shared)
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)
