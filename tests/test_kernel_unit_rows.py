"""The kernels of unit vectors: equal to torch's functions in float64, with every gradient."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from gpu_compile import assert_compiles, some_and_all
from kernel_cases import DEVICE, OPERATOR_TESTS, SLACK, TYPES, assert_fused, fill_memory_with_nan, project

from attnlab.mechanisms import attention
from attnlab.mechanisms.kernels import differential, unit_rows
from attnlab.mechanisms.kernels.launch import LAUNCHED

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
SIZES = [(2, 1, 5, 4), (3, 3, 67, 40), (4, 2, 130, 64), (2, 1, 33, 256), (1, 1, 1, 16)]  # h, shared, n, d
LIMIT = 1.2


def normalise(x, factor):
    y = x / x.square().sum(-1, keepdim=True).add(1e-30).sqrt()
    return y if factor is None else factor.clamp_max(LIMIT).exp() * y


def project_out(x, w):
    u = normalise(w, None).repeat_interleave(x.shape[1] // w.shape[1], 1)
    return x - (x * u).sum(-1, keepdim=True) * u


def subtract(x, first, second, gain):
    level = first
    if second is not None:
        exponentials = (first * second).sum(-1).exp()
        level = exponentials[0] - exponentials[1] + 0.3
    y = x[:, 0::2] - level * x[:, 1::2]
    return y if gain is None else 0.7 * F.rms_norm(y, y.shape[-1:], gain, eps=1e-5)


def divide(x):
    left = torch.arange(x.shape[-1], device=x.device) < x.shape[-1] // 2
    return torch.stack([x * left, x * ~left], 2).flatten(1, 2)


def assert_equal(compute, expected, inputs, dtype):
    """Compare a result and the gradients of its inputs with those in float64."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    y, want = compute(*leaves), expected(*exact)
    b, h, n, d = y.shape
    grad = project(b, n, h, d).to(dtype)
    given = [[x for x in each if x is not None] for each in (leaves, exact)]
    pairs = [(y, want), *zip(torch.autograd.grad(y, given[0], grad),
                             torch.autograd.grad(want, given[1], grad.double()), strict=True)]  # fmt: skip
    for got, right in pairs:
        assert got.dtype == dtype
        assert (got.double() - right).norm() <= SLACK[dtype] * right.norm().clamp_min(1.0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("h", "shared", "n", "d"), SIZES)
