"""The kernels of CODA and RealFormer: equal to the definition, the carry and every gradient too, noise and dropout."""

import pytest
import torch
from cascade_cases import Case, shaken
from gpu_compile import assert_compiles
from kernel_cases import DEVICE, TYPES, project
from properties import given, settings, st

from attnlab.mechanisms import attention
from attnlab.mechanisms.mechanism import Mechanism
from attnlab.mechanisms.noise import gaussian

pytest.importorskip("triton")
from attnlab.mechanisms.kernels import cascade as kernels
from attnlab.mechanisms.kernels import coda

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 2),
    h=st.sampled_from([3, 4, 8]),
    i=st.integers(1, 17),
    j=st.integers(2, 17),
    d=st.sampled_from([3, 16, 32]),
    causal=st.booleans(),
    mask=st.sampled_from(["none", "keys", "full", "one"]),
)
def test_coda_equals_its_definition(dtype, seed, b, h, i, j, d, causal, mask):
    torch.manual_seed(seed)
    Case(b, h, i, j, d, mask, causal).assert_same(shaken("coda", h, d, far=dtype != torch.float32), dtype)


@pytest.mark.parametrize(
    ("name", "layer", "options"),
    [
        ("coda", 1, {"variant": "paper", "alpha": 2}),
        ("coda", 1, {"variant": "paper", "residual": False}),
        ("coda", 1, {"carry_dtype": "float32"}),
        ("coda", 0, {}),
        ("realformer", 2, {"mean": True}),
        ("realformer", 1, {"carry_dtype": "float32"}),
    ],
    ids=str,
)
def test_the_other_forms_do_too(name, layer, options):
    for causal, mask in ((True, "keys"), (False, "full")):
        case = Case(2, 4, 7, 11, 5, mask, causal, carried=layer > 0)
        case.assert_same(shaken(name, 4, 5, layer, far=True, **options), torch.float16)


@pytest.mark.parametrize(("h", "d", "n"), [(16, 128, 5), (32, 64, 3)])
def test_many_and_wide_heads(h, d, n):
    Case(1, h, n, n + 2, d, causal=True).assert_same(shaken("coda", h, d, far=True), torch.float16)


@pytest.mark.parametrize(
    ("h", "groups"),
    [(9, 3), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((12, 4), (14, 2), (20, 5)))],
)
def test_heads_that_share_keys(h, groups):
    """The heads of small Llama, Qwen and OPT models, which are no powers of two."""
    Case(2, h, 5, 7, 16, "keys", causal=True, groups=groups).assert_same(shaken("coda", h, 16, far=True), torch.float16)
    Case(1, h, 7, 7, 16, "full", groups=groups).assert_same(shaken("realformer", h, 16), torch.float32)


@pytest.mark.parametrize("most", [coda.MOST_HEADS, 2], ids=["kernel", "wide"])
@pytest.mark.parametrize("options", [{}, {"variant": "paper"}, {"variant": "paper", "residual": False}], ids=str)
def test_an_infinite_bias_hides_pairs_of_one_head(options, most, monkeypatch):
    """σ then reads 0 from this head, and Z is −∞."""
    monkeypatch.setattr(coda, "MOST_HEADS", most)
    mechanism = shaken("coda", 4, 5, **options)
    q, k, v, carry = (x.requires_grad_() for x in (*Case(2, 4, 5, 7, 5).qkv, torch.randn(2, 4, 5, 7, device=DEVICE)))
    bias, found = torch.zeros_like(carry).masked_fill_(torch.rand_like(carry) < 0.3, -torch.inf), {}
    for impl in ("fused", "reference"):
        mechanism.impl = impl
        context, z = mechanism(q, k, v, None, carry, causal=True, bias=bias)
        z = z.masked_fill(~mechanism.visible(q, k, causal=True), 0.0)
        wanted = [q, k, v, carry, *mechanism.sigma.parameters()]
        total = context.square().sum() + z.clamp_min(-100).square().sum()
        found[impl] = [context, z, *torch.autograd.grad(total, wanted)]
    for got, expected in zip(*found.values(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=2e-4)


@pytest.mark.parametrize(("name", "layer"), [("coda", 0), ("realformer", 1), ("coda+dagpam", 1)])
@pytest.mark.parametrize("shape", [(4, 5, 7)], ids=str)
def test_a_bias_and_its_gradient(name, layer, shape):
    mechanism = shaken(name, 4, 5, layer)
    q, k, v = (x.requires_grad_() for x in Case(2, 4, 5, 7, 5, groups=2).qkv)
    carry = torch.randn(2, mechanism.carry_heads, 5, 7, device=DEVICE).requires_grad_() if layer else None
    bias, found = torch.randn(shape, device=DEVICE, requires_grad=True), {}
    wanted = [x for x in (q, k, v, carry, bias) if x is not None]
    for impl in ("fused", "reference"):
        mechanism.impl = impl
        context, z = mechanism(q, k, v, None, carry, causal=True, bias=bias)
        seen = mechanism.visible(q, k, causal=True)
        found[impl] = [context, *torch.autograd.grad(context.square().sum() + z[seen.expand_as(z)].sum(), wanted)]
    for got, expected in zip(*found.values(), strict=True):
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=2e-4)


