"""Members' layers that write their gradients into one flat matrix: equal to autograd's, in the order of checkpoints."""

from dataclasses import replace

import pytest
import torch
from small_models import LM, TRANSLATOR, made

from attnlab.models import affine, member_maps
from attnlab.models.crew import Crew
from attnlab.models.members import MemberLinear, MemberNorm, MemberReadout, stack_members
from attnlab.training.member_step import EagerMembers, MemberFlat, RowOptimisers
from attnlab.training.objective import Objective
from attnlab.training.step import Flat

MEMBERS = 3
CASES = {"tied": replace(LM, tie="output"), "translator": TRANSLATOR, "no bias": replace(LM, attention_bias=False)}


def stack(config, **changes):
    """Return the models, and all of them as one in float64."""
    models = [made(config, "softmax", **changes).double() for _ in range(MEMBERS)]
    crew = Crew(range(MEMBERS))
    crew.sizes = {side: [(2, 5)] * MEMBERS for side in ("encoder", "decoder")}
    return models, stack_members(models, crew)


def draw(config):
    torch.manual_seed(7)
    count = 2 if config.model == "translator" else 1
    return [torch.randint(1, 19, (2 * MEMBERS, 5)) for _ in range(count)]


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_layers_write_the_gradients_of_autograd(config):
    _, plain = stack(config)
    _, written = stack(config)
    written.load_state_dict(plain.state_dict())
    torch.set_default_dtype(torch.float64)
    try:
        flat = MemberFlat(written, MEMBERS, torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
    flat.fresh.fill_(torch.nan)  # what a layer leaves out stays visible
    for model in (plain, written):
        model(*draw(config)).square().sum().backward()
    left = [name for name, p in written.named_parameters() if p.grad is not None]
    assert all("words" in name or "norm" in name for name in left), left  # norms are written by kernels
    flat.gather()
    assert not any(p.grad is not None for p in written.parameters())
    named = dict(plain.named_parameters())
    for member in range(MEMBERS):
        for name, got in flat.views(flat.fresh, member).items():
            torch.testing.assert_close(got, named[name].grad[member], rtol=1e-10, atol=1e-12)


def test_queries_keys_and_values_are_one_product_without_joining_weights(monkeypatch):
    _, model = stack(LM)
    flat = MemberFlat(model, MEMBERS, torch.float32)
    join, joined = torch.cat, []
    monkeypatch.setattr(torch, "cat", lambda x, *y, **z: (joined.append(x[0]), join(x, *y, **z))[1])
    model.float()(*draw(LM))
    assert not [x for x in joined if isinstance(x, torch.nn.Parameter)]
    (block, *_) = model.all_blocks()
    assert block.attention.joint.__self__.weight.data_ptr() == block.attention.query.weight.data_ptr()
    assert flat.work.data_ptr() <= block.attention.value.weight.data_ptr()


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_rows_are_kept_in_the_order_of_an_ordinary_model(config):
    models, stacked = stack(config)
    flat = MemberFlat(stacked, MEMBERS, torch.float32)
    kept = flat.to_ordinary(flat.master)
    for row, model in zip(kept, models, strict=True):
        assert torch.equal(row, Flat(model.float(), torch.float32).master.data)
    assert torch.equal(flat.from_ordinary(kept), flat.master)


def test_several_batches_of_an_update_add_up(monkeypatch):
    """Also in a second update, and in one of a single batch."""
    _, model = stack(LM)
    flat = MemberFlat(model, MEMBERS, torch.float32)
    config = type("Config", (), {"optimiser": "adam", "lr": 0.0, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0})
    seen = []
    rows = RowOptimisers(flat, [config] * MEMBERS)
    monkeypatch.setattr(rows, "step", lambda gradient, factors: (seen.append(gradient.clone()), flat.grad.zero_()))
    stepper = EagerMembers(Objective(model, smoothing=[0.0] * MEMBERS), flat, rows, clips=[0.0] * MEMBERS)
    (tokens,) = draw(LM)
    for batches in (1, 3, 2):
        for _ in range(batches):
            stepper.accumulate([tokens], tokens, torch.ones(MEMBERS))
        stepper.apply()
    for count, got in zip((3, 2), seen[1:], strict=True):
        torch.testing.assert_close(got, count * seen[0])


KINDS = {"layer": torch.nn.LayerNorm(6), "rms": torch.nn.RMSNorm(6, eps=1e-5)}


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("kind", [*KINDS, "linear", "readout"])
def test_kernels_write_where_the_rows_lie_apart(kind, twice, monkeypatch):
    pytest.importorskip("triton")
    for module in (affine, member_maps, __import__("attnlab.models.members", fromlist=["x"])):
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def parameter(*shape):
        return torch.nn.Parameter(torch.randn(MEMBERS, *shape, device=device))

    if kind in KINDS:
        layer = MemberNorm(KINDS[kind], parameter(6), parameter(6) if kind == "layer" else None)
    else:
        weight, bias = parameter(6, 6), parameter(6)
        layer = MemberLinear(weight, bias, 1.0) if kind == "linear" else MemberReadout(weight, bias)
    x = torch.randn(MEMBERS * 2, 5, 6, device=device, requires_grad=True)
    grad = torch.randn_like(x)

    def run():
        y = layer(layer(x)) if twice else layer(x)
        y.backward(grad)
        dx, x.grad = x.grad, None
        return y, dx

    expected = run()
    right = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    flat = MemberFlat(layer, MEMBERS, torch.float32)
    flat.fresh.fill_(torch.nan)
    got = run()
    assert all(p.grad is None for p in layer.parameters())
    flat.gather()
    torch.testing.assert_close(got, expected)
    for member in range(MEMBERS):
        for name, view in flat.views(flat.fresh, member).items():
            torch.testing.assert_close(view, right[name][member], rtol=1e-5, atol=1e-5)


def write_apart(*shapes):
    """Return parameters (s,…), Maps of layers with them, and the views that it writes, filled with NaN."""
    layers = [MemberLinear(*(torch.nn.Parameter(torch.randn(MEMBERS, *x)) for x in own), 1.0) for own in shapes]
    weight, bias = (torch.cat([getattr(x, kind).detach() for x in layers], dim=1) for kind in ("weight", "bias"))
    grads = [
        torch.full((MEMBERS, x[0].numel() + 3), torch.nan)[:, 2:-1].unflatten(1, x.shape[1:]) for x in (weight, bias)
    ]
    return layers, member_maps.Maps(layers, [weight, bias], grads)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["rectify", "project", "add_dropped"])