def test_they_equal_torchs_functions(dtype, h, shared, n, d, monkeypatch):
    """All that the kernels write starts as NaN. Some factors are above the limit, and one row is 0."""
    fill_memory_with_nan(monkeypatch)
    torch.manual_seed(0)
    x, w = project(2, n, h, d), project(2, n, h // shared, d)
    factor = torch.linspace(0.0, 2.1 * LIMIT, h, device=DEVICE).view(h, 1, 1)
    both = partial(unit_rows.normalise, limit=LIMIT)
    assert_equal(lambda *xs: both(*xs)[0], lambda q, k, f: normalise(q, f) + 0 * k.sum(), [x, w, factor], dtype)
    assert_equal(lambda *xs: both(*xs)[1], lambda q, k, f: normalise(k, None) + 0 * (q.sum() + f.sum()), [x, w, factor],
                 dtype)  # fmt: skip
    assert_equal(unit_rows.project_out, project_out, [x, w], dtype)
    x[:, :, n // 2] = 0.0
    assert not unit_rows.normalise(x.to(dtype), w.to(dtype), factor, LIMIT)[0][:, :, n // 2].any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("h", "shared", "n", "d"), SIZES)
def test_a_difference_equals_torchs_functions(dtype, h, shared, n, d, monkeypatch):
    """λ of rows is a slice of something wider."""
    fill_memory_with_nan(monkeypatch)
    torch.manual_seed(1)
    x, levels = project(2, n, 2 * h, d), project(2, n, h, 3)[..., 1:2]
    vectors = [torch.randn(2, d // 2, device=DEVICE) * 0.3 for _ in range(2)]
    gain = torch.randn(d, device=DEVICE)
    assert_equal(lambda x: differential.divide_heads(x, False), divide, [project(2, n, h, d)], dtype)
    for given in ([levels, None, None], [levels, None, gain], [*vectors, None], [*vectors, gain]):
        assert_equal(lambda *xs: differential.subtract(*xs, 0.3, 0.7, 1e-5), subtract, [x, *given], dtype)


@pytest.mark.parametrize("case", [{"mask": "full"}, {"causal": True, "shared": 2}])
@pytest.mark.parametrize("name", ["cosine", "xsa"])
def test_mechanisms_use_them(name, case):
    LAUNCHED.clear()
    assert_fused(name, 2, 4, 19, 19, 20, torch.float32, **case)
    assert {"softmax", "unit_rows"} == LAUNCHED


def test_long_rows_use_them_without_the_kernel_of_short_rows(monkeypatch):
    """As impl="auto" does on a GPU."""
    from attnlab.mechanisms.mechanism import Mechanism

    q, k, v = project(2, 70, 4, 16), project(2, 70, 2, 16), project(2, 70, 2, 16)
    for name in ("cosine", "xsa", "differential"):
        mechanism, contexts = attention(name, heads=4, head_dim=16).to(DEVICE), []
        for wanted in (False, True):
            monkeypatch.setattr(Mechanism, "wants_kernels", lambda self, q, wanted=wanted: wanted)
            LAUNCHED.clear()
            contexts.append(mechanism(q, k, v, causal=True)[0])
        torch.testing.assert_close(*contexts, atol=1e-5, rtol=1e-5)
        assert {"differential" if name == "differential" else "unit_rows"} == LAUNCHED


def test_they_obey_torchs_rules_for_operators():
    x, w, level = (project(2, 5, h, d).requires_grad_() for h, d in ((4, 16), (2, 16), (2, 1)))
    factor, vector, gain = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((4, 1, 1), (2, 8), 16))
    for operator, given in (
        (unit_rows.normalise, (x, w, factor, LIMIT)),
        (unit_rows.project_out, (x, w)),
        (differential.divide_heads, (x, False)),
        (differential.subtract, (x, level, None, None, 0.0, 1.0, 0.0)),
        (differential.subtract, (x, vector, vector.detach().requires_grad_(), gain, 0.3, 0.7, 1e-5)),
    ):
        torch.library.opcheck(operator.opaque, given, test_utils=OPERATOR_TESTS)


def test_a_second_derivative_is_refused():
    x = project(1, 5, 2, 16).requires_grad_()
    for y in (unit_rows.normalise(x, x, x[0, :, :1, :1], 0.0)[0], unit_rows.project_out(x, x)):
        with pytest.raises(NotImplementedError, match="second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import differential, unit_rows

kernels = [unit_rows._normalise, unit_rows._normalise_backward, unit_rows._project, unit_rows._project_backward]
kernels += [differential._divide, differential._subtract, differential._subtract_backward, differential._sum_levels]
cases = [("bf16", 64, True)]
cases += [("fp16", 40, False), ("fp32", 256, True), ("fp32", 3, False)] if EVERY else []
for kind, d, flag in cases:
    fixed = unit_rows.choose_row_tile(d) | {"SHARED": 2, "BLOCK": 1024}
    fixed |= dict.fromkeys(("SCALED", "JOINED", "VECTORS", "NORMED"), flag)
    pointers = ("x", "w", "factor", "first", "second", "gain", "out", "grad", "dx", "dw", "dfirst", "dsecond")
    types = dict.fromkeys(pointers, f"*{kind}") | dict.fromkeys(("eps", "limit", "initial", "scale"), "fp32")
    types |= dict.fromkeys(("sums", "parts", "dlevel", "dgain"), "*fp32")
    for kernel in kernels:
        own = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(own, "constexpr")
        made = triton.compile(ASTSource(kernel, signature, own), target=GPUTarget("cuda", 90, 32))
        assert made.metadata.shared <= 232448, (kernel, kind, own, made.metadata.shared)
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)