def test_rows_longer_than_a_tile():
    """Several tiles of keys and of queries in every kernel, some above the diagonal; the first rows are blind."""
    Case(1, 2, 71, 67, 4, "keys", causal=True).assert_same(shaken("coda", 2, 4, far=True, alpha=2), torch.float16)


@pytest.mark.parametrize(("layer", "causal"), [(0, True), (1, False), (1, True)])
def test_noise_is_that_of_the_definition(layer, causal):
    """sample_seed: noise at evaluation too. i < j: where a query stands counts from the last key if causal."""
    mechanism = shaken("coda", 4, 5, layer)
    mechanism.sample_seed = (3 << 32) | 977
    case = Case(2, 4, 6, 13, 5, "none", causal, carried=layer > 0)
    case.assert_same(mechanism, torch.float32)
    rows = torch.arange(6, device=DEVICE) + (7 if causal else 0)
    given = gaussian(mechanism.sample_seed, layer, 2, 4, rows, 13).double()
    mechanism.sample_seed, seed = None, mechanism.sample_seed
    by_hand = case.of(mechanism, torch.float64, "reference", noise=given)["z"]
    mechanism.sample_seed = seed
    torch.testing.assert_close(case.of(mechanism, torch.float32, "fused")["z"].double(), by_hand, atol=2e-5, rtol=2e-5)


def test_noise_in_training_is_that_of_the_same_generator():
    mechanism = shaken("coda", 4, 5).train()
    case, drawn = Case(1, 4, 7, 7, 5), {}
    for impl in ("fused", "reference"):
        mechanism.impl = impl
        torch.manual_seed(7)
        drawn[impl] = mechanism(*case.qkv, None, case.carry)[0]
    torch.testing.assert_close(drawn["fused"], drawn["reference"], atol=2e-5, rtol=2e-5)
    assert not torch.allclose(mechanism(*case.qkv, None, case.carry)[0], drawn["reference"])


def test_noise_is_standard_and_differs_from_place_to_place():
    """With q = 0 the logits of the first layer are the noise: its moments to 4 standard errors."""
    mechanism = attention("coda", heads=2, head_dim=16, impl="fused").to(DEVICE).eval()
    mechanism.sample_seed = 5
    q = torch.zeros(2, 2, 64, 16, device=DEVICE)
    z = mechanism(q, q, q)[1]
    torch.testing.assert_close(z, gaussian(5, 0, 2, 2, torch.arange(64, device=DEVICE), 64), atol=2e-5, rtol=2e-5)
    assert abs(z.mean()) < 4 / z.numel() ** 0.5
    assert abs(z.var() - 1) < 4 * (2 / z.numel()) ** 0.5
    for dim in range(4):
        left, right = z.narrow(dim, 0, z.shape[dim] - 1), z.narrow(dim, 1, z.shape[dim] - 1)
        assert abs((left * right).mean()) < 4 / left.numel() ** 0.5, dim


