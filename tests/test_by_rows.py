"""Attention by bands of queries: equal to the definition, every gradient too, in linear memory."""

import pytest
import torch
from gpu_compile import assert_compiles, some_and_all
from largest_tensor import LargestTensor

from attnlab.mechanisms import MECHANISMS, Mechanism, attention, by_rows, sliding_window
from attnlab.mechanisms.laws import LAWS, judge_law
from attnlab.mechanisms.mechanism import logits, masked_softmax
from attnlab.mechanisms.noise import philox

NAMES = [name for name, kind in MECHANISMS.items() if not (kind.carries and kind.carry_of == "pairs")]
CALLS = {name: set(MECHANISMS[name].mix.__code__.co_names) for name in NAMES}
BANDED = [name for name, called in CALLS.items() if called & {"mix_by_rows", "needs_bands", "count_band_rows"}]
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"causal": True, "mask": (2, 1, 1, 13)},
    "fewer queries": {"causal": True, "rows": 9, "mask": (2, 1, 9, 13)},
    "biased": {"biased": True, "mask": (13, 13)},
    "placed": {"causal": True, "at": [*range(6, 13), *range(6)]},
}


@pytest.fixture
def _small_bands(monkeypatch):
    """A band of 2 examples, 4 heads and 13 keys has three queries."""
    monkeypatch.setattr(by_rows, "LOGITS", 3 * 2 * 4 * 13)


def compute(name, impl, *, rows=13, mask=None, biased=False, at=None, causal=False, dtype=torch.float64):
    """Context, and its gradients by every argument and parameter."""
    torch.manual_seed(1)
    m = attention(name, heads=4, head_dim=8, impl=impl).to(dtype).eval()
    for parameter in m.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    shapes = {"q": (2, m.query_heads, rows, 8), "k": (2, 2, 13, 8), "v": (2, 2, 13, 8), "x": (2, rows, 32)}
    shapes |= {"y": (2, 13, 32)} | ({"bias": (m.query_heads, rows, 13)} if biased else {})
    given = {key: torch.randn(shape, dtype=dtype).requires_grad_() for key, shape in shapes.items()}
    seen, at = None if mask is None else torch.rand(mask) < 0.7, None if at is None else torch.tensor(at)
    sides = m.query_side(given["x"]), m.key_side(given["y"])
    options = {"causal": causal, "at": at, "bias": given.get("bias"), "sides": sides}
    context, _ = m(given["q"], given["k"], given["v"], seen, **options)
    leaves = given | {key: p for key, p in m.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        (context * torch.randn_like(context)).sum(), list(leaves.values()), allow_unused=True
    )
    return {"context": context} | {key: g for key, g in zip(leaves, gradients, strict=True) if g is not None}


@pytest.mark.usefixtures("_small_bands")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_bands_equal_the_definition(name, case):
    found, expected = (compute(name, impl, **CASES[case]) for impl in ("auto", "reference"))
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(found[key], x, rtol=1e-10, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


class OwnMechanism(Mechanism):
    """A mechanism as a user writes it."""

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        return masked_softmax(logits(q, k, self.scale, bias), self.visible(q, k, mask, causal=causal, at=at)), None


class NotingMechanism(OwnMechanism):
    """Notes the queries and keys of each call."""

    def weights(self, q, k, *given, **options):
        vars(self).setdefault("calls", []).append((q.shape[2], k.shape[2]))
        return super().weights(q, k, *given, **options)


@pytest.mark.parametrize("law", LAWS)
def test_laws_of_a_users_mechanism_by_bands(law, monkeypatch):
    monkeypatch.setattr(by_rows, "LOGITS", 2 * 2 * 3 * 7)
    assert judge_law(law, lambda layer: OwnMechanism(3, 6, layer=layer)).holds is not False


@pytest.mark.usefixtures("_small_bands")
def test_causal_bands_do_not_read_later_keys_and_one_band_is_not_computed_again(monkeypatch):
    q, k, v = torch.randn(3, 2, 4, 13, 8).requires_grad_()
    mechanism = NotingMechanism(4, 8)
    mechanism(q, k, v, causal=True)[0].sum().backward()
    bands = [(3, 3), (3, 6), (3, 9), (3, 12), (1, 13)]
    assert mechanism.calls == bands + bands[::-1]
    monkeypatch.setattr(by_rows, "LOGITS", 13 * 2 * 4 * 13)
    mechanism.calls.clear()
    mechanism(q, k, v, causal=True)[0].sum().backward()
    assert mechanism.calls == [(13, 13)]


@pytest.mark.parametrize("name", BANDED)
def test_memory_is_linear(name, monkeypatch):
    """With twice the tokens no tensor has more than twice the numbers, while there are four times the pairs."""
    monkeypatch.setattr(by_rows, "LOGITS", 2**13)
    sizes = [measure_largest(name, n) for n in (128, 256)]
    assert sizes[1] <= 2 * sizes[0]


def measure_largest(name, n, **options):
    mechanism = attention(name, heads=2, head_dim=4, **options)
    q = torch.randn(1, mechanism.query_heads, n, 4, requires_grad=True)
    k, v, x = torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4), torch.randn(1, n, 8)
    with LargestTensor() as largest:
        sides = mechanism.query_side(x), mechanism.key_side(x)
        mechanism(q, k, v, causal=True, sides=sides)[0].sum().backward()
    return largest.numbers


