"""The kernels that mix heads before and after the softmax: equal to the definition, every gradient too, by bands."""

import pytest
import torch

from attnlab.mechanisms import MECHANISMS, attention, by_rows, head_bands
from attnlab.mechanisms.head_bands import mix_bands
from attnlab.mechanisms.kernels.launch import LAUNCHED

pytest.importorskip("triton")
from gpu_compile import assert_compiles, some_and_all
from kernel_cases import fill_memory_with_nan

from attnlab.mechanisms.kernels import dynamic_heads, gated_norm, pair_products
from attnlab.mechanisms.kernels import mixed_heads as kernel

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter's bf16 is wrong
SLACK = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # what is allowed beside twice eager's error
NAMES = [name for name, kind in MECHANISMS.items() if "mixed_heads" in kind.kernels]


def draw_layer(name, heads, d, **options):
    """A mechanism whose parameters are not near the identity, in evaluation."""
    mechanism = attention(name, heads=heads, head_dim=d, impl="fused", **options).to(DEVICE).eval()
    for parameter in mechanism.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return mechanism


def compute(mechanism, impl, leaves, grad, dtype, mask, held=None, **options):
    """Context and every gradient; the inputs are rounded to `held` first."""
    mechanism.impl = impl
    mechanism.to(held or dtype).to(dtype)
    q, k, v, x, y = leaves = [x.to(held or dtype).to(dtype).detach().requires_grad_() for x in leaves]
    sides = (mechanism.query_side(x), mechanism.key_side(y))
    context = mechanism(q, k, v, mask, sides=sides, **options)[0]
    parameters = dict(mechanism.named_parameters())
    wanted = dict(zip("qkvxy", leaves, strict=True)) | parameters
    given = grad.to(held or dtype).to(dtype)
    gradients = torch.autograd.grad(context, list(wanted.values()), given, allow_unused=True)
    named = zip(wanted, gradients, strict=True)
    return {"context": context} | {name: gradient for name, gradient in named if gradient is not None}


