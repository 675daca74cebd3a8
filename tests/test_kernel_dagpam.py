"""daGPAM's Triton passes: equal to their definition, every gradient too; on the CPU through Triton's interpreter."""

from functools import partialmethod

import pytest
import torch
from gpu_compile import assert_compiles, some_and_all
from properties import given, settings, st

from attnlab.mechanisms import attention

pytest.importorskip("triton")
from attnlab.mechanisms.kernels import short_dagpam
from attnlab.mechanisms.kernels.dagpam import combine, stack

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (
    DEVICE == "cuda"
)  # the interpreter's bf16 products are wrong
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def stack_by_definition(q, w):
    return torch.stack([q, q.relu() @ w], dim=2)


def combine_by_definition(context, lambdas):
    positive, negative = context.unflatten(1, (-1, 2)).unbind(2)
    plus, minus = lambdas[0], lambdas[-1]
    return (1 + plus[:, None, None]) * positive - minus[:, None, None] * negative


def assert_same(kernel, definition, *arguments):
    """Output and every gradient against the definition in float64, relative to what they are made of."""
    inputs = [x.detach().requires_grad_() for x in arguments]
    wide = [x.detach().double().requires_grad_() for x in arguments]
    got, expected = kernel(*inputs), definition(*wide)
    direction = torch.randn(expected.shape, device=expected.device).to(got.dtype).double()
    pairs = zip(
        [got, *torch.autograd.grad(got, inputs, direction.to(got.dtype))],
        [expected, *torch.autograd.grad(expected, wide, direction)],
        strict=True,
    )
    for name, (x, y) in zip(["output", "first", "second", "third"], pairs, strict=False):
        size = direction.norm() if y.dim() == 2 else y.norm()  # λ's gradient is one sum, which may cancel to nothing
        error = (x.double() - y).norm() / size.clamp_min(1e-6)
        assert error < TOLERANCE[arguments[0].dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 3),
    h=st.integers(1, 5),
    i=st.integers(1, 131),
    d=st.sampled_from([3, 16, 32, 64]),
    one=st.booleans(),
    tied=st.booleans(),
)
def test_passes_equal_their_definitions(dtype, seed, b, h, i, d, one, tied):
    torch.manual_seed(seed)
    q = torch.randn(b, i, h, d, dtype=dtype, device=DEVICE).transpose(1, 2)  # as a projection leaves it: not contiguous
    w = torch.randn(1 if one else h, d, d, dtype=dtype, device=DEVICE) / d**0.5
    assert_same(stack, stack_by_definition, q, w)
    context = torch.randn(b, i, 2 * h, d, dtype=dtype, device=DEVICE).transpose(1, 2)
    lambdas = torch.randn(1 if tied else 2, 1 if one else h, device=DEVICE, dtype=dtype)
    assert_same(combine, combine_by_definition, context, lambdas)


