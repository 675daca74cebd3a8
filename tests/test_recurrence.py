"""The LSTM recurrence: torch's own, its gradients, many at once, and its kernels against their definition."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from gpu_compile import assert_compiles, some_and_all
from torch import nn
from torch.func import grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnlab.models import recurrence as module
from attnlab.models.recurrence import recurrence

BATCH, LENGTH, SIZE, INPUT = 5, 7, 3, 11
LIVE = torch.arange(LENGTH) < torch.tensor([7, 3, 1, 5, 6])[:, None]
close = {"rtol": 0.0, "atol": 1e-10}


def arguments(*stack, dtype=torch.float64):
    shapes = [(BATCH, LENGTH, 4 * SIZE), (4 * SIZE, SIZE), (BATCH, SIZE), (BATCH, SIZE)]
    return [torch.randn(*stack, *shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backwards", [False, True], ids=["onwards", "backwards"])
def test_equals_torch(packed, backwards):
    """With every gradient; the sequence turned round is nn.LSTM's reverse direction, padding and all."""
    torchs = nn.LSTM(INPUT, SIZE, batch_first=True, bidirectional=True).double()
    x = torch.randn(BATCH, LENGTH, INPUT, dtype=torch.float64)
    lengths = LIVE.sum(1) if packed else torch.full((BATCH,), LENGTH)
    live = torch.arange(LENGTH) < lengths[:, None]
    expected, (last_h, last_c) = torchs(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    expected, _ = pad_packed_sequence(expected, batch_first=True)
    name, side = ("_reverse", slice(SIZE, None)) if backwards else ("", slice(SIZE))
    w_ih, w_hh, b_ih, b_hh = parameters = [
        getattr(torchs, f"{kind}_l0{name}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    turned, turned_live = (x.flip(1), live.flip(1)) if backwards else (x, live)
    start = torch.zeros(BATCH, SIZE, dtype=torch.float64)
    outputs, h, c = recurrence(turned @ w_ih.T + b_ih + b_hh, w_hh, start, start, turned_live if packed else None)
    outputs = outputs.flip(1) if backwards else outputs
    ours, theirs = (
        (outputs * live[..., None], h, c),
        (expected[..., side], last_h[int(backwards)], last_c[int(backwards)]),
    )
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, **close)
    directions = [torch.randn_like(y) for y in ours]
    pairs = zip(
        *(torch.autograd.grad(made, parameters, directions, retain_graph=True) for made in (ours, theirs)), strict=True
    )
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, **close)


@pytest.mark.parametrize("live", [None, LIVE], ids=["whole", "padded"])
def test_gradients_by_finite_differences(live):
    inputs = [x.requires_grad_() for x in arguments()]
    assert torch.autograd.gradcheck(lambda *given: recurrence(*given, live), inputs)


def test_side_by_side_equals_one_by_one():
    gates, weight, h, c = arguments(4)
    live = torch.stack([LIVE, ~LIVE, LIVE.flip(1), torch.ones_like(LIVE)])
    for k in range(4):
        alone = recurrence(gates[k], weight[k], h[k], c[k], live[k])
        for together, one in zip(recurrence(gates, weight, h, c, live), alone, strict=True):
            torch.testing.assert_close(together[k], one, rtol=0.0, atol=1e-14)


def test_padding_keeps_the_state_and_gets_no_gradient():
    gates, weight, h, c = arguments()
    gates.requires_grad_()
    outputs, last_h, last_c = recurrence(gates, weight, h, c, LIVE)
    assert torch.equal(outputs[1, 3:], outputs[1, 2].expand(4, -1))
    assert torch.equal(last_h, outputs[:, -1])
    (found,) = torch.autograd.grad((last_h.sin() + last_c.cos()).sum(), gates)
    assert not found[~LIVE].any()
    assert found[LIVE].any(-1).all()
    untouched = recurrence(gates, weight, h, c, torch.zeros_like(LIVE))
    assert torch.equal(untouched[1], h)
    assert torch.equal(untouched[2], c)


def test_no_position_at_all():
    gates, weight, h, c = (x.requires_grad_() for x in arguments())
    outputs, last_h, last_c = recurrence(gates[:, :0], weight, h, c)
    assert outputs.shape == (BATCH, 0, SIZE)
    found = torch.autograd.grad((2 * last_h + 3 * last_c).sum(), [weight, h, c])
    assert [float(x.unique()) for x in found] == [0.0, 2.0, 3.0]


def loss(gates, weight, h, c, live):
    outputs, last_h, last_c = recurrence(gates, weight, h, c, live)
    return (outputs.sin().sum() + last_h.square().sum() - last_c.sum()) / 7


@pytest.mark.parametrize("shared", [True, False], ids=["one mask", "a mask each"])
def test_vmap_equals_a_loop(shared):
    """vmap(grad), and vmap with an ordinary backward, which is how a population trains."""
    gates, weight, h, c = arguments(4)
    masks = LIVE.expand(4, -1, -1) if shared else torch.rand(4, BATCH, LENGTH) < 0.7
    dims = (1, 0, None, 0, None if shared else 0)
    given = (gates.movedim(0, 1), weight, h[0], c, LIVE if shared else masks)
    one = [grad(loss, argnums=(0, 1))(gates[k], weight[k], h[0], c[k], masks[k]) for k in range(4)]
    for k, found in enumerate(vmap(grad(loss, argnums=(0, 1)), dims)(*given)):
        torch.testing.assert_close(found, torch.stack([each[k] for each in one]), **close)
    weight.requires_grad_()
    vmap(loss, dims)(*given).sum().backward()
    torch.testing.assert_close(weight.grad, torch.stack([each[1] for each in one]), **close)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_stacks_equals_a_loop(axis):
    given = arguments(4, 2)
    turned = [x.movedim(0, axis) for x in given]
    for together, k in zip(vmap(recurrence, axis)(*turned)[0], range(4), strict=True):
        torch.testing.assert_close(together, recurrence(*(x[k] for x in given))[0], **close)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself does it
def test_torch_compile_takes_it_whole():
    given = [*arguments(dtype=torch.float32), LIVE]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), loss(*given))


