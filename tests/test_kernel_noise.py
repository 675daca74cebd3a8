"""The noise kernel: the definition's numbers, at every place and under any sizes."""

import pytest
import torch
from gpu_compile import assert_compiles
from properties import given, settings, st

from attnlab.mechanisms import noise

pytest.importorskip("triton")
from attnlab.mechanisms.kernels.noise import gaussian

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**62),
    layer=st.integers(0, 60),
    b=st.integers(1, 3),
    h=st.integers(1, 5),
    i=st.integers(1, 7),
    j=st.integers(1, 41),
)
def test_draws_are_those_of_the_definition(seed, layer, b, h, i, j):
    rows = torch.randperm(1000, device=DEVICE)[:i]
    drawn = gaussian(torch.tensor(seed, device=DEVICE), layer, b, h, rows, j, torch.float32)
    torch.testing.assert_close(drawn, noise.gaussian(seed, layer, b, h, rows, j), atol=2e-5, rtol=2e-5)


def test_it_is_a_proper_operator():
    arguments = (torch.tensor(3, device=DEVICE), 1, 2, 3, torch.arange(5, device=DEVICE), 7, torch.float16)
    torch.library.opcheck(gaussian.opaque, arguments)
    torch.testing.assert_close(gaussian(*arguments), gaussian(*arguments[:-1], torch.float32).half())


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels.noise import COUNTERS, _gaussian
for kind in ("bf16", "fp16", "fp32", "fp64"):
    types = {"seed": "*i64", "rows": "*i64", "out": f"*{kind}", "COUNTERS": "constexpr"}
    signature = {name: types.get(name, "i32") for name in _gaussian.arg_names}
    triton.compile(ASTSource(_gaussian, signature, {"COUNTERS": COUNTERS}), target=GPUTarget("cuda", 90, 32))
"""


def test_it_compiles_for_a_gpu_that_is_not_here():
    assert_compiles(COMPILE)


@pytest.mark.gpu
def test_a_captured_draw_is_new_at_each_replay_and_compiles():
    from attnlab.mechanisms import attention

    coda = attention("coda-cs", heads=2, head_dim=16).cuda().train()
    q, k = torch.randn(2, 3, 2, 17, 16, device="cuda")
    for weights in (coda.weights, torch.compile(coda.weights, dynamic=True)):
        weights(q, k)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            drawn, _ = weights(q, k)
        graph.replay()
        first = drawn.clone()
        graph.replay()
        assert not torch.allclose(first, drawn)
