"""The kernels of stacked members: linear maps, norms and dropout equal torch's, member by member."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from gpu_compile import assert_compiles, some_and_all
from kernel_cases import DEVICE, OPERATOR_TESTS
from small_models import LM
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

pytest.importorskip("triton")
from attnlab.mechanisms.noise import philox
from attnlab.models import dropout_kernel, member_kernel
from attnlab.models.affine import apply_linear
from attnlab.models.dropout import Dropout
from attnlab.models.dropout_kernel import drop, drop_tokens
from attnlab.models.members import MemberNorm
from attnlab.models.transformer import build

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 5e-3, "atol": 2e-2}}
MEMBERS = 3


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(member_kernel, "TILE", 128)
    monkeypatch.setattr(member_kernel, "WARP_TILE", 64)
    monkeypatch.setattr(member_kernel, "PARTS", 7)
    monkeypatch.setattr(dropout_kernel, "TILE", 128)


def draw(*shape, dtype=torch.float32):
    """Draw a leaf. One of two axes, as a bias, is a slice of a wider matrix, as in the flat parameters of members."""
    if len(shape) != 2:
        return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()
    return torch.randn(shape[0], shape[1] + 5, device=DEVICE).to(dtype)[:, 2:-3].detach().requires_grad_()


def assert_same(compute, expected, leaves, dtype):
    """Compare a result and the gradients of its leaves with those of torch's functions in float64."""
    y = compute(*leaves)
    grad = torch.randn(y.shape, device=DEVICE).to(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = expected(*exact)
    pairs = [(y, want)]
    pairs += zip(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(want, exact, grad.double()), strict=True)
    for got, right in pairs:
        torch.testing.assert_close(got.double(), right, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (37, 19, 41)])