def test_the_second_derivative_is_refused():
    given = [x.requires_grad_() for x in arguments()]
    (first,) = torch.autograd.grad(loss(*given, None), given[1], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(first.sum(), given[1])


def test_half_precision_keeps_the_cell_in_float32():
    """A forget gate near 1 over many steps: in bfloat16 alone c would stop growing at 1."""
    steps = 300
    gates = torch.tensor([1.0, 10.0, 1.0, 1.0]).repeat_interleave(SIZE).expand(2, steps, -1) / 1.0
    gates = gates - torch.tensor([6.0, 0.0, 0.0, 0.0]).repeat_interleave(SIZE)
    weight, start = torch.zeros(4 * SIZE, SIZE), torch.zeros(2, SIZE)
    exact = recurrence(gates, weight, start, start)[2]
    half = recurrence(*(x.bfloat16() for x in (gates, weight, start, start)))[2]
    assert exact.min() > 1.4
    torch.testing.assert_close(half.float(), exact, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": torch.zeros(5, 12)}, ValueError, "gates"),
        ({"gates": torch.zeros(5, 7, 13)}, ValueError, "multiple of 4"),
        ({"weight": torch.zeros(12, 4)}, ValueError, r"weight.*\(12, 3\)"),
        ({"h": torch.zeros(1, 3)}, ValueError, "h must be"),
        ({"live": torch.ones(7, 5, dtype=torch.bool)}, ValueError, "live"),
        ({"live": torch.ones(5, 7)}, TypeError, "live"),
        ({"c": torch.zeros(5, 3, dtype=torch.float64)}, TypeError, "c must be"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    given = dict(zip(("gates", "weight", "h", "c"), arguments(dtype=torch.float32), strict=True)) | {"live": None}
    with pytest.raises(error, match=message):
        recurrence(**given | change)


kernel = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASKS = ("none", "scattered", "padded")


def masked(kind, s, b, n):
    """(s,b,n), strided; padded: short examples after long ones, the last of no token, every other turned round."""
    if kind == "none":
        return None
    if kind == "scattered":
        return (torch.rand(s, n, b, device=DEVICE) < 0.5).transpose(1, 2)
    lengths = torch.linspace(n + 0.5, 0.5, b, device=DEVICE).long()
    live = (torch.arange(n, device=DEVICE) < lengths[:, None]).expand(s, b, n).clone()
    live[1::2] = live[1::2].flip(2)
    return live


def looked_at(active, live):
    """The gates that a backward pass needs: those of tokens; what stands beside them is of no account."""
    return active if live is None else torch.where(live.transpose(1, 2).unsqueeze(-1), active, 0.0)


@kernel
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("s", "b", "n", "d"), [(1, 1, 1, 1), (2, 5, 7, 13), (3, 19, 4, 37), (1, 67, 3, 64), (2, 83, 4, 13)]
)
def test_the_kernels_equal_their_definition(s, b, n, d, mask):
    """Into buffers of NaN, of which none may be left; gates and gradients as strided as a layer leaves them."""
    kernels = pytest.importorskip("attnlab.models.recurrence_kernel")
    gates = torch.randn(b, n, s, 4 * d, device=DEVICE).permute(2, 0, 1, 3)
    gradient = torch.randn(s, b, n, d, device=DEVICE).transpose(1, 2)
    weight = torch.randn(s, 4 * d, d, device=DEVICE) / d**0.5
    h, c, dh, dc = torch.randn(4, s, b, d, device=DEVICE)
    live = masked(mask, s, b, n)
    made = []
    for passes in (module, kernels):
        outputs, cells = torch.full((2, s, n, b, d), torch.nan, device=DEVICE)
        active, delta = torch.full((2, s, n, b, 4 * d), torch.nan, device=DEVICE)
        on_h, on_c = dh.clone(), dc.clone()
        with exact():
            passes.forward(gates, weight, h, c, live, outputs, cells, active)
            passes.backward(gradient, weight, c, live, cells, active, delta, on_h, on_c)
        made.append([outputs, cells, looked_at(active, live), delta, on_h, on_c])
    for wanted, got in zip(*made, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)


@kernel
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("quiet", [1.0, 1e-6, 0.0], ids=["alike", "all but one quiet", "all but one silent"])
def test_products_with_ten_bits_stay_near_those_of_float32(quiet, mask):
    """As tf32 would, 2⁻¹¹ a factor: also the gradient of an example that is small beside another's."""
    kernels = pytest.importorskip("attnlab.models.recurrence_kernel")
    s, b, n, d = 2, 19, 5, 32
    gates, weight = torch.randn(s, b, n, 4 * d, device=DEVICE), torch.randn(s, 4 * d, d, device=DEVICE) / d**0.5
    gradient = torch.randn(s, n, b, d, device=DEVICE)
    gradient[:, :, 1:] *= quiet
    h, c = torch.randn(2, s, b, d, device=DEVICE).tanh()
    live = masked(mask, s, b, n)
    made = []
    for passes in (module, kernels):
        outputs, cells = torch.full((2, s, n, b, d), torch.nan, device=DEVICE)
        active, delta = torch.full((2, s, n, b, 4 * d), torch.nan, device=DEVICE)
        on_h, on_c = torch.zeros(2, s, b, d, device=DEVICE)
        passes.forward(gates, weight, h, c, live, outputs, cells, active)
        passes.backward(gradient, weight, c, live, cells, active, delta, on_h, on_c)
        made.append([outputs.transpose(1, 2), cells.transpose(1, 2), delta.transpose(1, 2), on_h, on_c])
    for wanted, got in zip(*made, strict=True):
        sizes, errors = wanted.flatten(2).norm(dim=-1), (got - wanted).flatten(2).norm(dim=-1)  # (s,b)
        assert bool((errors <= 2e-3 * sizes).all())
        assert errors.max() > 0


@kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by the numpy of the interpreter
def test_an_example_that_is_infinite_leaves_the_others_alone():
    kernels = pytest.importorskip("attnlab.models.recurrence_kernel")
    s, b, n, d = 1, 5, 3, 16
    gradient = torch.randn(s, n, b, d, device=DEVICE)
    gradient[:, 1, 3] = torch.inf
    cells, active = torch.randn(s, n, b, d, device=DEVICE), torch.rand(s, n, b, 4 * d, device=DEVICE)
    weight, c = torch.randn(s, 4 * d, d, device=DEVICE), torch.randn(s, b, d, device=DEVICE)
    dh, dc, delta = torch.zeros_like(c), torch.zeros_like(c), torch.empty_like(active)
    kernels.backward(gradient, weight, c, None, cells, active, delta, dh, dc)
    assert dh.isfinite().all(-1).squeeze(0).tolist() == [True, True, True, False, True]


@kernel
def test_small_states_keep_their_bits():
    """tanh of what is small is not made by taking 1 from what is nearly 1."""
    kernels = pytest.importorskip("attnlab.models.recurrence_kernel")
    gates = 1e-5 * torch.randn(1, 7, 1, 4 * 16, device=DEVICE)
    zero = torch.zeros(1, 7, 16, device=DEVICE)
    made = []
    for passes in (module, kernels):
        outputs, cells, active = (torch.empty(1, 1, 7, k * 16, device=DEVICE) for k in (1, 1, 4))
        with exact():
            passes.forward(gates, torch.zeros(1, 64, 16, device=DEVICE), zero, zero, None, outputs, cells, active)
        made.append([outputs, cells, active])
    for wanted, got in zip(*made, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)


@kernel
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"), ids=str)
def test_half_precision_is_near_double_in_every_gradient(dtype, monkeypatch):
    kernels = pytest.importorskip("attnlab.models.recurrence_kernel")
    given = [x.to(DEVICE, dtype).requires_grad_() for x in arguments(2, dtype=torch.float32)]
    live = torch.stack([LIVE, LIVE.flip(1)]).to(DEVICE)
    results = []
    for passes, cast in ((kernels, dtype), (module, torch.float64)):
        monkeypatch.setattr(module, "_choose_passes", lambda x, h, passes=passes: (passes.forward, passes.backward))
        taken = [x.detach().to(cast).requires_grad_() for x in given]
        made = recurrence(*taken, live)
        results.append([*made, *torch.autograd.grad(sum(y.sin().sum() for y in made), taken)])
    bits = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for got, wanted in zip(*results, strict=True):
        assert (got.double() - wanted).norm() < bits * wanted.norm()


def test_what_the_kernels_are_for():
    kernels = pytest.importorskip("attnlab.models.recurrence_kernel")
    for size, dtype, covered in (
        (512, torch.float32, True), (513, torch.float32, False), (8, torch.float64, False), (8, torch.bfloat16, True)
    ):  # fmt: skip
        assert kernels.supports(torch.zeros(1, 1, 1, 4 * size, dtype=dtype), torch.zeros(1, 1, size)) is covered
    assert not kernels.supports(torch.zeros(1, 1, 0, 32), torch.zeros(1, 1, 8))


def exact():
    """Recurrences of float32 without tf32."""
    return torch.backends.cudnn.flags(allow_tf32=False)


@kernel
def test_the_recurrence_with_kernels_equals_the_one_without(monkeypatch):
    kernels = pytest.importorskip("attnlab.models.recurrence_kernel")
    given = [x.to(DEVICE).requires_grad_() for x in arguments(2, dtype=torch.float32)]
    live = torch.stack([LIVE, LIVE.flip(1)]).to(DEVICE)
    live[:, :, 3:5] = False  # there no example has a token
    results = []
    for passes in (kernels, module):
        monkeypatch.setattr(module, "_choose_passes", lambda x, h, passes=passes: (passes.forward, passes.backward))
        with exact():
            made = recurrence(*given, live)
            results.append([*made, *torch.autograd.grad(sum(y.sin().sum() for y in made), given)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


COMPILE = """
import itertools
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.models import recurrence_kernel as kernels
wide = {"c", "cells", "dh", "dc"}
names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
full, half, brief = torch.float32, torch.float16, torch.bfloat16
memory = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
cases = [(90, *case) for case in itertools.product((24, 256), (16, 32, 64), [full], (full, half))]
cases += [(90, 512, 64, full, full), (90, 512, 64, full, half), (90, 256, 32, brief, brief), (90, 256, 64, half, half)]
cases += [(chip, size, 64, full, factor) for chip in (80, 89) for size in (256, 512) for factor in (full, half)]
cases = cases if EVERY else [(90, 24, 32, full, full), (90, 256, 64, half, half), (89, 512, 64, full, half)]
for (chip, size, b, dtype, factor), kernel in itertools.product(cases, (kernels._forward, kernels._backward)):
    tiles = kernels.Tiles.choose(1, b, size, torch.empty(0, dtype=factor), memory[chip])
    constants = tiles.forward if kernel is kernels._forward else tiles.backward
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants |= {"MASKED": size == 256} | ({"SCALED": factor != dtype} if kernel is kernels._backward else {})
    pointers = kernel.arg_names[: kernel.arg_names.index("n")]
    types = {name: "*fp32" if name in wide else f"*{names[dtype]}" for name in pointers} | {"live": "*i1"}
    types |= dict.fromkeys(("weight", "across"), f"*{names[factor]}")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    whole = [k for k, name in enumerate(kernel.arg_names) if name in (*pointers, "size")]
    source = ASTSource(kernel, signature, constants, {(k,): [["tt.divisibility", 16]] for k in whole})
    made = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    assert made.metadata.shared <= memory[chip], (chip, size, b, dtype, factor, options, made.metadata.shared)
"""


@kernel
@some_and_all
def test_the_kernels_compile_for_gpus_that_are_not_here(every):
    """With every kind of tile, in the memory that a program can have there."""
    pytest.importorskip("triton")
    assert_compiles(COMPILE, every)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(2, 32, 101, 256), (1, 70, 33, 512), (64, 3, 37, 24), (20, 128, 11, 256)], ids=str)
def test_on_a_gpu_it_equals_its_definition_at_the_sizes_of_the_studies(shape, mask):
    """Exact and with ten bits; into buffers of NaN."""
    from attnlab.models import recurrence_kernel as kernels

    s, b, n, d = shape
    gates, weight = torch.randn(s, b, n, 4 * d, device="cuda"), torch.randn(s, 4 * d, d, device="cuda") / (2 * d**0.5)
    gradient, h, c = torch.randn(s, n, b, d, device="cuda"), *torch.randn(2, s, b, d, device="cuda").tanh()
    live = masked(mask, s, b, n)
    made = {}
    for name, passes, ten_bits in (("definition", module, False), ("exact", kernels, False),
                                   ("ten bits", kernels, True)):  # fmt: skip
        outputs, cells = torch.full((2, s, n, b, d), torch.nan, device="cuda")
        active, delta = torch.full((2, s, n, b, 4 * d), torch.nan, device="cuda")
        on_h, on_c = torch.zeros(2, s, b, d, device="cuda")
        with torch.backends.cudnn.flags(allow_tf32=ten_bits):
            passes.forward(gates, weight, h, c, live, outputs, cells, active)
            passes.backward(gradient, weight, c, live, cells, active, delta, on_h, on_c)
        made[name] = [outputs, cells, looked_at(active, live), delta, on_h, on_c]
    for name, near in (("exact", 1e-5), ("ten bits", 5e-3)):
        for wanted, got in zip(made["definition"], made[name], strict=True):
            assert (got - wanted).norm() < near * wanted.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cuda_graph_holds_it(dtype):
    given = [x.to("cuda", dtype).requires_grad_() for x in arguments(2, dtype=torch.float32)]
    live = torch.stack([LIVE, LIVE.flip(1)]).cuda()

    def work():
        with exact():
            made = recurrence(*given, live)
            return [*(y.detach() for y in made), *torch.autograd.grad(sum(y.float().sin().sum() for y in made), given)]

    expected = work()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = work()
    graph.replay()
    for got, wanted in zip(replayed, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    in_double = recurrence(*(x.detach().double() for x in given), live)
    for got, wanted in zip(expected[:3], in_double, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=1e-5 if dtype == torch.float32 else 3e-2)


def test_the_setting_of_products_is_changed_for_a_gpu_alone_and_put_back(monkeypatch):
    class Settings:
        fp32_precision = "none"

    def fails(x):
        with module._match_nn_lstm_precision(x):
            raise ZeroDivisionError(settings.fp32_precision)

    settings = Settings()
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings)
    on_gpu, in_half = (SimpleNamespace(is_cuda=True, dtype=dtype) for dtype in (torch.float32, torch.half))
    for x, seen in ((on_gpu, "tf32"), (in_half, "none"), (torch.zeros(1), "none")):
        with pytest.raises(ZeroDivisionError, match=f"^{seen}$"):
            fails(x)
        assert settings.fp32_precision == "none"
    with torch.backends.cudnn.flags(allow_tf32=False), module._match_nn_lstm_precision(on_gpu):
        assert settings.fp32_precision == "none"


@kernel
@pytest.mark.parametrize("chip", [99, 163, 227])
def test_no_two_threads_write_one_cell_of_the_backward_pass(chip):
    kernels = pytest.importorskip("attnlab.models.recurrence_kernel")
    for size, b, factor in itertools.product((5, 24, 256, 512), (1, 16, 33, 128), (torch.float32, torch.float16)):
        tiles = kernels.Tiles.choose(1, b, size, torch.empty(0, dtype=factor), chip * 1024)
        assert tiles.backward["B"] * tiles.backward["U"] >= 32 * tiles.backward["num_warps"], (size, b, factor)
