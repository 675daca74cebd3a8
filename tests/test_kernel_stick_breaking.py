"""The kernels of stick-breaking attention: equal to the definition, every gradient too."""

import pytest
import torch
from kernel_cases import DEVICE, OPERATOR_TESTS, TYPES, assert_dropout, assert_fused, project
from properties import given, settings, st

from attnlab.mechanisms import attention

pytest.importorskip("triton")
from gpu_compile import assert_compiles, some_and_all

from attnlab.mechanisms.kernels import stick_breaking as kernel

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
NAME = "stick-breaking"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(1, 1), (3, 1), (6, 2), (4, 4)]),
    i=st.integers(1, 19),
    more=st.integers(0, 5),
    d=st.sampled_from([3, 16, 32]),
    causal=st.booleans(),
    remainder=st.booleans(),
    mask=st.sampled_from(["none", "keys", "full", "one"]),
)
def test_it_equals_the_definition(dtype, seed, shape, i, more, d, causal, remainder, mask):
    """shape: query heads, and how many of them share a key head; more: keys before the first query's own."""
    torch.manual_seed(seed)
    assert_fused(NAME, 2, shape[0], i, i + more, d, dtype, mask, causal, shape[1], remainder=remainder)


@pytest.mark.parametrize(("dtype", "n"), [(torch.float32, 70), (torch.float16, 140)], ids=str)
def test_rows_longer_than_a_tile(dtype, n):
    """What several tiles to the right have taken, and what several to the left contribute to the gradient."""
    assert_fused(NAME, 1, 2, n - 33, n, 16, dtype, "keys", shared=2, remainder=True)


@pytest.mark.slow
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_wide_heads_and_several_tiles(d):
    for dtype in TYPES:
        assert_fused(NAME, 2, 4, 131, 140, d, dtype, "full", shared=2, remainder=True)


@pytest.mark.parametrize("size", [30.0, 1e4])
def test_large_logits_leave_nothing_and_no_nan(size):
    """Keys that take everything, and keys that take nothing."""

    def enlarge(q, k, v):
        return q.sign() * size, k.sign(), v

    assert_fused(NAME, 1, 1, 37, 37, 4, torch.float32, change=enlarge, remainder=True)


@pytest.mark.parametrize("remainder", [False, True])
def test_dropout_is_the_same_in_both_passes_and_has_its_rate(remainder):
    n, scale = 32, 0.2
    q, k, v = (project(2, n, 2, n).requires_grad_() for _ in range(3))
    weights = attention(NAME, heads=2, head_dim=n, scale=scale, remainder=remainder).weights(q, k)[0]

    def run(v, seed):
        return kernel.stick_breaking(q, k, v, None, seed, remainder, scale, 0.25)[0]

    assert_dropout(run, weights, k, q, v, 0.25)


def test_only_sums_at_the_borders_of_tiles_are_kept_for_the_backward_pass():
    q, k, v = (project(1, 96, 2, 16).requires_grad_() for _ in range(3))
    mechanism, sizes = attention(NAME, heads=2, head_dim=16, impl="fused").train(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        mechanism(q, k, v, causal=True)
    assert max(sizes) == max(q.numel(), 2 * 96 * (96 // kernel.choose_stick_tile(q, "forward")["BJ"] + 1))


def test_it_is_a_proper_operator():
    q, k, v = (torch.randn(1, 2, n, 16, device=DEVICE, requires_grad=True) for n in (3, 5, 5))
    seed, mask = torch.tensor(3, device=DEVICE), torch.rand(1, 1, 1, 5, device=DEVICE) < 0.8
    given = (q, k, v, mask, seed, True, 0.4, 0.1)
    torch.library.opcheck(kernel.stick_breaking.opaque, given, test_utils=OPERATOR_TESTS)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import stick_breaking as module

cases = [("bf16", torch.bfloat16, 64, True)]
if EVERY:
    cases += [("fp16", torch.float16, 128, False), ("fp32", torch.float32, 64, True)]
    cases += [("bf16", torch.bfloat16, 256, True), ("fp32", torch.float32, 256, False)]
kernels = (module._forward, module._backward_queries, module._backward_keys)
for kind, dtype, d, on in cases:
    for kernel in kernels if EVERY else kernels[2:]:
        work = {module._forward: "forward", module._backward_queries: "queries"}.get(kernel, "keys")
        tile = module.choose_stick_tile(torch.empty(1, 1, 1, d, dtype=dtype), work)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        fixed = tile | {"MASKED": on, "REMAINDER": on, "DROPPED": on, "SHARED": 3}
        types = dict.fromkeys(("q", "k", "v", "grad", "out", "dq", "dk", "dv"), f"*{kind}")
        types |= dict.fromkeys(("edges", "sums"), "*fp32") | dict.fromkeys(("scale", "rate"), "fp32")
        types |= dict.fromkeys(fixed, "constexpr") | {"mask": "*u8", "dropping": "*i64"}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (kernel, kind, fixed, made.metadata.shared)
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)