def test_affine_maps_each_members_tokens_by_its_weights(sizes, dtype):
    torch.manual_seed(0)
    n, i, o = sizes
    leaves = [draw(MEMBERS, n, i, dtype=dtype), draw(MEMBERS, o, i, dtype=dtype), draw(MEMBERS, o, dtype=dtype)]
    each = lambda x, w, b: torch.stack([F.linear(*own) for own in zip(x, w, b, strict=True)])  # noqa: E731
    assert_same(member_kernel.affine, each, leaves, dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("sizes", [(1, 3), (37, 19), (23, 64)])
def test_norms_have_each_members_gain_and_offset(sizes, kind, dtype):
    torch.manual_seed(1)
    n, e = sizes
    shapes = [(n, e), (e,), (e,)][: 3 if kind == "layer" else 2]
    leaves = [draw(MEMBERS, *shape, dtype=dtype) for shape in shapes]
    norm = F.layer_norm if kind == "layer" else F.rms_norm

    def expected(x, *parameters):
        own = zip(x, *parameters, strict=True)
        return torch.stack([norm(y, (e,), *given, eps=1e-5) for y, *given in own])

    def compute(x, gain, bias=None):
        return member_kernel.normalise(x, gain, bias, 1e-5, kind == "layer")

    assert_same(compute, expected, leaves, dtype)


def keep_by_hand(seed, rate, rows, tokens, features):
    """keep / (1 − p) of one member by the Philox of mechanisms/noise.py."""
    b, n, quad = torch.meshgrid(*(torch.arange(m) for m in (rows, tokens, -(-features // 4))), indexing="ij")
    words = torch.stack(philox(torch.tensor(seed), quad, n, b, torch.zeros_like(b)), -1).flatten(-2)[..., :features]
    signed = torch.where(words > 0x7FFFFFFF, words - 2**32, words)
    u = torch.where(signed < 0, -signed - 1, signed) * 4.6566127342e-10
    return torch.where(u >= rate, 1 / (1 - rate), 0.0)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("features", [3, 19, 40])
def test_dropout_is_a_function_of_seed_and_place(features, added):
    torch.manual_seed(2)
    seeds, rates = [5, 2**40 + 1, 7], [0.3, 0.0, 0.9]
    leaves = [draw(MEMBERS * 5, 7, features) for _ in range(1 + added)]
    kept = torch.cat([keep_by_hand(s, r, 5, 7, features) for s, r in zip(seeds, rates, strict=True)]).to(DEVICE)
    given = torch.tensor(seeds, device=DEVICE), torch.tensor(rates, device=DEVICE)

    def compute(z, x=None):
        return drop(z, x, *given)

    assert_same(compute, lambda z, x=0.0: z * kept.double() + x, leaves, torch.float32)


def test_a_member_drops_what_it_drops_alone_whatever_the_padding():
    z = torch.ones(2 * 3, 5, 8, device=DEVICE)
    seeds, rates = torch.tensor([4, 9], device=DEVICE), torch.tensor([0.5, 0.5], device=DEVICE)
    together = drop(z, None, seeds, rates).unflatten(0, (2, 3))
    for member in range(2):
        alone = drop(z[:2, :4], None, seeds[member : member + 1], rates[:1])
        torch.testing.assert_close(together[member, :2, :4], alone)
    assert not torch.equal(together[0], together[1])


def test_a_compiled_block_drops_what_it_drops_eager():
    """So a run stays the same when a width is compiled, alone and in a population."""
    torch.manual_seed(3)
    config = replace(LM, dropout=0.5, attention_dropout=0.0, activation_dropout=0.5)
    (block, *_) = build(config).to(DEVICE).train().all_blocks()
    drops = [module for module in block.modules() if isinstance(module, Dropout)]
    for number, module in enumerate(drops):
        module.take_seeds(torch.full((2, 1), number, device=DEVICE))
    call = partial(block, mask=None, memory=None, memory_mask=None, carries=(None, None), causal=True, at=None,
                   positions=None, caches=(None, None))  # fmt: skip
    x = draw(3, 5, config.width)
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(len(results))  # of torch's generator, which must not matter
        y, _ = run(x)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *block.parameters()])])
    assert len(drops) == 3
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("shape", [(6, 5, 8), (5, 8)], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_dropout_in_float64_is_exact(shape, added):
    """The kernel narrows to float32, so it only draws the mask."""
    z, x = torch.randn(2, *shape, device=DEVICE, dtype=torch.float64).requires_grad_()
    members = 2 if len(shape) == 3 else 1
    seeds, rates = torch.tensor([4, 9], device=DEVICE)[:members], torch.tensor([0.5, 0.5], device=DEVICE)[:members]
    y = drop_tokens(z, x if added else None, seeds, rates)
    kept = drop(torch.ones(shape if members == 2 else (1, *shape), device=DEVICE), None, seeds, rates).view(shape)
    assert torch.equal(y, z * kept.double() + (x if added else 0.0))
    assert torch.equal(torch.autograd.grad(y.sum(), z)[0], kept.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_kernels_take_no_type_that_they_would_narrow(dtype, monkeypatch):
    """On tensors that have a device and a type, but no numbers."""
    launched, allocate = [], torch.empty_like
    monkeypatch.setattr(member_kernel, "affine", lambda x, *_: launched.append("affine") or allocate(x))
    monkeypatch.setattr(member_kernel, "normalise", lambda x, *_: launched.append("normalise") or allocate(x))
    with FakeTensorMode():
        x, weight, bias = (torch.empty(2, *shape, device="cuda", dtype=dtype) for shape in ((3, 5), (5, 5), (5,)))
        apply_linear(x, weight, bias)
        MemberNorm(torch.nn.LayerNorm(5), bias, None)(x)
    assert launched == ([] if dtype == torch.float64 else ["affine", "normalise"])


def test_they_obey_torchs_rules_for_operators():
    x, w, b = draw(2, 5, 3), draw(2, 4, 3), draw(2, 4)
    torch.library.opcheck(member_kernel.affine.opaque, (x, w, b), test_utils=OPERATOR_TESTS)
    gain = draw(2, 3)
    torch.library.opcheck(member_kernel.normalise.opaque, (x, gain, gain, 1e-5, True), test_utils=OPERATOR_TESTS)
    seeds, rates = torch.tensor([1, 2], device=DEVICE), torch.tensor([0.1, 0.2], device=DEVICE)
    torch.library.opcheck(drop.opaque, (draw(4, 3, 5), None, seeds, rates), test_utils=OPERATOR_TESTS)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.models import dropout_kernel, member_kernel, member_sums_kernel
kernels = [dropout_kernel._drop, member_kernel._normalise_backward, member_kernel._normalise]
kernels += [member_sums_kernel._rectify_backward, member_sums_kernel._join]
kernels += [member_sums_kernel._rectify] if EVERY else []
kernels += [member_kernel._add_bias, member_kernel._sum_tokens, member_kernel._sum_parts] if EVERY else []
for kernel in kernels:
    for kind, wide in (("bf16", 256), ("fp32", 1024)) if EVERY else (("bf16", 256),):
        fixed = dict.fromkeys(("ADDED", "SUMMED", "CENTRED", "BIASED"), True)
        fixed |= {"BT": 4096 // wide, "BE": wide, "BP": 16}
        fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        data = dict.fromkeys(("z", "x", "y", "out", "more", "gain", "bias", "grad", "dx"), f"*{kind}")
        types = data | {"seeds": "*i64", "rates": "*fp32", "sums": "*fp32", "eps": "fp32"}
        types |= dict.fromkeys(fixed, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)
