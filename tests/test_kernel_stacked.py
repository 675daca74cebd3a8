"""One call of a mechanism with stacked parameters computes what each member computes alone, noise and dropout too."""

import pytest
import torch
from kernel_cases import DEVICE, fill_memory_with_nan

from attnlab.mechanisms import Mechanism, attention
from attnlab.models.crew import Crew
from attnlab.models.member_mechanism import MemberMechanism

pytest.importorskip("triton")
from attnlab.mechanisms.kernels import coda, short_dagpam, softmax
from attnlab.mechanisms.kernels.noise import gaussian

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
SEEDS = (3, 5 << 40 | 7, 11)  # one for each member
DRAWS = torch.tensor([SEEDS, SEEDS[::-1]], device=DEVICE)  # seeds of noise and of dropout
EACH = 2  # examples of a member


def make_members(name, h, d, layer, dtype=torch.float32, **options):
    """Mechanisms that differ in their parameters, and one that has the parameters of all."""
    options = {"impl": "fused", "heads": h, "head_dim": d, "layer": layer} | options
    alone = [attention(name, **options) for _ in SEEDS]
    for mechanism in alone:
        for parameter in mechanism.parameters():
            torch.nn.init.normal_(parameter, std=0.8 * parameter.shape[-1] ** -0.5)
    members = MemberMechanism([each.to(DEVICE, dtype) for each in alone], Crew(SEEDS), ("decoder", "decoder"))
    copies = [attention(name, **options) for _ in SEEDS]
    for number, each in enumerate(copies):
        own = {key: x.detach()[number] for key, x in members.whole.named_parameters()}
        each.to(DEVICE, dtype).load_state_dict(own)
    return copies, members


def draw_case(mechanism, i, j, groups, layer):
    """Random q, k, v and carry as a joint projection leaves them, a mask that hides keys, and gradients."""
    h, d, b = mechanism.heads, mechanism.head_dim, EACH * len(SEEDS)
    q, k, v = (
        torch.randn(b, n, heads * d + 3, device=DEVICE)[..., 3:].unflatten(-1, (heads, d)).transpose(1, 2)
        for n, heads in ((i, h), (j, groups), (j, groups))
    )
    carry = torch.randn(b, mechanism.carry_heads, i, j, device=DEVICE) if layer else None
    mask = torch.rand(b, 1, 1, j, device=DEVICE) < 0.7
    return [q, k, v, mask, carry], torch.randn(b, h, i, d, device=DEVICE), torch.randn(b, 2 * h, i, j, device=DEVICE)


def change_type(x, dtype):
    """x in this type, if it is floating-point."""
    return x if x is None or x.dtype == torch.bool else x.to(dtype)


def compute(mechanism, inputs, *grads, causal, dtype=torch.float32):
    """Context, carry where visible, and the gradients of q, k, v, the carry and the parameters."""
    inputs, (grad, grad_z) = [change_type(x, dtype) for x in inputs], (change_type(x, dtype) for x in grads)
    q, k, v, mask, carry = (x if x is None or x.dtype == torch.bool else x.detach().requires_grad_() for x in inputs)
    context, z = mechanism(q, k, v, mask, carry, causal=causal)
    found, outputs = {"context": context}, [(context, grad)]
    if z is not None:
        seen = mechanism.visible(q, k, mask, causal=causal).expand(z.shape)
        found["z"] = z.masked_fill(~seen, 0.0)
        outputs.append((z, grad_z[:, : z.shape[1]].masked_fill(~seen, torch.nan)))  # hidden: never read
    wanted = {"q": q, "k": k, "v": v, "carry": carry} | dict(mechanism.named_parameters())
    wanted = {name: x for name, x in wanted.items() if x is not None and x.requires_grad}
    results, gradients = zip(*outputs, strict=True)
    grads = torch.autograd.grad(results, list(wanted.values()), gradients)
    return found | {f"d{name}": x for name, x in zip(wanted, grads, strict=True)}


