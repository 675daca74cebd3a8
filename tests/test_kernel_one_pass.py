"""The kernels that store no logits: equal to the definition with the same noise, every gradient too, in O(n) memory."""

import pytest
import torch
from properties import given, settings, st

from attnlab.mechanisms import MECHANISMS, attention
from attnlab.mechanisms.kernels.launch import LAUNCHED

pytest.importorskip("triton")
from gpu_compile import assert_compiles, some_and_all
from kernel_cases import fill_memory_with_nan

from attnlab.mechanisms.kernels import one_pass as kernel
from attnlab.mechanisms.kernels import online

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter's bf16 is wrong
SLACK = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # what is allowed beside twice eager's error
SEED = (5 << 32) | 31
NAMES = [name for name, kind in MECHANISMS.items() if kind.kernels == {"one_pass"}]
BIASES = ["bhij", "b1ij", "h1j", "hij", "b11j", "ij", "i1"]


def projected(b, n, h, d):
    """As a joint projection leaves it: not contiguous, and a slice of something wider."""
    return torch.randn(b, n, h * d + 3, device=DEVICE)[..., 3:].unflatten(-1, (h, d)).transpose(1, 2)


def results(name, qkv, grad, dtype, impl, mask, causal, layer=0, held=None, bias=None):
    """Context and every gradient, with the noise of SEED; the inputs are rounded to `held` first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)  # the same parameters each time
        mechanism = attention(name, heads=grad.shape[1], head_dim=grad.shape[3], layer=layer, impl=impl).eval()
        for parameter in mechanism.parameters():  # initial values may be special
            parameter.data += torch.randn_like(parameter) / 4
    mechanism.to(DEVICE, dtype).sample_seed = SEED
    inputs = [x.to(held or dtype).to(dtype).detach().requires_grad_() for x in (*qkv, bias) if x is not None]
    wanted = dict(zip(("q", "k", "v", "bias"), inputs, strict=False)) | dict(mechanism.named_parameters())
    given = {"causal": causal, "bias": wanted.get("bias")}
    if mechanism.has_sides:
        x = torch.linspace(-2, 3, qkv[1].shape[2] * mechanism.model_size, device=DEVICE).to(dtype).cos()
        x = x.view(1, -1, mechanism.model_size).repeat(len(grad), 1, 1)
        given["sides"] = (mechanism.query_side(x), mechanism.key_side(x))
    context = mechanism(*inputs[:3], mask, **given)[0]
    gradients = torch.autograd.grad(context, list(wanted.values()), grad.to(held or dtype).to(dtype))
    return {"context": context} | dict(zip(wanted, gradients, strict=True))


def assert_same(b, h, i, j, d, dtype, mask="none", causal=False, layer=0, name="coda-cs", shared=1, bias=None):
    """bias: its shape, where b, h, i and j stand for these sizes."""
    i = min(i, j) if MECHANISMS[name].self_only else i
    qkv = [projected(b, n, heads, d) for n, heads in ((i, h), (j, h // shared), (j, h // shared))]
    grad = torch.randn(b, h, i, d, device=DEVICE)
    shape = {"none": None, "keys": (b, 1, 1, j), "full": (b, 1, i, j), "one": (i, j)}[mask]
    seen = None if shape is None else torch.rand(shape, device=DEVICE) < 0.6  # some rows see nothing
    if bias is not None:
        bias = torch.randn([{"b": b, "h": h, "i": i, "j": j}.get(size, 1) for size in bias], device=DEVICE)
    fused, eager = (
        results(name, qkv, grad, dtype, impl, seen, causal, layer, bias=bias) for impl in ("fused", "reference")
    )
    exact = results(name, qkv, grad, torch.float64, "reference", seen, causal, layer, held=dtype, bias=bias)
    for place, y in exact.items():
        size = y.norm() if y.norm() > 1e-2 else 1.0  # all cancels where rows see one key: its rounding is left
        error, allowed = ((x[place].double() - y).norm() / size for x in (fused, eager))
        slack = SLACK[dtype] * (1 if place in ("context", "q", "k", "v", "bias") else 3)  # a parameter sums all rows
        assert error <= 2 * allowed + slack, f"{name}, {place}: {error:.1e}, eager {allowed:.1e}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=2, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(NAMES),
    shape=st.sampled_from([(1, 1), (3, 1), (6, 2), (4, 4)]),
    i=st.integers(1, 19),
    j=st.integers(2, 19),  # with one key the gradients of q and k are 0
    d=st.sampled_from([3, 16, 32]),
    causal=st.booleans(),
    mask=st.sampled_from(["none", "keys", "full", "one"]),
)
def test_it_equals_the_definition_with_the_same_noise(dtype, seed, name, shape, i, j, d, causal, mask):
    """shape: query heads, and how many of them share a key head."""
    torch.manual_seed(seed)
    assert_same(2, shape[0], i, j, d, dtype, mask, causal, name=name, shared=shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_rows_longer_than_a_tile(name):
    assert_same(1, 2, 37, 70, 16, torch.float32, causal=True, name=name, shared=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["sigmoid", "non"])
def test_the_kernel_counts_the_keys_of_each_query(name, causal):
    """Fewer queries than keys, and more: then the first causal queries see none."""
    for i, j in ((5, 37), (37, 5)):
        assert_same(2, 2, i, j, 16, torch.float32, causal=causal, name=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_element_is_written(name, monkeypatch):
    """Outputs start as NaN; none may be left."""
    fill_memory_with_nan(monkeypatch)
    qkv, grad = [projected(1, 35, 2, 16) for _ in range(3)], torch.randn(1, 2, 35, 16, device=DEVICE)
    found = results(name, qkv, grad, torch.float32, "fused", None, True)
    assert all(x.isfinite().all() for x in found.values())


def test_a_mask_or_a_bias_needs_levels():
    q, form = projected(1, 5, 2, 16), online.SIGMOID.value
    mask, bias = torch.ones(5, dtype=torch.bool, device=DEVICE), torch.zeros(5, device=DEVICE)
    for hidden in ((mask, None), (None, bias)):
        with pytest.raises(ValueError, match="level must be given"):
            kernel.one_pass(q, q, q, *hidden, *(None,) * 4, form, True, 1.0, 0.0, 0, 0.0)


@pytest.mark.parametrize("n", range(max(len(NAMES), len(BIASES))))
def test_a_bias_and_its_gradient(n):
    """A bias of pairs, of keys and of queries, for one head or all; every name and every shape."""
    name, bias = NAMES[n % len(NAMES)], BIASES[n % len(BIASES)]
    assert_same(2, 2, 17, 70, 16, torch.float32, "keys", causal=True, name=name, shared=2, bias=bias)


@pytest.mark.parametrize("name", NAMES)
def test_a_bias_of_minus_infinity_hides_its_key(name):
    qkv, grad = [projected(1, 5, 2, 16) for _ in range(3)], torch.randn(1, 2, 5, 16, device=DEVICE)
    bias = torch.zeros(1, 1, 5, 5, device=DEVICE)
    bias[..., 1] = -torch.inf
    bias[..., 0, :] = -torch.inf
    fused, exact = (
        results(name, qkv, grad, torch.float32, impl, None, True, bias=bias) for impl in ("fused", "reference")
    )
    for place, y in exact.items():
        assert y.isfinite().all(), place
        torch.testing.assert_close(fused[place], y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("offset", ["along", "across"])
def test_the_variance_of_keys_far_from_zero_keeps_its_digits(offset):
    """Keys with a large common part, and keys that vary most at right angles to the queries."""
    qkv, grad = [projected(1, 70, 1, 16) for _ in range(3)], torch.randn(1, 1, 70, 16, device=DEVICE)
    if offset == "along":
        qkv[1] = qkv[1] + 300.0
    else:
        qkv[0][..., 0], qkv[1][..., 0] = 0.0, 1000.0 * qkv[1][..., 0]
    fused, eager = (results("nap", qkv, grad, torch.float32, impl, None, True) for impl in ("fused", "reference"))
    exact = results("nap", qkv, grad, torch.float64, "reference", None, True)
    for place, y in exact.items():
        error, allowed = ((x[place].double() - y).norm() / y.norm() for x in (fused, eager))
        assert error <= 2 * allowed + 1e-5, f"{place}: {error:.1e}, eager {allowed:.1e}"


def test_a_running_sum_of_thousands_keeps_its_digits():
    """A bias of keys in float64 falls to −5,000; float32 would round its differences to 5e-4."""
    qkv = [projected(1, 160, 1, 16) for _ in range(3)]
    decay = -torch.rand(160, dtype=torch.float64, device=DEVICE).add(31).cumsum(0)
    causal = torch.ones(160, 160, dtype=torch.bool, device=DEVICE).tril()
    logits = (qkv[0].double() @ qkv[1].double().mT + decay.flip(0)).masked_fill(~causal, -torch.inf)
    context = kernel.one_pass(*qkv, None, decay.flip(0), *(None,) * 4, 0, True, 1.0, 0.0, 0, 0.0)[0]
    torch.testing.assert_close(context.double(), logits.softmax(-1) @ qkv[2].double(), atol=2e-5, rtol=0)


def test_rounded_contexts_do_not_add_up_in_the_gradient_of_a_running_sum():
    """FoX in half precision: δ is of a rounded context, and each gate collects the errors of all later rows."""
    q, k, v, grad = (projected(1, 200, 2, 16).half() for _ in range(4))
    x = torch.randn(1, 200, 32, device=DEVICE).half()
    mechanism, found = attention("fox", heads=2, head_dim=16).to(DEVICE), {}
    for impl, dtype in (("fused", torch.float16), ("eager", torch.float16), ("exact", torch.float64)):
        mechanism.to(dtype).impl = "fused" if impl == "fused" else "reference"
        wide, *qkv = (y.to(dtype) for y in (x, q, k, v))
        side = mechanism.key_side(wide.requires_grad_())
        context = mechanism(*qkv, causal=True, sides=(None, side))[0]
        found[impl] = torch.autograd.grad(context, wide, grad.to(dtype))[0].double()
    error, allowed = ((found[impl] - found["exact"]).norm() / found["exact"].norm() for impl in ("fused", "eager"))
    assert error <= 2 * allowed, f"{error:.1e}, eager {allowed:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_wide_heads_and_several_tiles(name, d):
    for dtype in TYPES:
        assert_same(2, 4, 131, 140, d, dtype, "full", causal=True, name=name, shared=2)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_zero_have_the_gradient_of_the_definition(name):
    """A query projection that starts at 0: sign, ReLU and |·| are at their kinks."""
    qkv, grad = [projected(1, 5, 2, 16) for _ in range(3)], torch.randn(1, 2, 5, 16, device=DEVICE)
    qkv[0] = torch.zeros_like(qkv[0])
    fused, exact = (results(name, qkv, grad, torch.float32, impl, None, True) for impl in ("fused", "reference"))
    for place, y in exact.items():
        torch.testing.assert_close(fused[place], y, atol=1e-5, rtol=1e-4)


def test_rows_longer_than_a_tile_and_a_later_layer():
    assert_same(1, 2, 71, 67, 5, torch.float16, "keys", causal=True, layer=3)
    assert_same(1, 1, 37, 70, 128, torch.float16)


def test_training_draws_as_the_definition_does_and_afresh_each_time():
    q = projected(2, 9, 3, 16)
    made = {}
    for impl in ("fused", "reference"):
        mechanism = attention("coda-cs", heads=3, head_dim=16, impl=impl).train()
        torch.manual_seed(11)
        made[impl] = mechanism(q, q, q, causal=True)[0]
        assert not torch.allclose(made[impl], mechanism(q, q, q, causal=True)[0])
    torch.testing.assert_close(made["fused"], made["reference"], atol=2e-5, rtol=2e-5)


def test_dropout_is_the_same_in_both_passes_and_has_its_rate():
    """With V = 1 the context shows the dropped weights; the gradients are those of exactly these."""
    n, scale = 32, 0.37
    q, k, v = (projected(2, n, 2, n).requires_grad_() for _ in range(3))
    noise, seed = torch.tensor(SEED, device=DEVICE), torch.tensor(1234567890123, device=DEVICE)
    eye = torch.eye(n, device=DEVICE).expand(2, 2, n, n)

    def run(v, dropping):
        return kernel.one_pass(q, k, v, None, None, None, None, noise, dropping, 0, False, scale, 0.25, 0, 0.0)

    weights, dropped = run(eye, None)[0].detach(), run(eye, seed)[0].detach()
    kept = dropped / weights
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 4 / 3))
    assert abs((kept > 0).float().mean() - 0.75) < 4 * (0.75 * 0.25 / kept.numel()) ** 0.5
    definition = attention("coda-cs", heads=2, head_dim=n, scale=scale)
    expected = (definition.weights(q, k, noise=SEED)[0] * kept) @ v
    direction = torch.randn(2, 2, n, n, device=DEVICE)
    for mine, y in zip(
        torch.autograd.grad(run(v, seed)[0], (q, k, v), direction),
        torch.autograd.grad(expected, (q, k, v), direction), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, y, atol=2e-5, rtol=1e-4)


def test_without_noise_it_is_softmax_attention():
    q, k, v = (projected(2, n, 3, 8) for n in (5, 7, 7))
    mechanism = attention("coda-cs", heads=3, head_dim=8).eval()
    torch.testing.assert_close(mechanism(q, k, v), attention("softmax", heads=3, head_dim=8).eval()(q, k, v))


@pytest.mark.parametrize("name", NAMES)
def test_no_logits_are_kept_for_the_backward_pass(name):
    q, k, v = (projected(1, 96, 2, 16).requires_grad_() for _ in range(3))
    mechanism = attention(name, heads=2, head_dim=16, impl="fused").to(DEVICE).train()
    x, sizes = torch.randn(1, 96, 32, device=DEVICE), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        sides = (mechanism.query_side(x), mechanism.key_side(x)) if mechanism.has_sides else (None, None)
        mechanism(q, k, v, causal=True, sides=sides)
    assert max(sizes) <= q.numel() < 2 * 96 * 96


@pytest.mark.parametrize("form", ["SOFTMAX", "NAP"])
def test_it_is_a_proper_operator(form):
    q, k, v = (torch.randn(1, 2, n, 16, device=DEVICE, requires_grad=True) for n in (3, 5, 5))
    seed, mask = torch.tensor(3, device=DEVICE), torch.rand(1, 1, 1, 5, device=DEVICE) < 0.8
    extra = torch.randn((2, 2) if form == "NAP" else (2,), device=DEVICE, requires_grad=True)
    bias = torch.randn(2, 1, 5, device=DEVICE, requires_grad=True)
    noise, kind = (None if form == "NAP" else seed), getattr(online, form).value
    given = (mask, bias, extra, None, noise, seed, kind, False, 0.4, 0.1, 0, 0.0)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    tests += ("test_aot_dispatch_static",) if DEVICE == "cpu" else ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(kernel.one_pass.opaque, (q, k, v, *given), test_utils=tests)


def test_what_is_not_covered_is_said_and_auto_takes_the_definition():
    q = torch.randn(1, 2, 5, 8, device=DEVICE)
    fused, auto = (attention("coda-cs", heads=2, head_dim=8, impl=impl).train() for impl in ("fused", "auto"))
    options = {"at": torch.arange(5, device=DEVICE)}
    with pytest.raises(ValueError, match="does not cover queries placed by at="):
        fused(q, q[:, :1], q[:, :1], **options)
    LAUNCHED.clear()
    auto(q, q[:, :1], q[:, :1], **options)
    assert "one_pass" not in LAUNCHED
    with pytest.raises(ValueError, match="impl must be"):
        attention("coda-cs", heads=2, head_dim=8, impl="flash")
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(fused(q, q, q)[0].sum(), q, create_graph=True)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import nap, one_pass, online, tiles

cases = [("bf16", torch.bfloat16, 64, True, form, 99) for form in range(5)]
if EVERY:
    cases += [("bf16", torch.bfloat16, 64, False, form, 99) for form in (3, 5)]
    cases += [("fp16", torch.float16, 128, False, 0, 99), ("fp32", torch.float32, 128, True, 2, 99)]
    cases += [(kind, getattr(torch, name), 256, True, form, rows) for form in range(5) for rows in (5, 99)
              for kind, name in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"))]
for kind, dtype, d, on, form, rows in cases if EVERY else [("bf16", torch.bfloat16, 64, False, 4, 99)]:
    kernels = [online._attend, *(getattr(one_pass, f"_backward_{of}") for of in ("keys", "queries", "bias"))]
    kernels += [nap._measure, nap._measure_slopes] if form == 4 else []
    for kernel in kernels if EVERY else (online._attend, one_pass._backward_keys, nap._measure):
        first = kernel in (online._attend, nap._measure)
        work = "keys" if kernel is one_pass._backward_keys else "forward" if first else "queries"
        tile = tiles.choose_pass_tile(torch.empty(1, 1, rows, d, dtype=dtype), work)
        more = {"FORM": form, "BIAS": 3 if form == 0 else 1 + on, "NOISY": on, "SHARED": 3}
        more |= {"STORED": False, "HANDED": False, "CARRIED": False} if first else {}
        more |= {"COUNTED": not on, "EXTRA": on, "EVEN": on} if first else {}
        more |= {"SUMMED": on} if kernel in (one_pass._backward_keys, one_pass._backward_queries) else {}
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages") if name in tile}
        fixed = tile | more | {"MASKED": on, "CAUSAL": on, "DROPPED": on}
        fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        types = dict.fromkeys(("q", "k", "v", "grad", "out", "dq", "dk", "dv"), f"*{kind}")
        types |= dict.fromkeys(("lse", "delta", "bias", "dbias", "sums"), "*fp32") | {"extra": f"*{kind}"}
        types |= {"bias": "*fp64"} if form == 0 else {}
        types |= dict.fromkeys(("scale", "rate", "eps"), "fp32")
        types |= dict.fromkeys(fixed, "constexpr")
        types |= {"mask": "*u8", "noise": "*i64", "dropping": "*i64", "z": f"*{kind}"}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (kernel, kind, fixed, made.metadata.shared)
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)


@pytest.mark.gpu
def test_torch_compile_and_cuda_graphs_go_through():
    """Each replay draws afresh."""
    mechanism = attention("coda-cs", heads=4, head_dim=64, impl="fused").train()
    q, k, v = torch.randn(3, 2, 4, 40, 64, device="cuda")
    torch.compile(mechanism)(q, k, v)
    mechanism(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context = mechanism(q, k, v)[0]
    graph.replay()
    first = context.clone()
    graph.replay()
    assert not torch.equal(first, context)