def assert_same(name, b, h, i, j, d, dtype, mask="none", causal=False, shared=1, **options):
    mechanism = draw_layer(name, h, d, **options)
    leaves = [
        torch.randn(b, n, heads, d, device=DEVICE).transpose(1, 2) for n, heads in ((i, h), *[(j, h // shared)] * 2)
    ]
    leaves += [torch.randn(b, n, h * d, device=DEVICE) for n in (i, j)]
    grad = torch.randn(b, h, i, d, device=DEVICE)
    shape = {"none": None, "keys": (b, 1, 1, j), "full": (b, 1, i, j), "one": (i, j)}[mask]
    seen = None if shape is None else torch.rand(shape, device=DEVICE) < 0.6  # some rows see nothing
    LAUNCHED.clear()
    fused, eager, exact = (
        compute(mechanism, impl, leaves, grad, kind, seen, held=dtype, causal=causal)
        for impl, kind in (("fused", dtype), ("reference", dtype), ("reference", torch.float64))
    )
    assert {"mixed_heads"} == LAUNCHED
    for place, y in exact.items():
        size = y.norm() if y.norm() > 1e-2 else 1.0
        error, allowed = ((x[place].double() - y).norm() / size for x in (fused, eager))
        assert error <= 2 * allowed + SLACK[dtype], f"{name}, {place}: {error:.1e}, eager {allowed:.1e}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "mask", "causal", "heads", "shared", "i", "j"),
    [(dtype, "none", True, 3, 1, 9, 9) for dtype in TYPES]
    + [(torch.float32, "full", False, 12, 4, 5, 18), (torch.float32, "one", True, 1, 1, 7, 5)],
)
def test_it_equals_the_definition(name, dtype, mask, causal, heads, shared, i, j):
    """shared: how many query heads share a key head. More queries than keys: the first ones see nothing."""
    assert_same(name, 2, heads, i, j, 5, dtype, mask, causal, shared)


@pytest.mark.parametrize("name", NAMES)
def test_several_tiles_and_bands_with_nine_heads(name, monkeypatch):
    monkeypatch.setattr(by_rows, "LOGITS", 9 * 21 * 17)
    assert_same(name, 1, 9, 18, 21, 8, torch.float32, "keys", causal=True, shared=3)


@pytest.mark.parametrize("options", [{"queries": 1, "keys": 3}, {"queries": 3, "keys": 1, "group": 2}])
def test_multi_token_of_other_sizes(options):
    assert_same("multi-token", 1, 4, 17, 13, 8, torch.float32, "keys", causal=True, **options)
    assert_same("multi-token", 1, 4, 5, 9, 8, torch.float32, causal=False, **options)


@pytest.mark.parametrize(("dtype", "mask", "band"), [(torch.float16, "none", 70), (torch.float32, "full", 37)])
def test_convolution_over_several_tiles_and_bands(dtype, mask, band, monkeypatch):
    """A band begins with the last rows of the one before, and has two tiles of rows; buffers start as NaN."""
    rows, keys = 2 * band - 10, 2 * band
    monkeypatch.setattr(by_rows, "LOGITS", 2 * keys * band)
    fill_memory_with_nan(monkeypatch)
    assert_same("multi-token", 1, 2, rows, keys, 8, dtype, mask, causal=True, keys=37)
    assert_same("multi-token", 1, 2, 9, 70, 8, dtype, mask)


@pytest.mark.parametrize("most", [7, 8])
def test_many_parts_of_the_gradient_of_a_mixer_are_summed_by_torch(most, monkeypatch):
    """Of 16 rows, 2 are of one program. The launch of the products would add up all parts one after another."""
    monkeypatch.setattr(head_bands, "MOST_PARTS", most)
    given, write = [], pair_products.write_products
    monkeypatch.setattr(pair_products, "write_products", lambda *x, **y: given.append(y["sums"]) or write(*x, **y))
    assert_same("talking-heads", 1, 3, 16, 16, 8, torch.float16, causal=True)
    assert [sums is None for sums in given] == [most < 8]


@pytest.mark.parametrize("name", NAMES)
def test_heads_too_wide_for_the_products_of_kernels(name, monkeypatch):
    monkeypatch.setattr(by_rows, "LOGITS", 2 * 6 * 4)
    for n in (2, 6):
        assert_same(name, 1, 2, n, 6, 260, torch.float32, "keys", causal=True, shared=2)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [16, 20, 32])
@pytest.mark.parametrize("name", NAMES)
def test_many_heads_and_long_rows(name, heads):
    for dtype in TYPES:
        if dtype != torch.float32 or heads == 16:
            assert_same(name, 1, heads, 70, 131, 16, dtype, "full", causal=True, shared=4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("logits", [by_rows.LOGITS, 2 * 4 * 9])
def test_gradients_of_parameters_keep_their_type_beside_inputs_of_half_precision(name, logits, monkeypatch):
    """As under autocast: they are sums in float32, not rounded."""
    monkeypatch.setattr(by_rows, "LOGITS", logits)
    mechanism, x = draw_layer(name, 2, 8), torch.randn(1, 9, 16, device=DEVICE)
    q, k, v = torch.randn(3, 1, 2, 9, 8, device=DEVICE).half()
    with torch.autocast(DEVICE, torch.float16, enabled=True):
        sides = (mechanism.query_side(x), mechanism.key_side(x))
    context = mechanism(q, k, v, causal=True, sides=sides)[0]
    wanted = [p for n, p in mechanism.named_parameters() if n in ("before", "after", "mixer", "kernel", "base")]
    for gradient in torch.autograd.grad(context.float().square().sum(), wanted):
        assert gradient.dtype == torch.float32
        assert (gradient != gradient.half().float()).any()


@pytest.mark.parametrize("name", NAMES)
def test_dropout_falls_on_the_mixed_weights(name):
    """With V = 1 the context shows the weights: kept ones are scaled, and the rate is that of the option."""
    n, h = 24, 2
    mechanism = draw_layer(name, h, n)
    q, k = torch.randn(2, 1, h, n, n, device=DEVICE)
    x = torch.randn(1, n, h * n, device=DEVICE)
    sides = mechanism.give_sides((mechanism.query_side(x), mechanism.key_side(x)))
    eye = torch.eye(n, device=DEVICE).expand(1, h, n, n)
    weights = mechanism.mix(q, k, eye, **sides)[0]
    mechanism.train().dropout = 0.25
    kept = (mechanism.mix(q, k, eye, **sides)[0] / weights).detach()
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 4 / 3), rtol=1e-3, atol=1e-3)
    assert abs((kept > 0).float().mean() - 0.75) < 4 * (0.75 * 0.25 / kept.numel()) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_bands_drop_the_same_weights_in_both_passes(name, monkeypatch):
    """With V = 1 the context shows what was kept; the gradients are those of the definition times that."""
    n, h = 24, 2
    monkeypatch.setattr(by_rows, "LOGITS", 7 * h * n)
    mechanism = draw_layer(name, h, n)
    x, direction = torch.randn(1, n, h * n, device=DEVICE), torch.randn(1, h, n, n, device=DEVICE)
    q, k = torch.randn(2, 1, h, n, n, device=DEVICE).requires_grad_().unbind()
    eye = torch.eye(n, device=DEVICE).expand(1, h, n, n).clone().requires_grad_()
    sides = mechanism.give_sides((mechanism.query_side(x), mechanism.key_side(x)))
    weights = mechanism.weights(q, k, causal=True, **sides)[0]
    mechanism.train().dropout = 0.25
    dropped = mechanism.mix(q, k, eye, causal=True, **sides)[0]
    there = weights.detach().abs() > 1e-3
    kept = (dropped / weights).detach().where(there, 0.0)
    torch.testing.assert_close(kept[kept > 0.1], torch.full_like(kept[kept > 0.1], 4 / 3), rtol=1e-2, atol=1e-2)
    assert abs((kept > 0.1).sum() / there.sum() - 0.75) < 4 * (0.75 * 0.25 / there.sum()) ** 0.5
    direction = direction.where(there, 0.0)
    found = torch.autograd.grad(dropped, (q, k, eye), direction, retain_graph=True)
    expected = torch.autograd.grad((weights * kept) @ eye, (q, k, eye), direction)
    torch.testing.assert_close(found[:2], expected[:2], rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(found[2], dropped.detach().mT @ direction, rtol=1e-4, atol=1e-5)


def test_bands_are_a_proper_operator():
    q, k, v = (torch.randn(1, 2, n, 3, device=DEVICE, requires_grad=True) for n in (5, 7, 7))
    theta, square = torch.randn(2, 3, 5, device=DEVICE, requires_grad=True), torch.eye(2, device=DEVICE)
    before, after = (torch.randn(1, 5, 2, 2, device=DEVICE, requires_grad=True) for _ in range(2))
    keyed = torch.randn(2, 1, 7, 2, 2, device=DEVICE, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    mask, mixer = torch.rand(1, 1, 5, 7, device=DEVICE) < 0.8, square.requires_grad_()
    for given_ in ((theta, None, mixer, None, None), (None, before, after, keyed, mask)):
        for size in (2, 5):
            torch.library.opcheck(mix_bands.opaque, (q, k, v, *given_, None, True, 0.7, 0.0, size), test_utils=tests)


@pytest.mark.parametrize("name", NAMES)
def test_bands_compile_as_one_graph(name, monkeypatch):
    monkeypatch.setattr(by_rows, "LOGITS", 4 * 2 * 9)
    mechanism, q = draw_layer(name, 2, 8), torch.randn(1, 2, 9, 8, device=DEVICE, requires_grad=True)
    x = torch.randn(1, 9, 16, device=DEVICE)

    def run(q):
        return mechanism(q, q, q, causal=True, sides=(mechanism.query_side(x), mechanism.key_side(x)))[0]

    contexts = [f(q) for f in (run, torch.compile(run, fullgraph=True, backend="aot_eager"))]
    torch.testing.assert_close(*contexts)
    torch.testing.assert_close(*(torch.autograd.grad(c.square().sum(), q)[0] for c in contexts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_end_of_multi_token_is_that_of_the_definition(dtype, monkeypatch):
    """More rows than a program has, in a layout of their own, and outputs that start as NaN; with every gradient."""
    fill_memory_with_nan(monkeypatch)
    mechanism, found = draw_layer("multi-token", 3, 5).to(dtype), {}
    context = torch.randn(2, 70, 3, 5, device=DEVICE).transpose(1, 2).to(dtype).requires_grad_()
    wanted, grad = [context, *mechanism.norm.parameters(), *mechanism.gate.parameters()], torch.randn_like(context)
    for impl in ("fused", "reference"):
        mechanism.impl = impl
        out = mechanism.finish(context)
        found[impl] = [out, *torch.autograd.grad(out, wanted, grad)]
    slack = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(found["fused"], found["reference"], **slack)
    given_ = (context, mechanism.norm.weight, mechanism.gate.weight, mechanism.gate.bias, 1e-5)
    if dtype == torch.float32:
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(gated_norm.gated_norm.opaque, given_, test_utils=tests)


def test_it_is_a_proper_operator():
    s = torch.randn(1, 2, 3, 5, device=DEVICE, requires_grad=True)
    before, after = torch.randn(2, 1, 3, 2, 2, device=DEVICE).requires_grad_().unbind()
    keyed = torch.randn(2, 1, 5, 2, 2, device=DEVICE, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for given_ in ((s, before, after, keyed, None, True), (s, None, after[0, 0], None, None, True)):
        torch.library.opcheck(kernel.mix_heads.opaque, given_, test_utils=tests)


def test_sides_and_matrices_are_proper_operators():
    """2 heads of rank 1: 4 hidden units, 6 numbers of a token."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    shapes = ((2, 5, 3), (8, 3), (2, 4, 4), (4, 3)), ((2, 2, 5, 6), (2, 2, 7, 6), (2, 2, 2))
    for made, sizes in zip((dynamic_heads.derive_heads, dynamic_heads.make_matrices), shapes, strict=True):
        given_ = tuple(torch.randn(size, device=DEVICE, requires_grad=True) for size in sizes)
        torch.library.opcheck(made.opaque, given_, test_utils=tests)


@pytest.mark.parametrize(("heads", "n"), [(3, 33), (16, 5)])
def test_kernels_derive_the_sides_of_the_definition(heads, n, monkeypatch):
    """More tokens than a program has, and outputs that start as NaN; with every gradient."""
    fill_memory_with_nan(monkeypatch)
    mechanism = draw_layer("dcmha", heads, 4)
    x, found = torch.randn(2, n, heads * 4, device=DEVICE, requires_grad=True), {}
    wanted = [x, *mechanism.of_key.parameters()]
    grad = torch.randn(2, 2, n, 5 * heads, device=DEVICE)
    for impl in ("fused", "reference"):
        mechanism.impl = impl
        side = mechanism.key_side(x)
        found[impl] = [side, *torch.autograd.grad(side, wanted, grad)]
    torch.testing.assert_close(found["fused"], found["reference"], atol=2e-5, rtol=1e-4)


def test_what_is_not_covered_is_said_and_auto_takes_the_definition():
    q = torch.randn(1, 40, 5, 8, device=DEVICE)
    fused, auto = (attention("talking-heads", heads=40, head_dim=8, impl=impl).to(DEVICE) for impl in ("fused", "auto"))
    with pytest.raises(ValueError, match="40 heads"):
        fused(q, q, q)
    LAUNCHED.clear()
    auto(q, q, q)
    assert not LAUNCHED
    few = attention("talking-heads", heads=2, head_dim=8, impl="fused").to(DEVICE)
    q = q[:, :2].requires_grad_()
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(few(q, q, q)[0].sum(), q, create_graph=True)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import head_tiles, mixed_heads as kernels

cases = [("bf16", torch.bfloat16, 16, True, True), ("bf16", torch.bfloat16, 16, False, False)]
if EVERY:
    cases += [("bf16", torch.bfloat16, 32, True, True), ("fp16", torch.float16, 32, False, False)]
    cases += [("fp32", torch.float32, 16, True, True), ("fp32", torch.float32, 32, False, True)]
for kind, dtype, heads, keyed, first in cases if EVERY else cases[1:2]:
    s = torch.empty(1, heads, 64, 64, dtype=dtype)
    for kernel in (kernels._forward, kernels._backward_rows, kernels._backward_keys):
        if kernel is kernels._backward_keys:
            tile = head_tiles.choose_keys(s, keyed=keyed)
        else:
            tile = head_tiles.choose_rows(s, keyed=keyed, backward=kernel is kernels._backward_rows)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        fixed = tile | {"T": kernels.TYPES[dtype], "FIRST": first, "KEYED": keyed, "EACH": keyed, "H": heads}
        fixed |= {"MASKED": True, "CAUSAL": True} | ({"KNOWN": not first} if kernel is kernels._forward else {})
        logits = ("s", "grad", "out", "ds")
        types = dict.fromkeys((*logits, "before", "after", "key_before", "key_after"), f"*{kind}")
        types |= dict.fromkeys(("lse", "delta", "dbefore", "dafter", "dkey_before", "dkey_after"), "*fp32")
        types |= dict.fromkeys(fixed, "constexpr") | {"mask": "*u8"}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (kernel, kind, fixed, made.metadata.shared)
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)


COMPILE_SIDES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import dynamic_heads as kernels

names = ("_make_sides", "_make_sides_backward", "_make_matrices", "_make_matrices_backward")
cases = [("bf16", "bfloat16", 16)] + [("fp32", "float32", 16), ("fp16", "float16", 32)] * EVERY
for kind, dtype, heads in cases:
    for kernel in (getattr(kernels, name) for name in names):
        fixed = {"RANK": 2, "TOKENS": kernels.TOKENS, "HIDDEN": 4 * heads, "H": heads}
        fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        fixed |= {"T": kernels.TYPES[getattr(torch, dtype)]} if "T" in kernel.arg_names else {}
        numbers = ("size", "others", "length", "other_length", "hidden", "heads")
        types = dict.fromkeys(kernel.arg_names, f"*{kind}") | dict.fromkeys(numbers, "i32") | {"parts": "*fp32"}
        types |= dict.fromkeys(fixed, "constexpr")
        signature = {name: types[name] for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
        assert made.metadata.shared <= 232448, (kernel, kind, fixed, made.metadata.shared)
"""


@some_and_all
def test_kernels_of_sides_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE_SIDES, every)


COMPILE_CONVOLUTION = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import convolution as kernels

for kind, dtype in [("bf16", torch.bfloat16)] + [("fp32", torch.float32)] * EVERY:
    _, flags, tile = kernels._describe(torch.empty(1, 2, 64, 64, dtype=dtype), torch.empty(2, 6, 11), None, True, 0)
    options = {"num_warps": tile.pop("num_warps")}
    for kernel, more in (
        (kernels._convolve, {"TURNED": True}), (kernels._convolve, {"TURNED": False}), (kernels._differentiate, {})
    ):
        fixed = flags | tile | more | {"MASKED": int("TURNED" in more and more["TURNED"])}
        types = dict.fromkeys(("s", "dz", "theta", "out"), f"*{kind}") | {"mask": "*u8", "parts": "*fp32"}
        types |= dict.fromkeys(fixed, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (kernel, kind, fixed, made.metadata.shared)
        assert (stack := count_stack_bytes(made)) <= 256, (kernel, kind, fixed, stack)
"""


COMPILE_NORM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import gated_norm as kernels

for kernel in (kernels._forward, kernels._backward):
    fixed = {"ROWS": kernels.ROWS, "D": 64, "WIDE": 64}
    types = dict.fromkeys(("y", "weight", "gate", "shift", "grad", "out"), "*bf16") | {"parts": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(fixed, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
"""


def test_kernels_of_the_norm_compile_for_a_gpu_that_is_not_here():
    assert_compiles(COMPILE_NORM)


@some_and_all
def test_kernels_of_the_convolution_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE_CONVOLUTION, every, whole=True)  # the bytes of a stack are known at the end
