"""Kernels stay inside the memory of their arguments, and programs of one launch do not meet in it."""

import pytest
import torch

from attnlab.mechanisms import MECHANISMS, attention, find_mechanism
from attnlab.mechanisms.mechanism import Mechanism

pytest.importorskip("triton")
import triton
import triton.language as tl
from kernel_accesses import check_accesses
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
NAMES = [name for name in MECHANISMS if find_mechanism(name).kernels]
USUAL = ("coda", "cosine", "dcmha", "differential", "fox", "multi-token", "selective", "uniform", "xsa")


def run(layers, mask, causal, n=37, b=2):
    """Compute layers, which pass on their carry, and the gradients of all that they read."""
    h, d = layers[0].heads, layers[0].head_dim
    x, *qkv = (torch.randn(b, n, heads * d).requires_grad_() for heads in (h, layers[0].query_heads, h, h))
    q, k, v = (y.unflatten(2, (-1, d)).transpose(1, 2) for y in qkv)
    carry, total = None, 0.0
    for layer in layers:
        values, handed = layer.values(v, carry) if layer.carry_of == "keys" else (v, None)
        sides = {"sides": (layer.query_side(x), layer.key_side(x))} if layer.has_sides else {}
        given = None if layer.carry_of == "keys" else carry
        context, passed = layer(q, k, values, mask, given, causal=causal, **sides)
        carry, total = passed if handed is None else handed, total + context.square().sum()
    learnt = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    torch.autograd.grad(total, [x, *qkv, *learnt], allow_unused=True)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in USUAL else pytest.mark.slow) for x in NAMES])
def test_kernels_read_and_write_only_what_is_theirs(name, monkeypatch):
    """As impl="auto" on a GPU."""
    monkeypatch.setattr(Mechanism, "wants_kernels", lambda self, q: True)
    layers = [attention(name, heads=2, head_dim=8, dropout=0.2, layer=layer) for layer in range(2)]
    with check_accesses() as launched:
        for shape in ((2, 1, 37, 37), (2, 1, 1, 37)):
            run(layers, torch.rand(shape) < 0.7, causal=True)
        for layer in layers:
            layer.eval()
        run(layers, None, causal=layers[0].self_only or name == "uniform")
    assert launched


@triton.jit
def _copy(x, out, size, BLOCK: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i + SHIFT, mask=i < LIMIT, other=0.0), mask=i < size)


@pytest.mark.parametrize(
    ("shift", "limit", "same", "problem"),
    [
        (0, 13, False, None),
        (0, 13, True, None),  # a program may read what it writes itself
        (-1, 13, False, "reads outside its arguments"),
        (0, 14, False, "reads outside its arguments"),
        (1, 12, True, "another program"),
    ],
)
def test_the_check_finds_what_is_wrong(shift, limit, same, problem):
    x = torch.randn(40)[13:26]
    out = x if same else torch.empty(13)
    with check_accesses() as launched:
        if problem is None:
            _copy[(4,)](x, out, 13, BLOCK=4, SHIFT=shift, LIMIT=limit)
        else:
            with pytest.raises(InterpreterError, match=problem):
                _copy[(4,)](x, out, 13, BLOCK=4, SHIFT=shift, LIMIT=limit)
    assert launched == {"_copy"}
