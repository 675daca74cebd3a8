"""The kernel that adds the three parts of shaped attention: equal to the definition, with every gradient."""

import pytest
import torch

from attnlab.mechanisms import attention
from attnlab.mechanisms.kernels.launch import LAUNCHED
from attnlab.mechanisms.mechanism import Mechanism

pytest.importorskip("triton")
from gpu_compile import assert_compiles, some_and_all
from kernel_cases import DEVICE, OPERATOR_TESTS, SLACK, TYPES, fill_memory_with_nan, project

from attnlab.mechanisms.kernels import shaped as kernel

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]


def compute(softmax, v, parameters, grad, *, by_kernel):
    """Return the context and every gradient, by the kernel or by a triangular matrix."""
    leaves = [x.detach().requires_grad_() for x in (softmax, v, *parameters)]
    if by_kernel:
        context = kernel.shape_context(*leaves)
    else:
        soft, values, alpha, beta, gamma = leaves
        values = values.repeat_interleave(soft.shape[1] // values.shape[1], 1)
        n = torch.arange(1, values.shape[2] + 1, device=DEVICE)[:, None]
        mean = torch.ones(len(n), len(n), dtype=values.dtype, device=DEVICE).tril() / n
        context = alpha * values + beta * soft - gamma * (mean @ values)
    return [context, *torch.autograd.grad(context, leaves, grad)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("h", "shared", "n", "d"), [(2, 1, 5, 3), (3, 3, 67, 40), (4, 2, 130, 64), (1, 1, 1, 16)])
def test_it_equals_the_triangular_matrix(dtype, h, shared, n, d, monkeypatch):
    """All that the kernel writes starts as NaN."""
    fill_memory_with_nan(monkeypatch)
    softmax, grad, v = project(2, n, h, d), project(2, n, h, d), project(2, n, h // shared, d)
    parameters = [torch.randn(h, 1, 1, device=DEVICE) for _ in range(3)]
    held = [x.to(dtype) for x in (softmax, v, *parameters, grad)]
    fused = compute(*held[:2], held[2:5], held[5], by_kernel=True)
    wide = [x.double() for x in held]
    exact = compute(*wide[:2], wide[2:5], wide[5], by_kernel=False)
    for x, y in zip(fused, exact, strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).norm() <= SLACK[dtype] * y.norm().clamp_min(1.0)


def test_causal_self_attention_uses_it_and_other_cases_do_not():
    """A window of past keys and a mask are computed without it."""
    q, mask = project(1, 9, 2, 16), torch.ones(9, dtype=torch.bool, device=DEVICE)
    fused = attention("shaped", heads=2, head_dim=16, impl="fused").to(DEVICE)
    reference = attention("shaped", heads=2, head_dim=16, impl="reference").to(DEVICE)
    for rows, options, used in ((9, {}, True), (4, {}, False), (9, {"mask": mask}, False)):
        LAUNCHED.clear()
        given = (q[:, :, 9 - rows :], q, q)
        found, expected = (each(*given, causal=True, **options)[0] for each in (fused, reference))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert ("shaped" in LAUNCHED) is used


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("h", "shared", "n", "d"), [(2, 1, 5, 3), (6, 3, 67, 40), (4, 2, 530, 16), (1, 1, 1, 16)])
def test_uniform_attention_averages_the_past(dtype, h, shared, n, d, monkeypatch):
    """As impl="auto" does on a GPU; q and k have a gradient of 0."""
    monkeypatch.setattr(Mechanism, "wants_kernels", lambda self, q: self.impl == "auto")
    fill_memory_with_nan(monkeypatch)
    q, k, v, grad = (project(2, n, heads, d).to(dtype) for heads in (h, h // shared, h // shared, h))
    results = []
    for impl, wanted in (("auto", dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(wanted).requires_grad_() for x in (q, k, v)]
        LAUNCHED.clear()
        context = attention("uniform", heads=h, head_dim=d, impl=impl)(*leaves, causal=True)[0]
        results.append([context, *torch.autograd.grad(context, leaves, grad.to(wanted))])
        assert ({"shaped"} if impl == "auto" else set()) == LAUNCHED
    for x, y in zip(*results, strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).norm() <= SLACK[dtype] * y.norm().clamp_min(1.0)


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_a_proper_operator(groups):
    softmax, v = (project(1, 5, h, 16).requires_grad_() for h in (2, groups))
    parameters = [torch.randn(2, 1, 1, device=DEVICE, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(kernel.shape_context.opaque, (softmax, v, *parameters), test_utils=OPERATOR_TESTS)
    k = v.detach().clone().requires_grad_()
    torch.library.opcheck(kernel.average_past.opaque, (softmax, k, v), test_utils=OPERATOR_TESTS)


def test_a_second_derivative_is_refused():
    x = project(1, 5, 2, 16).requires_grad_()
    ones = [torch.ones(2, 1, 1, device=DEVICE)] * 3
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(kernel.shape_context(x, x, *ones).sum(), x, create_graph=True)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import shaped

cases = [("bf16", torch.bfloat16, 64)]
cases += [("fp16", torch.float16, 40), ("fp32", torch.float32, 256), ("fp32", torch.float32, 3)] if EVERY else []
for kind, dtype, d in cases:
    x = torch.empty(1, 2, 99, d, dtype=dtype)
    usual, average = shaped._choose_tile(x, x[:, :1]), shaped._choose_average_tile(999, d) | {"SHARED": 2}
    kernels = [(shaped._forward, usual), (shaped._backward, usual)]
    kernels += [(shaped._average, average | {"BACKWARD": backward}) for backward in (False, True)]
    for kernel, fixed in kernels:
        types = dict.fromkeys(("x", "softmax", "v", "alpha", "beta", "gamma", "out", "grad", "ds", "dv"), f"*{kind}")
        types |= {"sums": "*fp32"} | dict.fromkeys(fixed, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
        assert made.metadata.shared <= 232448, (kernel, kind, fixed, made.metadata.shared)
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)
