"""Softmax attention over short rows: equal to its definition, every gradient too, and with dropout."""

import pytest
import torch
from gpu_compile import assert_compiles, some_and_all
from kernel_cases import fill_memory_with_nan
from properties import given, settings, st

from attnlab.mechanisms import attention
from attnlab.mechanisms.kernels.launch import LAUNCHED

pytest.importorskip("triton")
from attnlab.mechanisms.kernels.softmax import short_softmax

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter's bf16 is wrong
IMPLS = ("fused", "reference")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def by_definition(q, k, v, mask, causal, kept=1.0):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    i, j = q.shape[2], k.shape[2]
    seen = torch.ones(i, j, dtype=torch.bool, device=q.device).tril(j - i) if causal else None
    seen = mask if seen is None else seen if mask is None else seen & mask
    s = 0.37 * q @ k.transpose(2, 3)
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    return (torch.softmax(s, -1).nan_to_num(0.0) * kept) @ v


def projected(b, n, h, d, dtype):
    """As a joint projection leaves it: not contiguous, and a slice of something wider."""
    return torch.randn(b, n, h * d + 7, dtype=dtype, device=DEVICE)[..., 7:].unflatten(-1, (h, d)).transpose(1, 2)


def assert_same(inputs, mask, causal, seed=None, rate=0.0, kept=1.0):
    inputs = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    got = short_softmax(*inputs, mask, seed, causal, 0.37, rate)
    expected = by_definition(*wide, mask, causal, kept)
    direction = torch.randn_like(expected).to(got.dtype)
    found = [got, *torch.autograd.grad(got, inputs, direction)]
    for name, x, y in zip(
        ("context", "dq", "dk", "dv"), found, [expected, *torch.autograd.grad(expected, wide, direction.double())],
        strict=True,
    ):  # fmt: skip
        error = (x.double() - y).norm() / y.norm().clamp_min(1e-2)
        assert error < TOLERANCE[inputs[0].dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 3),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    i=st.integers(1, 64),
    j=st.integers(1, 64),
    d=st.sampled_from([3, 16, 32, 64]),
    causal=st.booleans(),
    mask=st.sampled_from(["none", "keys", "full", "one"]),
)
def test_it_equals_the_definition(dtype, seed, b, groups, shared, i, j, d, causal, mask):
    torch.manual_seed(seed)
    inputs = [projected(b, n, h, d, dtype) for n, h in ((i, groups * shared), (j, groups), (j, groups))]
    shape = {"none": None, "keys": (b, 1, 1, j), "full": (b, 1, i, j), "one": (i, j)}[mask]
    seen = None if shape is None else torch.rand(shape, device=DEVICE) < 0.6  # some rows see nothing
    assert_same(inputs, seen, causal)


def test_dropout_is_the_same_in_both_passes_and_has_its_rate():
    """With V = 1 the context shows the dropped weights; its gradients are those of exactly these."""
    torch.manual_seed(0)
    n = d = 32
    q, k = (projected(3, n, 4, d, torch.float32) for _ in range(2))
    eye = torch.eye(n, device=DEVICE).expand(3, 4, n, d)
    seed = torch.tensor(1234567890123, device=DEVICE)
    weights = by_definition(q, k, eye, None, True)
    dropped = short_softmax(q, k, eye, None, seed, True, 0.37, 0.25)
    kept = torch.where(weights > 0, dropped / weights, 0.0)
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 4 / 3))
    share = (kept > 0).sum() / (weights > 0).sum()
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / (weights > 0).sum()) ** 0.5
    assert not torch.equal(dropped, short_softmax(q, k, eye, None, seed + 1, True, 0.37, 0.25))
    v = projected(3, n, 4, d, torch.float32)
    assert_same([q, k, v], None, True, seed, 0.25, kept.double())


def test_every_element_is_written(monkeypatch):
    """Outputs start as NaN; none may be left."""
    fill_memory_with_nan(monkeypatch)
    q, k, v = (torch.randn(2, h, n, 5, device=DEVICE, requires_grad=True) for h, n in ((6, 13), (3, 17), (3, 17)))
    context = short_softmax(q, k, v, None, None, True, 0.4, 0.0)
    context.sum().backward()
    assert all(x.isfinite().all() for x in (context, q.grad, k.grad, v.grad))