def test_biases_are_added_and_summed_in_passes_that_read_the_numbers_anyway(kind, passes, monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter reads the CPU")
    from attnlab.models import dropout_kernel, member_sums_kernel

    monkeypatch.setattr(member_maps, "has_kernels", lambda x: True)
    monkeypatch.setattr(member_sums_kernel, "TILE", 64)
    monkeypatch.setattr(dropout_kernel, "TILE", 64)
    torch.manual_seed(2)
    shapes = [((7, 5), (7,)), ((19, 5), (19,)), ((3, 5), (3,))] if kind == "project" else [((19, 5), (19,))]
    layers, maps = write_apart(*shapes)
    x, stream = torch.randn(MEMBERS * 2, 4, 5, requires_grad=True), torch.randn(MEMBERS * 2, 4, 19, requires_grad=True)
    seeds, rates = torch.tensor([3, 5, 8]), torch.tensor([0.5, 0.0, 0.2])
    kept = dropout_kernel.drop(torch.ones_like(stream), None, seeds, rates)
    plain = [layer(x) for layer in layers]
    if kind == "rectify":
        expected, compute = [plain[0].relu()], lambda: [maps.rectify(x)]
    elif kind == "project":
        expected, compute = plain, lambda: maps.project(x)
    else:
        maps.defers = True
        expected, compute = [stream + plain[0] * kept], lambda: [maps.add_dropped(stream, maps(x), seeds, rates)]
    grads = [torch.randn_like(y) for y in expected]
    inputs = [x, stream] if kind == "add_dropped" else [x]
    parameters = [p for layer in layers for p in layer.parameters()]
    right = torch.autograd.grad(expected, [*inputs, *parameters], grads)
    for _ in range(passes):
        got = compute()
        found = torch.autograd.grad(got, inputs, grads)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, right[: len(inputs)], rtol=1e-5, atol=1e-5)
    weights, biases = (torch.cat(right[len(inputs) + n :: 2], dim=1) for n in range(2))
    torch.testing.assert_close(maps.weight_grad, passes * weights, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(maps.bias_grad, passes * biases, rtol=1e-5, atol=1e-5)


def test_a_deferred_bias_is_added_once_in_training_and_in_evaluation():
    config = replace(LM, dropout=0.5)
    _, plain = stack(config)
    _, linked = stack(config)
    linked.load_state_dict(plain.state_dict())
    MemberFlat(linked.float(), MEMBERS, torch.float32)
    (block, *_) = linked.all_blocks()
    assert block.feed_forward_residual.dropout.bias is block.feed_forward.output.maps
    assert block.feed_forward.rectified is not None
    for model in (plain.float(), linked):
        for p in model.parameters():
            p.data.add_(0.1)  # biases start as 0
    for training in (False, True):
        results = []
        for model in (plain, linked):
            (crew,) = {part.crew for part in model.modules() if hasattr(part, "crew")}
            crew.states = [torch.Generator().manual_seed(seed).get_state() for seed in range(MEMBERS)]
            results.append(model.train(training)(*draw(LM)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