def test_dropout_is_the_same_in_both_passes_and_has_its_rate():
    """With V = 1 the context shows the dropped weights; the gradients are those of exactly these."""
    n = 32
    q, k, v = (project(2, n, 2, n).requires_grad_() for _ in range(3))
    seed = torch.tensor(1234567890123, device=DEVICE)
    form = {"causal": True, "scale": 0.37, "sharp": 1.0, "layer": 0, "own": True, "residual": True}

    def run(v, seed, rate=0.25):
        return kernels.cascade(q, k, v, *[None] * 10, seed, rate=rate, wide=False, **form)[0]

    eye = torch.eye(n, device=DEVICE).expand(2, 2, n, n)
    weights, dropped = run(eye, None).detach(), run(eye, seed).detach()
    kept = torch.where(weights > 0, dropped / weights, 0.0)
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 4 / 3))
    share, total = (kept > 0).sum() / (weights > 0).sum(), (weights > 0).sum()
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / total) ** 0.5
    assert not torch.equal(dropped, run(eye, seed + 1))
    s = (0.37 * q @ k.mT).masked_fill(~torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril(), -torch.inf)
    expected, direction = (s.softmax(-1) * kept) @ v, torch.randn(2, 2, n, n, device=DEVICE)
    for found, y in zip(
        torch.autograd.grad(run(v, seed), (q, k, v), direction),
        torch.autograd.grad(expected, (q, k, v), direction), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, y, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "n", "options"), [("coda", 19, {}), ("coda", 19, {"variant": "paper"}), ("realformer", 67, {})], ids=str
)
def test_every_visible_element_is_written(name, n, options, monkeypatch):
    """Outputs start as NaN and the carry is NaN where hidden: nothing of it may come through."""

    def poisoned(empty):
        def make(*arguments, **options):
            made = empty(*arguments, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return make

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", poisoned(torch.Tensor.new_empty_strided))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    mechanism = shaken(name, 2, 5, impl="fused", **options)
    case = Case(2, 2, n, n, 5, "keys", causal=True)
    inputs = [x.requires_grad_() for x in (*case.qkv, case.carry)]
    hidden = ~mechanism.visible(inputs[0], inputs[1], case.mask, causal=True).expand(case.carry.shape)
    inputs[3] = case.carry.detach().masked_fill(hidden, float("nan")).requires_grad_()
    context, z = mechanism(*inputs[:3], case.mask, inputs[3], causal=True)
    loss = context.sum() + z.masked_fill(hidden, 0.0).sum()
    grads = torch.autograd.grad(loss, [*inputs, *mechanism.parameters()])
    assert all(x.isfinite().all() for x in (context, z[~hidden], *grads))
    assert (grads[3][hidden] == 0).all()


@pytest.mark.parametrize("name", ["coda", "realformer"])
def test_logits_are_stored_once_for_both_layers_that_read_them(name):
    q, k, v = (x.requires_grad_() for x in Case(1, 2, 9, 9, 4).qkv)
    stored, carry = {}, None

    def note(x):
        if x.shape[-2:] == (9, 9):
            stored[x.data_ptr()] = x  # kept, so that its place is not used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        for layer in range(3):
            _, carry = shaken(name, 2, 4, layer, impl="fused")(q, k, v, None, carry, causal=True)
    assert len(stored) == 3


@pytest.mark.parametrize("carried", [True, False])
def test_it_is_a_proper_operator(carried):
    """With a carry: of two members, whose σ has 2 heads and width 4."""
    q, k, v = (torch.randn(2, 2, n, 16, device=DEVICE, requires_grad=True) for n in (3, 5, 5))
    carry = torch.randn(2, 2, 3, 5, device=DEVICE, requires_grad=True) if carried else None
    sizes = [(4, 2), (4,), (4, 4), (4,), (2, 4), (2,)]
    net = [torch.randn(2, *x, device=DEVICE, requires_grad=True) if carried else None for x in sizes]
    seed = torch.tensor([3, 4] if carried else 3, device=DEVICE)
    mask = torch.rand(2, 1, 1, 5, device=DEVICE) < 0.8
    bias = torch.randn(2, 3, 5, device=DEVICE, requires_grad=True) if carried else None
    form = (False, 0.4, 1.0, 0.1, 0, True, True, False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    tests += ("test_aot_dispatch_static",) if DEVICE == "cpu" else ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(
        kernels.cascade.opaque, (q, k, v, mask, bias, carry, *net, seed, seed, *form), test_utils=tests
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself does it
def test_torch_compile_takes_it_whole():
    mechanism, case = shaken("coda", 2, 4, impl="fused"), Case(1, 2, 5, 5, 4)
    compiled = torch.compile(mechanism, fullgraph=True, backend="aot_eager")
    for got, expected in zip(*(f(*case.qkv, None, case.carry) for f in (compiled, mechanism)), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_second_derivative_is_refused():
    mechanism, case = shaken("realformer", 2, 4, impl="fused"), Case(1, 2, 5, 5, 4)
    q = case.qkv[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(mechanism(*case.qkv)[0].sum(), q, create_graph=True)


@pytest.mark.parametrize("name", ["coda", "realformer"])
def test_what_is_not_covered_is_said(name, monkeypatch):
    mechanism = shaken(name, 4, 6, impl="fused")
    q = torch.randn(2, 4, 5, 6, device=DEVICE)
    for reason, arguments, options in (
        ("queries placed by at=", (q, q, q), {"at": torch.arange(5, device=DEVICE)}),
        ("q, k, v in torch.float64", (q.double(), q.double(), q.double()), {}),
    ):
        with pytest.raises(ValueError, match=f"does not cover {reason}"):
            mechanism(*arguments, **options)
    with pytest.raises(ValueError, match="head_dim=260"):
        attention(name, heads=1, head_dim=260, impl="fused").to(DEVICE)(*torch.randn(3, 1, 1, 2, 260, device=DEVICE))
    with pytest.raises(ValueError, match="layer 0 takes no carry"):
        shaken(name, 4, 6, layer=0, impl="fused")(q, q, q, None, torch.zeros(2, 4, 5, 5, device=DEVICE))
    with pytest.raises(ValueError, match="the carry is"):
        mechanism(q, q, q, None, torch.zeros(2, 4, 5, 6, device=DEVICE))
    for option in ({"impl": "flash"}, {"carry_dtype": "half"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
            attention(name, heads=4, head_dim=6, **option)


def test_auto_takes_the_definition_in_function_transforms():
    mechanism = shaken("realformer", 2, 4)
    q = torch.randn(3, 1, 2, 5, 4, device=DEVICE)
    mapped = torch.vmap(lambda x: mechanism(x, x, x)[0])(q)
    torch.testing.assert_close(mapped, torch.stack([Mechanism.mix(mechanism, x, x, x)[0] for x in q]))


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import cascade, coda, online, pair_products, tiles

def build(kernel, kind, tile, **fixed):
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages") if name in tile}
    fixed |= tile
    pointers = ("q", "k", "v", "z", "ds", "dq", "dk", "dz", "dv", "grad", "grad_z", "carry", "bias", "out", "context")
    pointers += ("weights", "in_w", "in_b", "mid_w", "mid_b", "out_w", "out_b")
    types = dict.fromkeys(pointers, f"*{kind}")
    types |= dict.fromkeys(("lse", "delta", "parts", "sums", "extra"), "*fp32")
    types |= dict.fromkeys(("scale", "sharp", "rate", "eps"), "fp32")
    types |= dict.fromkeys(("seed", "noise", "dropping"), "*i64")
    types |= {"mask": "*u8" if fixed.get("MASKED") else f"*{kind}"} | dict.fromkeys(fixed, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 232448, (kernel, kind, fixed, made.metadata.shared)
    return made

for kind, dtype, heads, d, on in CONFIGURATIONS:
    width, flags = 4 * heads, {"MASKED": on, "CAUSAL": on}
    form = flags | {"OWN": on, "RESIDUAL": True, "BIASED": on, "DEEP": on, "EVEN": on}
    stored = flags | {"FORM": 0, "EXTRA": False, "COUNTED": False, "BIAS": 0, "SHARED": 2, "EVEN": on}
    shared = {"SHARED": 2, "EVEN": on}
    padded = max(8, triton.next_power_of_2(heads))
    build(coda._collide, kind, coda._tile(dtype, heads, width, 99), NOISY=on, H=padded, **form)
    build(coda._collide_backward, kind, coda._tile(dtype, heads, width, 99, backward=True), **form)
    for kernel, more in (
        (pair_products._scores, {"CAUSAL": on, "BIAS": 1 if on else 0, "DELTA": on} | shared),
        (online._attend, stored | {"DROPPED": on, "STORED": True, "HANDED": False, "CARRIED": False, "NOISY": False}),
        (online._attend, stored | {"DROPPED": on, "STORED": False, "HANDED": True, "CARRIED": on, "NOISY": not on}),
        (cascade._attend_backward, flags | {"DROPPED": on, "HANDED": on} | shared),
        (pair_products._products, {"CAUSAL": on, "WEIGHTED": on, "PARTED": on} | shared),
    ):
        tile = tiles.choose_tile(torch.empty(1, 1, 99, d, dtype=dtype), backward=kernel is cascade._attend_backward)
        build(kernel, kind, tile, **more)
    build(tiles._delta, kind, {"BI": 32, "D": d, "WIDE": d})
"""


COMPILE_UNALIGNED = """
tile = tiles.choose_logits_tile(torch.empty(1, 1, 99, 32, dtype=torch.bfloat16), aligned=False)
fixed = {"MASKED": 2, "CAUSAL": True, "FORM": 0, "EXTRA": False, "COUNTED": False, "BIAS": 0, "SHARED": 1}
fixed |= {"DROPPED": True, "STORED": False, "HANDED": True, "CARRIED": True, "NOISY": False, "EVEN": False}
fixed |= dict.fromkeys(("q_d", "k_d", "v_d"), 1)
stack = count_stack_bytes(build(online._attend, "bf16", tile, **fixed))
assert stack <= 256, stack
"""


def compile_all(*configurations, every=True):
    assert_compiles(COMPILE.replace("CONFIGURATIONS", f"({', '.join(configurations)},)"), every)


def test_kernels_compile_for_a_gpu_that_is_not_here():
    """The interpreter accepts products that no compiler does, so the kernels are also compiled, for sm_90."""
    compile_all('("bf16", torch.bfloat16, 16, 64, True)', every=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("heads", "d"), [(4, 64), (8, 32), (16, 128), (32, 64)])
def test_every_configuration_compiles(kind, heads, d):
    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[kind]
    heads = min(heads, 16) if kind == "fp32" else heads
    compile_all(*(f"({kind!r}, {dtype}, {heads}, {d}, {on})" for on in (True, False)))


@pytest.mark.gpu
def test_torch_compile_and_cuda_graphs_go_through():
    """Each replay draws afresh; without noise a compiled layer gives what an eager one does."""
    mechanism = attention("coda", heads=4, head_dim=64, layer=1, impl="fused").cuda()
    q, k, v = torch.randn(3, 2, 4, 40, 64, device="cuda")
    carry = torch.randn(2, 4, 40, 40, device="cuda")
    quiet = torch.compile(mechanism.eval())(q, k, v, None, carry)[0]
    torch.testing.assert_close(quiet, mechanism(q, k, v, None, carry)[0], atol=1e-4, rtol=1e-4)
    mechanism.train()(q, k, v, None, carry)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context = mechanism(q, k, v, None, carry)[0]
    graph.replay()
    first = context.clone()
    graph.replay()
    assert not torch.equal(first, context)


def test_registers_hold_a_tile_of_logits_that_are_not_aligned():
    assert_compiles(COMPILE.replace("CONFIGURATIONS", "()") + COMPILE_UNALIGNED)