def test_every_element_is_written(monkeypatch):
    """Outputs start as NaN; none may be left."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: empty(*a, **o).fill_(float("nan")))
    strided = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **o: strided(*a, **o).fill_(float("nan")))
    q = torch.randn(2, 3, 67, 5, device=DEVICE, requires_grad=True)
    w = torch.randn(3, 5, 5, device=DEVICE, requires_grad=True)
    lambdas = torch.randn(2, 3, device=DEVICE, requires_grad=True)
    context = combine(stack(q, w).flatten(1, 2), lambdas)
    context.sum().backward()
    for tensor in (context, q.grad, w.grad, lambdas.grad):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("n", [37, 67], ids=["one kernel", "passes around torch's attention"])
@pytest.mark.parametrize(
    "options", [{}, {"tied": False, "initial": (0.5, 2.0), "per_head": True}, {"shared": True}], ids=str
)
def test_fused_mechanism_equals_its_reference(options, n):
    fused, reference = (
        attention("dagpam", heads=4, head_dim=16, impl=impl, **options).to(DEVICE) for impl in ("fused", "reference")
    )
    reference.load_state_dict(fused.state_dict())
    q, g = torch.randn(2, 2, 4, n, 16, device=DEVICE)
    k, v = torch.randn(2, 2, 2, n, 16, device=DEVICE)
    mask = torch.rand(2, 1, n, n, device=DEVICE) < 0.8
    results = []
    for mechanism in (fused, reference):  # the reference is weights(…) @ v: test_impl.py
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        context, _ = mechanism(*inputs, mask, causal=True)
        results.append([context, *torch.autograd.grad(context, [*inputs, *mechanism.parameters()], g)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(("i", "j", "d", "mask"), [(5, 64, 5, "keys"), (33, 20, 16, "full"), (1, 3, 32, "none")])
@pytest.mark.parametrize("causal", [True, False])
def test_short_rows_equal_the_definition(i, j, d, mask, causal, monkeypatch):
    """Some rows see nothing; everything the kernels write starts as NaN."""
    shape = {"none": None, "keys": (2, 1, 1, j), "full": (2, 1, i, j)}[mask]
    mask = None if shape is None else torch.rand(shape, device=DEVICE) < 0.6
    mechanism = attention("dagpam", heads=2, head_dim=d, initial=0.7).to(DEVICE)
    q, g = torch.randn(2, 2, i, 2, d, device=DEVICE).transpose(2, 3)
    k, v = torch.randn(2, 2, 1, j, d, device=DEVICE)
    inputs, found = [x.requires_grad_() for x in (q, k, v)], []
    for impl in ("reference", "fused"):
        mechanism.impl = impl
        if impl == "fused":
            for name in ("new_empty", "new_empty_strided"):
                monkeypatch.setattr(torch.Tensor, name, partialmethod(fill_with_nan, getattr(torch.Tensor, name)))
        context = mechanism(*inputs, mask, causal=causal)[0]
        found.append([context, *torch.autograd.grad(context, [*inputs, *mechanism.parameters()], g)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-4)


def fill_with_nan(x, empty, *arguments, **options):
    made = empty(x, *arguments, **options)
    return made.fill_(float("nan")) if made.is_floating_point() else made


def test_dropout_of_short_rows():
    """With V = 1 and one sign at a time the context shows the dropped weights; gradients are those of exactly these."""
    n = 16
    q, k, v = (torch.randn(2, 2, n, n, device=DEVICE).requires_grad_() for _ in range(3))
    w, seed = torch.randn(2, n, n, device=DEVICE).div(4).requires_grad_(), torch.tensor(12345, device=DEVICE)

    def run(v, plus, minus, seed=seed):
        lambdas = torch.tensor([[plus], [minus]], device=DEVICE)
        return short_dagpam.short_dagpam(q, k, v, w, lambdas, None, seed, True, 0.3, 0.25)[0]

    eye = torch.eye(n, device=DEVICE).expand(2, 2, n, n)
    kept = []
    for signs in ((0.0, 0.0), (-1.0, -1.0)):
        whole, dropped = run(eye, *signs, seed=None).detach(), run(eye, *signs).detach()
        kept.append(torch.where(whole > 0, dropped / whole, 0.0))
        assert set(kept[-1].mul(3).round().unique().tolist()) == {0.0, 4.0}
        assert abs((kept[-1] > 0).sum() / (whole > 0).sum() - 0.75) < 0.1
    assert not torch.equal(*kept)
    hidden = ~torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril()
    first, second = ((0.3 * x @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) for x in (q, q.relu() @ w))
    expected = (1.5 * first * kept[0] - 0.8 * second * kept[1]) @ v
    direction = torch.randn(2, 2, n, n, device=DEVICE)
    for found, y in zip(
        torch.autograd.grad(run(v, 0.5, 0.8), (q, k, v, w), direction),
        torch.autograd.grad(expected, (q, k, v, w), direction), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, y, atol=2e-5, rtol=1e-4)


def test_the_kernel_for_short_rows_is_a_proper_operator():
    q, k, v = (torch.randn(1, 2, n, 16, device=DEVICE, requires_grad=True) for n in (3, 5, 5))
    w = torch.randn(1, 16, 16, device=DEVICE, requires_grad=True)
    lambdas = torch.ones(2, 1, device=DEVICE, requires_grad=True)
    seed, mask = torch.tensor(3, device=DEVICE), torch.rand(1, 1, 1, 5, device=DEVICE) < 0.8
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    given = (q, k, v, w, lambdas, mask, seed, False, 0.4, 0.1)
    torch.library.opcheck(short_dagpam.short_dagpam.opaque, given, test_utils=tests)


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import dagpam, short_dagpam
import torch
pointers = {"q", "w", "both", "g", "dq", "o", "out", "do", "plus", "minus"}
for name in ("_stack_forward", "_stack_backward", "_combine_forward", "_combine_backward"):
    kernel = getattr(dagpam, name)
    for kind, d in (("bf16", 64), ("fp16", 128), ("fp32", 64)) if EVERY else (("bf16", 64),):
        types = dict.fromkeys(pointers, f"*{kind}") | {"dw": "*fp32", "dlambda": "*fp32"}
        types |= dict.fromkeys(tile := dagpam._tile(d), "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        triton.compile(ASTSource(kernel, signature, tile), target=GPUTarget("cuda", 90, 32))
pointers = {"q", "k", "v", "w", "plus", "minus", "mask", "grad", "out", "dq", "dk", "dv"}
cases = [("bf16", torch.bfloat16, 128)] + [("fp16", torch.float16, 40), ("fp32", torch.float32, 64)] * EVERY
for (kind, dtype, n), backward in [(case, backward) for case in cases for backward in (False, True)]:
        q = torch.empty(1, 4, n, 64, dtype=dtype)
        kernel = short_dagpam._backward if backward else short_dagpam._forward
        tile = short_dagpam._tile(q, q, backward=backward)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        tile |= {"MASKED": False, "CAUSAL": True, "DROPPED": EVERY}
        types = dict.fromkeys(pointers, f"*{kind}") | dict.fromkeys(("lse", "dw", "dlambda"), "*fp32")
        types |= {"dropping": "*i64", "scale": "fp32", "rate": "fp32"} | dict.fromkeys(tile, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, tile), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (kind, n, made.metadata.shared)
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    """The interpreter accepts products that no compiler does, so every kernel is also compiled, for sm_90."""
    assert_compiles(COMPILE, every)


@pytest.mark.gpu
def test_torch_compile_and_cuda_graphs_go_through():
    mechanism = attention("dagpam", heads=4, head_dim=64).cuda()
    q, k, v = torch.randn(3, 2, 4, 256, 64, device="cuda")
    expected = mechanism(q, k, v, causal=True)[0]
    torch.testing.assert_close(torch.compile(mechanism)(q, k, v, causal=True)[0], expected, atol=1e-3, rtol=1e-3)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        replayed = mechanism(q, k, v, causal=True)[0]
    graph.replay()
    torch.testing.assert_close(replayed, expected)