@pytest.mark.usefixtures("_small_bands")
def test_dropout_is_the_same_in_both_passes_and_differs_between_bands():
    """With V = 1 the context is the weights that were kept, and the gradient of V their sum."""
    mechanism = OwnMechanism(4, 13, dropout=0.25).train()
    q, k = torch.randn(2, 2, 4, 13, 13)
    v = torch.eye(13).expand(2, 4, 13, 13).clone().requires_grad_()
    context = mechanism(q, k, v)[0]
    kept = context.detach() / OwnMechanism(4, 13)(q, k, v)[0].detach()
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 4 / 3))
    assert abs((kept > 0).float().mean() - 0.75) < 4 * (0.75 * 0.25 / kept.numel()) ** 0.5
    assert not torch.equal(kept[:, :, :3], kept[:, :, 3:6])
    torch.testing.assert_close(torch.autograd.grad(context.sum(), v)[0], context.detach().sum(2)[..., None] + 0 * v)
    assert not torch.equal(context, mechanism(q, k, v)[0])


def test_bands_compile_as_one_graph(monkeypatch):
    monkeypatch.setattr(by_rows, "LOGITS", 7 * 2 * 4 * 13)
    mechanism = OwnMechanism(4, 8, dropout=0.25).train()
    q, k, v = (torch.randn(2, 4, 13, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(mechanism.eval(), fullgraph=True, backend="aot_eager")
    expected, found = (f(q, k, v, causal=True)[0] for f in (mechanism, compiled))
    torch.testing.assert_close(found, expected)
    for x, y in zip(*(torch.autograd.grad(c.sum(), (q, k, v)) for c in (found, expected)), strict=True):
        torch.testing.assert_close(x, y)
    with torch.no_grad():
        torch.testing.assert_close(mechanism(q, k, v, causal=True)[0], expected)


@pytest.mark.usefixtures("_small_bands")
def test_gradients_of_keys_are_summed_in_float32():
    """In bfloat16 the sum over bands is the float32 sum, rounded once."""
    q, k, v = (torch.randn(2, 4, 13, 8).bfloat16().requires_grad_() for _ in range(3))
    context = OwnMechanism(4, 8)(q, k, v)[0]
    grad = torch.randn_like(context)
    summed = torch.autograd.grad(context, v, grad)[0]
    parts = [slice(first, first + 3) for first in range(0, 13, 3)]
    weights = OwnMechanism(4, 8).weights(q, k)[0]
    expected = sum((weights[:, :, part].mT @ grad[:, :, part]).float() for part in parts).bfloat16()
    assert torch.equal(summed, expected)


@pytest.mark.usefixtures("_small_bands")
def test_torch_func_maps_over_the_definition():
    mechanism = OwnMechanism(4, 8)
    q = torch.randn(3, 2, 4, 13, 8)
    mapped = torch.func.vmap(lambda x: mechanism(x, x, x, causal=True)[0])(q)
    torch.testing.assert_close(mapped, torch.stack([mechanism(x, x, x, causal=True)[0] for x in q]))


@pytest.mark.kernel
def test_dropout_kernel_draws_by_the_seed_and_has_its_rate():
    first, again, other = (draw_map(3, 5, 7, 31, seed=seed) for seed in (2**61 + 5, 2**61 + 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert {round(x, 5) for x in first.unique().tolist()} == {0.0, 1.25}
    assert abs((first > 0).float().mean() - 0.8) < 4 * (0.8 * 0.2 / first.numel()) ** 0.5


def draw_map(*shape, seed=5 << 40 | 3, first=0):
    """Dropout of weights of this shape, by the kernel."""
    pytest.importorskip("triton")
    from attnlab.mechanisms.kernels.dropout import fill_kept

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return fill_kept(torch.full(shape, torch.nan, device=device), torch.tensor([seed], device=device), 0.2, first)


@pytest.mark.kernel
def test_dropout_kernel_draws_by_the_head_the_row_and_the_key_alone():
    """So neither padding nor the size of bands changes what is dropped."""
    whole = draw_map(2, 3, 8, 300)
    assert torch.equal(whole[:, :, :5, :5], draw_map(2, 3, 5, 5))
    assert torch.equal(whole[:, :, 5:, :257], draw_map(2, 3, 3, 257, first=5))
    i, quad, head = torch.arange(8)[:, None], torch.arange(75), torch.arange(6)[:, None, None]
    counters = (x.expand(6, 8, 75) for x in (quad, i, head, torch.zeros(())))
    words = torch.stack(philox(torch.tensor(5 << 40 | 3), *(x.long() for x in counters)), dim=-1)  # of keys 4·quad …
    uniform = torch.minimum(words, 2**32 - 1 - words).flatten(2) / 2**31  # Triton's
    assert torch.equal(whole.view(6, 8, 300).cpu() > 0, uniform >= 0.2)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels.dropout import _fill_kept
types = {"seed": "*i64", "out": "*bf16", "rate": "fp32", "BI": "constexpr", "BJ": "constexpr"}
signature = {name: types.get(name, "i32") for name in _fill_kept.arg_names}
for wide in (256, 16) if EVERY else (256,):
    source = ASTSource(_fill_kept, signature, {"BI": 2048 // wide, "BJ": wide})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.kernel
@some_and_all
def test_dropout_kernel_compiles_for_a_gpu_that_is_not_here(every):
    pytest.importorskip("triton")
    assert_compiles(COMPILE, every)


def test_weights_of_several_models_have_no_common_draw():
    with pytest.raises(ValueError, match="one seed of dropout, got 2"):
        by_rows.draw_kept(torch.rand(2, 3, 5, 7), torch.tensor([3, 5]), 0.2, 0)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_by_chunks_equal_the_definition(size, sinks, causal, monkeypatch):
    """13 and 16 tokens are several chunks; padding hides keys in the middle, and first ones."""
    monkeypatch.setattr(sliding_window, "CHUNK", 2)
    for n in (13, 16):
        q, k, v = (torch.randn(2, h, n, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
        direction = torch.randn_like(q)
        for mask in (None, torch.rand(2, 1, 1, n) < 0.6):
            found, expected = [], []
            for impl, results in (("auto", found), ("reference", expected)):
                mechanism = attention("sliding-window", heads=4, head_dim=4, size=size, sinks=sinks, impl=impl)
                context = mechanism(q, k, v, mask, causal=causal)[0]
                results += [context, *torch.autograd.grad(context, (q, k, v), direction)]
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_windows_need_linear_memory(monkeypatch):
    monkeypatch.setattr(sliding_window, "CHUNK", 8)
    sizes = [measure_largest("sliding-window", n, size=8, sinks=2) for n in (128, 256)]
    assert sizes[1] <= 2 * sizes[0]