SLOW_ON_CPU = () if DEVICE == "cuda" else pytest.mark.slow  # by the interpreter, which is slow
CASES = {  # name, layer, queries and keys, causal, options
    "coda": ("coda", 1, (7, 11), True, {}),
    "coda, first layer": ("coda", 0, (7, 11), False, {}),
    "coda, paper": ("coda", 2, (9, 5), False, {"variant": "paper", "alpha": 2}),
    "dagpam": ("dagpam", 0, (13, 9), False, {}),
    "dagpam, signs and heads": ("dagpam", 0, (5, 21), True, {"tied": False, "initial": (0.5, 2.0), "per_head": True}),
    "dagpam, shared": ("dagpam", 0, (7, 7), True, {"shared": True}),
    "realformer+dagpam": ("realformer+dagpam", 1, (5, 7), True, {}),
    "coda+dagpam": ("coda+dagpam", 1, (5, 7), False, {}),
    "softmax": ("softmax", 0, (7, 11), True, {}),
    "xsa": ("xsa", 0, (7, 11), True, {}),
    "realformer": ("realformer", 1, (7, 11), True, {}),
    "coda-cs": ("coda-cs", 0, (7, 11), False, {}),
    "alibi": ("alibi", 0, (7, 11), True, {}),
    "sigmoid": ("sigmoid", 0, (7, 11), True, {}),
    "softmax1": ("softmax1", 0, (9, 5), False, {}),
    "softpick": ("softpick", 0, (7, 11), False, {}),
    "cog": ("cog", 0, (7, 11), False, {}),
    "non": ("non", 0, (7, 11), True, {}),
}


def assert_alone(name, layer, sizes, options, *, causal, rate=0.2, h=4, d=5, dtype=torch.float32):
    """Compare one call with a call for each member, from the same seeds."""
    alone, members = make_members(name, h, d, layer, dtype, dropout=rate, **options)
    whole = members.whole.train()
    inputs, *grads = draw_case(whole, *sizes, 2, layer)
    slack = (2e-5, 5e-5) if dtype == torch.float32 else (2e-2, 2e-2)  # of sums in another order
    assert whole.takes_members(*inputs[:3], None, None)
    members.take_seeds(DRAWS)
    together = compute(whole, inputs, *grads, causal=causal, dtype=dtype)
    for number, mechanism in enumerate(alone):
        mechanism.take_seeds(DRAWS[:, number : number + 1])
        own = slice(number * EACH, (number + 1) * EACH)
        parts = [None if x is None else x[own] for x in inputs]
        expected = compute(mechanism.train(), parts, *(x[own] for x in grads), causal=causal, dtype=dtype)
        for key, y in expected.items():
            got = together[key][own] if together[key].shape != (len(SEEDS), *y.shape) else together[key][number]
            message = f"{key}: {{}}".format
            torch.testing.assert_close(
                got, y, atol=slack[0] * y.abs().max().clamp_min(1.0).item(), rtol=slack[1], msg=message
            )


SOME = ("coda", "dagpam", "softmax", "realformer", "sigmoid", "non")  # the rest on a GPU, or in make test-slow


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in SOME else SLOW_ON_CPU) for name, case in CASES.items()],
)
def test_one_call_computes_what_members_compute_alone(case):
    name, layer, sizes, causal, options = case
    assert_alone(name, layer, sizes, options, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(32, 32), (24, 40), (64, 61)], ids=str)
@pytest.mark.parametrize("name", ["coda", "dagpam", "coda+dagpam"])
def test_sizes_of_training_in_half_precision(name, sizes):
    layer = int("coda" in name)
    assert_alone(name, layer, sizes, {}, causal=sizes[0] == 32, d=64, dtype=torch.bfloat16)


