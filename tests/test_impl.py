"""One meaning of impl: reference is weights(…) @ v, and what else computes mix equals it, with every gradient."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnlab.mechanisms import MECHANISMS, Mechanism, attention, visible_sums
from attnlab.mechanisms.kernels.launch import LAUNCHED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OWN_MIX = [name for name, kind in MECHANISMS.items() if "mix" in vars(kind) and kind.mix is not Mechanism.mix]
FUSED = [name for name in OWN_MIX if MECHANISMS[name].kernels]
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"mask": True, "causal": True},
    "grouped": {"groups": 2},
    "biased": {"biased": True, "mask": True},
    "placed": {"at": [6, 0, 3, 1, 1], "causal": True},
    "without noise": {"quiet": True, "mask": True},
}
CLOSE = {"nap": 2e-4}  # the gradient of a row with two visible keys is a difference of nearly equal numbers


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Five queries are several chunks of linear attention."""
    monkeypatch.setattr(visible_sums, "CHUNK", 2)


class Case:
    """Arguments of one layer with 4 heads, 5 queries and 7 keys."""

    def __init__(self, name, dtype, *, mask=False, causal=False, groups=4, biased=False, at=None, quiet=False):
        def draw(*shape):
            return torch.randn(*shape, dtype=dtype, device=DEVICE)

        self.name, self.dtype, self.seed = name, dtype, None if quiet else 3
        self.mask = torch.rand(2, 1, 5, 7, device=DEVICE) < 0.6 if mask else None  # some rows see nothing
        self.options = {"causal": causal, "at": None if at is None else torch.tensor(at, device=DEVICE)}
        built = attention(name, heads=4, head_dim=16)
        self.inputs = {"q": draw(2, built.query_heads, 5, 16), "k": draw(2, groups, 7, 16), "v": draw(2, groups, 7, 16)}
        if built.carries:
            self.inputs["carry"] = draw(2, built.carry_heads, 5, 7)
        if biased:
            self.inputs["bias"] = draw(built.query_heads, 5, 7)
        self.x, self.y = draw(2, 5, 64), draw(2, 7, 64)
        self.direction = draw(2, 4, 5, 16)

    def build(self, impl, dtype):
        torch.manual_seed(1)
        mechanism = attention(self.name, heads=4, head_dim=16, layer=1, impl=impl).to(DEVICE, dtype).eval()
        mechanism.sample_seed = self.seed
        return mechanism

    def read_sides(self, mechanism, dtype):
        return mechanism.query_side(self.x.to(dtype)), mechanism.key_side(self.y.to(dtype))

    def compute(self, impl, dtype):
        """Context, carry where it is defined, and the gradients of both by every argument and parameter."""
        mechanism = self.build(impl, dtype)
        leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in self.inputs.items()}
        q, k, v, carry, bias = (leaves.get(name) for name in ("q", "k", "v", "carry", "bias"))
        sides = self.read_sides(mechanism, dtype)
        context, z = mechanism(q, k, v, self.mask, carry, bias=bias, sides=sides, **self.options)
        loss, results = (context * self.direction.to(dtype)).sum(), {"context": context}
        if z is not None:
            results["carry"] = z.masked_fill(~mechanism.visible(q, k, self.mask, **self.options), 0.0)
            loss = loss + results["carry"].square().sum()
        leaves |= dict(mechanism.named_parameters())
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        found = zip(leaves, gradients, strict=True)
        return results | {f"gradient of {name}": x for name, x in found if x is not None}

    def assert_equal(self, impl, tolerance):
        """Compare with the definition in float64; the definition's own rounding errors are allowed twice."""
        exact, expected = (self.compute("reference", dtype) for dtype in (torch.float64, self.dtype))
        found = self.compute(impl, self.dtype)
        assert found.keys() == exact.keys()
        for name, x in exact.items():
            error, own = ((y[name] - x).norm() / x.norm().clamp_min(1e-2) for y in (found, expected))
            assert error < tolerance + 2 * own, f"{name}: {error:.1e}, the definition {own:.1e}"


@pytest.mark.parametrize("name", OWN_MIX)
@pytest.mark.parametrize("case", CASES)
def test_reference_is_weights_times_values(name, case, monkeypatch):
    """To the bit, and without any fused call."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    LAUNCHED.clear()
    case = Case(name, torch.float64, **CASES[case])
    mechanism, (q, k, v, *_) = case.build("reference", torch.float64), case.inputs.values()
    carry, options = case.inputs.get("carry"), {"bias": case.inputs.get("bias"), **case.options}
    options |= mechanism.give_sides(case.read_sides(mechanism, torch.float64))
    weights, _ = mechanism.weights(q, k, case.mask, carry, **options)
    context, _ = mechanism.mix(q, k, v, case.mask, carry, **options)
    assert torch.equal(context, weights @ v.repeat_interleave(4 // v.shape[1], 1))
    assert {"noise"} >= LAUNCHED


@pytest.mark.parametrize("name", OWN_MIX)
@pytest.mark.parametrize("case", CASES)
def test_auto_equals_the_reference(name, case):
    """In float64, which no kernel covers: by torch's fused attention, where the mechanism uses it."""
    Case(name, torch.float64, **CASES[case]).assert_equal("auto", 1e-12)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("case", ["padded", pytest.param("plain", marks=pytest.mark.slow)])
def test_fused_equals_the_reference(name, case):
    pytest.importorskip("triton")
    LAUNCHED.clear()
    Case(name, torch.float32, **CASES[case]).assert_equal("fused", CLOSE.get(name, 2e-5))
    assert LAUNCHED - {"noise"} == MECHANISMS[name].kernels


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")
@pytest.mark.parametrize("name", {MECHANISMS[name].kernels: name for name in FUSED}.values())
def test_kernels_run_inside_a_checkpoint(name):
    """Of each kernel, once: a checkpoint lets the backward pass read the saved tensors once."""
    pytest.importorskip("triton")
    mechanism = attention(name, heads=2, head_dim=16, impl="fused").to(DEVICE).eval()
    q, k = (torch.randn(1, h, 5, 16, device=DEVICE, requires_grad=True) for h in (mechanism.query_heads, 2))
    x = torch.randn(1, 5, 32, device=DEVICE)
    run = partial(mechanism, sides=(mechanism.query_side(x), mechanism.key_side(x)))
    outputs = [run(q, k, k)[0], checkpoint(run, q, k, k, use_reentrant=False)[0]]
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), q)[0] for x in outputs))


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if not kind.kernels])
def test_without_kernels_fused_is_refused(name):
    with pytest.raises(ValueError, match="no kernels"):
        attention(name, heads=2, head_dim=4, impl="fused")
    assert attention(name, heads=2, head_dim=4, impl="reference").impl == "reference"