@pytest.mark.parametrize("mask", [None, (2, 1, 1, 7)])
def test_it_is_a_proper_operator(mask):
    inputs = [torch.randn(2, 2, n, 16, device=DEVICE, requires_grad=True) for n in (5, 7, 7)]
    seen = None if mask is None else torch.rand(mask, device=DEVICE) < 0.8
    torch.library.opcheck(short_softmax.opaque, (*inputs, seen, torch.tensor(3, device=DEVICE), False, 0.4, 0.1))


@pytest.mark.parametrize("name", ["softmax", "dagpam"])
def test_the_mechanism_equals_its_definition_by_the_kernel(name):
    """dagpam has a kernel of its own for short rows."""
    fused, reference = (attention(name, heads=4, head_dim=16, impl=impl).to(DEVICE) for impl in IMPLS)
    reference.load_state_dict(fused.state_dict())
    q, k, v = (torch.randn(2, 4, n, 16, device=DEVICE, requires_grad=True) for n in (11, 13, 13))
    mask = torch.rand(2, 1, 1, 13, device=DEVICE) < 0.7
    results = []
    for mechanism, kernels in ((reference, set()), (fused, {name})):
        LAUNCHED.clear()
        context, _ = mechanism(q, k, v, mask)
        assert kernels == LAUNCHED
        results.append([context, *torch.autograd.grad(context.square().sum(), [q, k, v, *mechanism.parameters()])])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("beams", [5, 16])
def test_a_few_masked_queries_are_read_by_a_kernel(beams):
    """As in beam search, where each hypothesis sees the keys of its ancestors among those of all hypotheses."""
    fused, reference = (attention("dagpam", heads=2, head_dim=16, impl=impl).to(DEVICE) for impl in IMPLS)
    reference.load_state_dict(fused.state_dict())
    q, k, v = (torch.randn(2, 2, n, 16, device=DEVICE) for n in (beams, 5 * beams + 45, 5 * beams + 45))
    mask = torch.rand(2, 1, beams, k.shape[2], device=DEVICE) < 0.3
    mask[1, 0, 2] = False
    LAUNCHED.clear()
    torch.testing.assert_close(fused(q, k, v, mask)[0], reference(q, k, v, mask)[0], atol=1e-5, rtol=1e-4)
    assert {"dagpam", "one_pass"} == LAUNCHED


def test_what_is_not_covered_is_said():
    mechanism = attention("softmax", heads=2, head_dim=16, impl="fused").to(DEVICE)
    q = torch.randn(1, 2, 65, 16, device=DEVICE)
    with pytest.raises(ValueError, match="rows longer than 64"):
        mechanism(q, q, q)
    with pytest.raises(ValueError, match="impl must be"):
        attention("softmax", heads=2, head_dim=16, impl="flash")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import softmax
pointers = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")
for kernel in (softmax._forward, softmax._backward):
    for kind, d, n in (("bf16", 128, 64), ("fp16", 64, 32), ("fp32", 32, 16)) if EVERY else (("fp16", 64, 32),):
        here = n == 32  # where there is no mask or no dropout, q stands in for the pointer
        fixed = {"MASKED": here, "CAUSAL": here, "DROPPED": here, "SHARED": 2, "ROWS": n, "KEYS": n, "D": d, "WIDE": d}
        types = dict.fromkeys(pointers, f"*{kind}") | {"scale": "fp32", "rate": "fp32"}
        types |= {"mask": "*u8" if here else f"*{kind}", "seed": "*i64" if here else f"*{kind}"}
        types |= dict.fromkeys(fixed, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)


@pytest.mark.gpu
def test_torch_compile_and_cuda_graphs_go_through():
    mechanism = attention("softmax", heads=4, head_dim=64, dropout=0.5).cuda().train()
    q, k, v = torch.randn(3, 2, 4, 40, 64, device="cuda")
    for call in (mechanism, torch.compile(mechanism)):
        call(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            context = call(q, k, v)[0]
        graph.replay()
        first = context.clone()
        graph.replay()
        assert not torch.equal(first, context)
