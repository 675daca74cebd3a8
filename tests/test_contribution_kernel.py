"""The passes of the norms: equal to plain PyTorch at any sizes, strides, types and signs, and to the vectors."""

from dataclasses import replace

import pytest
import torch
from gpu_compile import assert_compiles, some_and_all
from materialised import vectors
from properties import given, settings, st

from attnlab.analysis.contribution import norms
from attnlab.records.record import Layer, apply_turning

pytest.importorskip("triton")
from attnlab.analysis import contribution_kernel as kernel

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter's bf16 is wrong


def made(b, h, i, j, d, e, *, dtype=torch.float32, signed=False) -> Layer:
    """A layer whose tensors are slices of others, none contiguous."""
    logits = torch.randn(b, i, h, j + 2, device=DEVICE)[..., 2:].transpose(1, 2)
    weights = (logits if signed else logits.softmax(-1)).to(dtype)
    values = torch.randn(b, j, h, d + 1, device=DEVICE, dtype=dtype)[..., 1:].transpose(1, 2)
    projection = (torch.randn(h, e, d, device=DEVICE) / e**0.5).mT
    context = (weights.float() @ values.float()).to(dtype)
    states = torch.zeros(b, i, e, device=DEVICE)
    mask = torch.ones(b, 1, 1, j, dtype=torch.bool, device=DEVICE)
    return Layer("encoder-self", 0, "layer", weights, values, context, context, projection, None, states, states, mask)


def turned(layer, turning) -> Layer:
    return replace(layer, turning=turning, mixed=apply_turning(turning, layer.context))


def assert_same(layer):
    ours, plain = norms(layer, impl="fused"), norms(layer, impl="reference")
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours.value, plain.value, **close)
    for name in ("vector", "head", "layer"):  # squares: a root would show the rounding of what cancels
        torch.testing.assert_close(getattr(ours, name) ** 2, getattr(plain, name) ** 2, **close)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 2),
    h=st.integers(1, 5),
    i=st.integers(1, 37),
    j=st.integers(1, 37),
    d=st.integers(1, 19),
    e=st.integers(1, 71),
    signed=st.booleans(),
)
def test_they_equal_plain_pytorch(dtype, seed, b, h, i, j, d, e, signed):
    torch.manual_seed(seed)
    assert_same(made(b, h, i, j, d, e, dtype=dtype, signed=signed))


def test_they_equal_plain_pytorch_where_a_norm_cancels_to_nearly_nothing():
    torch.manual_seed(124)
    assert_same(made(1, 2, 1, 6, 7, 1, dtype=torch.float16))  # a norm of 0.0008, whose square is rounded


@pytest.mark.parametrize("shape", [(1, 12, 67, 71, 64, 131), (2, 3, 3, 5, 128, 7), (1, 1, 33, 3, 150, 40)])
def test_they_equal_plain_pytorch_beyond_a_tile(shape):
    assert_same(made(*shape, signed=True))


def test_they_equal_the_vectors_themselves():
    layer = made(2, 3, 5, 7, 11, 13, signed=True)
    every, found = vectors(layer), norms(layer, impl="fused")  # (b,h,i,j,e)
    torch.testing.assert_close(found.head.double(), every.norm(dim=-1).double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.layer.double(), every.sum(1).norm(dim=-1).double(), rtol=1e-5, atol=1e-6)


def test_a_turning_by_one_number_joins_the_weights():
    layer = made(2, 3, 9, 11, 5, 13)
    layer = turned(layer, torch.randn(2, 3, 9, 1, device=DEVICE))
    assert_same(layer)
    found = norms(layer, impl="fused").head
    torch.testing.assert_close(found, vectors(layer).norm(dim=-1).float(), rtol=1e-4, atol=1e-4)


def test_a_turning_of_vectors_is_left_to_pytorch():
    layer = made(2, 3, 9, 11, 5, 13)
    layer = turned(layer, torch.randn_like(layer.context))
    torch.testing.assert_close(norms(layer).layer, vectors(layer).sum(1).norm(dim=-1).float(), rtol=1e-4, atol=1e-4)


def test_heads_that_share_values_and_weights_made_in_ranges():
    layer = made(2, 4, 19, 7, 8, 16)
    assert_same(replace(layer, grouped_values=layer.values[:, :2]))
    weights = layer.weights
    lazy = replace(layer, attended=lambda start, stop: weights[:, :, start:stop])
    whole, parts = norms(layer, impl="fused"), norms(lazy, impl="fused")
    assert torch.equal(whole.head, parts.head)
    joined = torch.cat([part.layer for _, part in parts.chunks(5)], dim=1)
    assert torch.equal(whole.layer, joined)


def test_every_element_is_written_and_what_is_no_number_stays_none(monkeypatch):
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: empty(*a, **o).fill_(float("nan")))
    layer = made(2, 3, 35, 37, 5, 70)
    found = norms(layer, impl="fused")
    assert all(bool(x.isfinite().all()) for x in (found.vector, found.head, found.layer))
    layer.weights[1, 2, 34, 36] = torch.nan
    found = norms(layer, impl="fused")
    assert found.head.isnan().nonzero().tolist() == [[1, 2, 34, 36]]
    assert found.layer.isnan().nonzero().tolist() == [[1, 34, 36]]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.analysis import contribution_kernel as kernel
tiles = {"rows": kernel.QUERIES, "across": kernel.ACROSS}
for kind in ("fp32", "bf16", "fp16") if EVERY else ("fp32",):  # it needs the most memory
    for function, fixed in (
        *((kernel._vector, {"tile": kernel.KEYS, "padded": d, "columns": e}) for d, e in kernel.COLUMNS.items()),
        (kernel._head, tiles), (kernel._layer, tiles),
    ):
        types = {"weights": f"*{kind}", "values": f"*{kind}", "projection": f"*{kind}"}
        types |= dict.fromkeys(("size", "gram", "out"), "*fp32") | dict.fromkeys(fixed, "constexpr")
        signature = {name: types.get(name, "i32") for name in function.arg_names}
        made = triton.compile(ASTSource(function, signature, fixed), target=GPUTarget("cuda", 86, 32))
        assert made.metadata.shared <= 99 * 1024, (fixed, made.metadata.shared)
"""


@some_and_all
def test_they_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)


def test_what_is_not_covered_is_said(monkeypatch):
    layer = made(1, 2, 3, 5, 4, 8)
    for changed, reason in (
        (replace(layer, grouped_values=layer.values.double()), "torch.float64"),
        (made(1, 2, 3, 5, 257, 8), "a head size of 257"),
        (replace(layer, output_weight=layer.output_weight.clone().requires_grad_()), "gradients"),
        (made(1, 2, 0, 5, 4, 8), "an empty tensor"),
        (turned(layer, torch.rand_like(layer.context)), "a turning"),
    ):
        with pytest.raises(ValueError, match=f"cover {reason}"):
            norms(changed, impl="fused")
    with pytest.raises(ValueError, match=r"impl must be .* 'fast'"):
        norms(layer, impl="fast")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernel.find_gap(torch.rand(1, 2, 3, 5)) == "tensors on cpu"


@pytest.mark.gpu
def test_they_can_be_captured_and_are_what_a_gpu_takes():
    layer = made(1, 12, 512, 512, 64, 768)
    want = norms(layer)
    assert want.keys.kernel is kernel
    want = [want.vector, want.head, want.layer]
    assert_same(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norms(layer)
        found = [found.vector, found.head, found.layer]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
