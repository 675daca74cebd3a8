"""The kernel of all pairs of heads: equal to the definition at any sizes, strides, masks and signs."""

import pytest
import torch
from gpu_compile import assert_compiles
from properties import given, settings, st

from attnlab.analysis.diversity import jsd, pair_entropy

pytest.importorskip("triton")
from attnlab.analysis.contribution_kernel import find_tensor_gap

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter's bf16 is wrong


def assert_same(weights, mask=None):
    ours, theirs = (pair_entropy(weights, mask, impl=impl) for impl in ("fused", "reference"))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=2e-6)
    torch.testing.assert_close(
        jsd(weights, mask, impl="fused"), jsd(weights, mask, impl="reference"), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 2),
    h=st.integers(1, 7),
    i=st.integers(1, 11),
    j=st.integers(1, 37),
    signed=st.booleans(),
    mask=st.sampled_from([None, "keys", "queries", "one", "full"]),
)
def test_it_equals_the_definition(dtype, seed, b, h, i, j, signed, mask):
    torch.manual_seed(seed)
    weights = torch.randn(b, i, h, j + 2, device=DEVICE)[..., 2:].transpose(1, 2)  # not contiguous, and a slice
    weights = (weights if signed else weights.softmax(-1)).to(dtype)
    shape = {None: None, "keys": (b, 1, 1, j), "queries": (b, 1, i, 1), "one": (i, j), "full": (b, 1, i, j)}[mask]
    assert_same(weights, None if shape is None else torch.rand(shape, device=DEVICE) < 0.6)  # some rows see nothing


@pytest.mark.parametrize("shape", [(1, 17, 2, 300), (1, 33, 2, 5), (1, 2, 3, 1100)])
def test_it_equals_the_definition_beyond_a_tile(shape):
    weights = (3 * torch.randn(shape, device=DEVICE)).softmax(-1)
    assert_same(weights)
    weights[:, 0, 1] *= -1.0  # one row has negative weights, the others not
    assert_same(weights)


def test_equal_heads_differ_by_nothing_and_rows_of_zeros_are_no_numbers_divided():
    weights = torch.randn(2, 6, 11, 13, device=DEVICE).softmax(-1)
    weights[:, 4] = weights[:, 1]
    weights[0, :, 3] = 0.0
    found = jsd(weights, impl="fused")
    assert found[1, 4] == found[4, 1] == 0.0
    assert bool(found.isfinite().all())
    assert_same(weights)


def test_every_element_is_written_and_what_is_no_number_stays_none(monkeypatch):
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: empty(*a, **o).fill_(float("nan")))
    weights = torch.randn(2, 11, 11, 13, device=DEVICE).softmax(-1)  # heads of two groups, one of them not full
    assert bool(jsd(weights, impl="fused").isfinite().all())
    weights[0, 3, 7, 2] = torch.nan
    found = jsd(weights, impl="fused")
    assert bool(found[3].isnan().sum() == 11)
    assert bool(found[:3, :3].isfinite().all())


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.analysis import diversity_kernel as kernel
function = kernel._pairs
for kind, masked, group in (("bf16", True, 8), ("fp16", False, 4), ("fp32", True, 1), ("fp32", False, 8)):
    fixed = {"masked": masked, "chip": True, "group": group, "tile": kernel.TILE, "rows": kernel.QUERIES}
    types = {"weights": f"*{kind}", "mask": "*u8" if masked else f"*{kind}", "out": "*fp32"}
    types |= dict.fromkeys(fixed, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    triton.compile(ASTSource(function, signature, fixed), target=GPUTarget("cuda", 90, 32))
"""


def test_it_compiles_for_a_gpu_that_is_not_here():
    assert_compiles(COMPILE)


def test_what_is_not_covered_is_said(monkeypatch):
    for weights, reason in (
        (torch.rand(1, 2, 3, 5, dtype=torch.float64, device=DEVICE), "torch.float64"),
        (torch.rand(1, 2, 0, 5, device=DEVICE), "an empty tensor"),
    ):
        with pytest.raises(ValueError, match=f"cover {reason}"):
            jsd(weights, impl="fused")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert find_tensor_gap(torch.rand(1, 2, 3, 5)) == "tensors on cpu"


@pytest.mark.gpu
def test_it_can_be_captured_and_makes_no_copy_of_the_weights():
    weights = torch.randn(4, 8, 256, 256, device="cuda").softmax(-1)
    want = jsd(weights)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    jsd(weights)
    assert torch.cuda.max_memory_allocated() - before < weights.nbytes / 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = jsd(weights)
    graph.replay()
    assert torch.equal(found, want)