def test_sigma_wider_than_a_multiprocessor(monkeypatch):
    monkeypatch.setattr(coda, "MOST_HEADS", 2)
    assert_alone("coda", 1, (3, 6), {}, causal=True)


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("name", [pytest.param("dagpam", marks=SLOW_ON_CPU), "softmax"])
def test_long_rows(name, rate, monkeypatch):
    """By torch's attention, or with dropout by the kernels in linear memory."""
    monkeypatch.setattr(short_dagpam, "LONGEST", {})
    monkeypatch.setattr(softmax, "LONGEST", 4)
    monkeypatch.setattr(Mechanism, "wants_kernels", lambda *_: True)
    assert_alone(name, 0, (7, 11), {"impl": "auto"}, causal=True, rate=rate)


def test_sharing_the_gradient_among_programs(monkeypatch):
    """With more members than programs, and with many rows for each."""
    for programs in (2, 7):
        monkeypatch.setattr(coda, "PROGRAMS", programs)
        assert_alone("coda", 1, (9, 5), {}, causal=False, rate=0.0)


def test_the_noise_of_members_is_that_of_their_seeds():
    rows = torch.arange(3, 8, device=DEVICE)
    drawn = gaussian(torch.tensor(SEEDS, device=DEVICE), 2, 2 * len(SEEDS), 3, rows, 7, torch.float32)
    alone = [gaussian(torch.tensor(seed, device=DEVICE), 2, 2, 3, rows, 7, torch.float32) for seed in SEEDS]
    assert torch.equal(drawn, torch.cat(alone))


@pytest.mark.parametrize("name", ["coda", "dagpam"])
def test_members_take_one_call_where_kernels_cover_it(name, monkeypatch):
    """Else a call each: with queries placed by at=, which CODA's kernels do not cover."""
    alone, members = make_members(name, 4, 5, 1)
    inputs, grad, grad_z = draw_case(members.whole, 7, 7, 2, 1 if name == "coda" else 0)
    expected = compute(members.whole.eval(), inputs, grad, grad_z, causal=True)
    calls = []
    monkeypatch.setattr(MemberMechanism, "_call", lambda *_, **__: calls.append(1))
    context = members.eval()(*inputs, causal=True)[0]
    assert not calls
    torch.testing.assert_close(context, expected["context"])
    monkeypatch.undo()
    members.whole.impl = "reference"
    for number, (mechanism, own) in enumerate(zip(alone, members(*inputs, causal=True)[0].chunk(3), strict=True)):
        parts = [None if x is None else x.chunk(3)[number] for x in inputs]
        torch.testing.assert_close(own, mechanism.eval()(*parts, causal=True)[0], atol=1e-5, rtol=1e-5)
    assert members.whole.members == len(SEEDS)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself does it
@pytest.mark.parametrize("name", ["coda", "dagpam", "sink"])
def test_torch_compile_takes_members_whole(name):
    """In one call; those of sink one after another."""
    parts = [attention(name, heads=4, head_dim=5, layer=1, impl="fused").to(DEVICE) for _ in SEEDS]
    members = MemberMechanism(parts, Crew(SEEDS), ("decoder", "decoder")).eval()
    inputs, *_ = draw_case(parts[0], 7, 7, 2, int(name == "coda"))
    compiled = torch.compile(members, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs)[0], members(*inputs)[0])


@pytest.mark.parametrize("name", ["coda", "dagpam", "coda+dagpam", "realformer", "softmax", "sigmoid"])
def test_every_element_is_written(name, monkeypatch):
    """What the kernels write starts as NaN; none may be left."""
    layer = int("coda" in name)
    _, members = make_members(name, 4, 5, layer)
    inputs, grad, grad_z = draw_case(members.whole, 5, 9, 4, layer)
    fill_memory_with_nan(monkeypatch)
    for key, x in compute(members.whole.eval(), inputs, grad, grad_z, causal=False).items():
        assert x.isfinite().all(), key
