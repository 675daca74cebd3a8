"""The kernels of de-attention: equal to the definition, every gradient too, also where coordinates are equal."""

import pytest
import torch
from kernel_cases import DEVICE, OPERATOR_TESTS, TYPES, assert_dropout, assert_fused, project
from properties import given, settings, st

from attnlab.mechanisms import attention

pytest.importorskip("triton")
from gpu_compile import assert_compiles, some_and_all

from attnlab.mechanisms.kernels import de_attention as kernel

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
NAME = "de-attention"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(1, 1), (3, 1), (4, 2), (2, 2)]),
    i=st.integers(1, 19),
    j=st.integers(1, 19),
    d=st.sampled_from([3, 16]),
    causal=st.booleans(),
    mask=st.sampled_from(["none", "keys", "full", "one"]),
)
def test_it_equals_the_definition(dtype, seed, shape, i, j, d, causal, mask):
    """shape: query heads, and how many of them share a key head."""
    torch.manual_seed(seed)
    assert_fused(NAME, 1, shape[0], i, j, d, dtype, mask, causal, shape[1])


def test_rows_longer_than_a_tile():
    assert_fused(NAME, 1, 2, 37, 70, 5, torch.float32, "keys", causal=True, shared=2)


@pytest.mark.slow
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_wide_heads_and_several_tiles(d):
    for dtype in TYPES:
        assert_fused(NAME, 2, 4, 131, 140, d, dtype, "full", causal=True, shared=2)


def test_equal_coordinates_have_no_gradient_by_the_distance():
    """Queries and keys of −1, 0 and 1: every third coordinate of a pair is equal, and some logits are 0."""

    def coarsen(q, k, v):
        return q.round().clamp(-1, 1), k.round().clamp(-1, 1), v

    assert_fused(NAME, 1, 1, 11, 11, 16, torch.float32, change=coarsen)


def test_small_logits_keep_their_digits():
    assert_fused(NAME, 1, 1, 11, 11, 16, torch.float32, change=lambda q, k, v: (1e-3 * q, 1e-3 * k, v))


def test_dropout_is_the_same_in_both_passes_and_has_its_rate():
    n, scale = 32, 0.1
    q, k, v = (project(1, n, 1, n).requires_grad_() for _ in range(3))
    weights = attention(NAME, heads=1, head_dim=n, scale=scale).weights(q, k)[0]
    assert_dropout(lambda v, seed: kernel.de_attention(q, k, v, None, seed, False, scale, 0.25), weights, k, q, v, 0.25)


def test_no_weights_are_kept_for_the_backward_pass():
    q, k, v = (project(1, 48, 1, 4).requires_grad_() for _ in range(3))
    mechanism, sizes = attention(NAME, heads=1, head_dim=4, impl="fused").train(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        mechanism(q, k, v, causal=True)
    assert max(sizes) == q.numel() < 48 * 48


def test_it_is_a_proper_operator():
    q, k, v = (torch.randn(1, 2, n, 3, device=DEVICE, requires_grad=True) for n in (3, 5, 5))
    seed, mask = torch.tensor(3, device=DEVICE), torch.rand(1, 1, 1, 5, device=DEVICE) < 0.8
    given = (q, k, v, mask, seed, True, 0.4, 0.1)
    torch.library.opcheck(kernel.de_attention.opaque, given, test_utils=OPERATOR_TESTS)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import de_attention as module

cases = [("bf16", torch.bfloat16, 64, True)]
if EVERY:
    cases += [("fp16", torch.float16, 128, False), ("fp32", torch.float32, 64, True)]
    cases += [("bf16", torch.bfloat16, 256, True), ("fp32", torch.float32, 256, False)]
kernels = (module._forward, module._backward_queries, module._backward_keys)
for kind, dtype, d, on in cases:
    for kernel in kernels if EVERY else kernels[2:]:
        backward = kernel is not module._forward
        tile = module.choose_distance_tile(torch.empty(1, 1, 1, d, dtype=dtype), backward=backward)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        fixed = tile | {"MASKED": on, "CAUSAL": on, "DROPPED": on, "SHARED": 3}
        types = dict.fromkeys(("q", "k", "v", "grad", "out", "dq", "dk", "dv"), f"*{kind}")
        types |= dict.fromkeys(("q_columns", "k_columns", "slopes"), "*fp32") | dict.fromkeys(("scale", "rate"), "fp32")
        types |= dict.fromkeys(fixed, "constexpr") | {"mask": "*u8", "dropping": "*i64"}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (kernel, kind, fixed, made.metadata.shared)
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)
