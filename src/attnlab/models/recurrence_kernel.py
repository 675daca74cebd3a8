"""The elementwise part of one LSTM time step as one Triton pass, forward and backward; `recurrence.py` defines it.

    forward    reads gates_t + W h_{t−1} and c_{t−1}; writes i, f, g, o, c_t and h_t
    backward   reads ∂L/∂h_t, i, f, g, o, c_t and c_{t−1}; writes δ_t, and what passes on to the step before

A program has a run of the s·b·d cells, and computes in float32. gates, ∂L/∂h_t and live may have any strides but the
last axis of the first two, which is 1; in every other tensor (s,b,…) the last two axes lie together.
"""

import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import launching_on, note_launch

CELLS = 512  # of a program


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _forward(
    gates, recurrent, h, c, live, next_h, next_c, active, total, batch, size,
    gates_s, gates_b, h_s, c_s, live_s, live_b, next_h_s, next_c_s, active_s,
    masked: tl.constexpr, cells: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * cells + tl.arange(0, cells)
    inside = place < total
    s, b, d = place // (batch * size), place // size % batch, place % size
    left = gates + s * gates_s + b * gates_b + d
    right = recurrent + (s * batch + b) * 4 * size + d
    out = active + s * active_s + b * 4 * size + d
    row = b * size + d
    i = _sigmoid(tl.load(left, inside, 0.0).to(tl.float32) + tl.load(right, inside, 0.0).to(tl.float32))
    left, right = left + size, right + size
    f = _sigmoid(tl.load(left, inside, 0.0).to(tl.float32) + tl.load(right, inside, 0.0).to(tl.float32))
    left, right = left + size, right + size
    g = _tanh(tl.load(left, inside, 0.0).to(tl.float32) + tl.load(right, inside, 0.0).to(tl.float32))
    left, right = left + size, right + size
    o = _sigmoid(tl.load(left, inside, 0.0).to(tl.float32) + tl.load(right, inside, 0.0).to(tl.float32))
    before = tl.load(c + s * c_s + row, inside, 0.0)
    cell = f * before + i * g
    hidden = o * _tanh(cell)
    if masked:
        kept = tl.load(live + s * live_s + b * live_b, inside, 0) == 0
        cell = tl.where(kept, before, cell)
        hidden = tl.where(kept, tl.load(h + s * h_s + row, inside, 0.0).to(tl.float32), hidden)
    tl.store(out, i, inside)
    tl.store(out + size, f, inside)
    tl.store(out + 2 * size, g, inside)
    tl.store(out + 3 * size, o, inside)
    tl.store(next_c + s * next_c_s + row, cell, inside)
    tl.store(next_h + s * next_h_s + row, hidden, inside)


@triton.jit
def _backward(
    grad, active, cell, c, live, dh, dc, delta, total, batch, size,
    grad_s, grad_b, active_s, cell_s, c_s, live_s, live_b, delta_s,
    masked: tl.constexpr, cells: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * cells + tl.arange(0, cells)
    inside = place < total
    s, b, d = place // (batch * size), place // size % batch, place % size
    row, four = b * size + d, b * 4 * size + d
    gate = active + s * active_s + four
    i = tl.load(gate, inside, 0.0).to(tl.float32)
    f = tl.load(gate + size, inside, 0.0).to(tl.float32)
    g = tl.load(gate + 2 * size, inside, 0.0).to(tl.float32)
    o = tl.load(gate + 3 * size, inside, 0.0).to(tl.float32)
    squashed = _tanh(tl.load(cell + s * cell_s + row, inside, 0.0))
    hidden = tl.load(grad + s * grad_s + b * grad_b + d, inside, 0.0).to(tl.float32)
    hidden += tl.load(dh + place, inside, 0.0).to(tl.float32)
    later = tl.load(dc + place, inside, 0.0)
    inner = later + hidden * o * (1.0 - squashed * squashed)
    di, df = inner * g * i * (1.0 - i), inner * tl.load(c + s * c_s + row, inside, 0.0) * f * (1.0 - f)
    dg, do = inner * i * (1.0 - g * g), hidden * squashed * o * (1.0 - o)
    on, passed = inner * f, tl.zeros_like(hidden)
    if masked:
        kept = tl.load(live + s * live_s + b * live_b, inside, 0) == 0
        di, df, dg, do = (
            tl.where(kept, 0.0, di), tl.where(kept, 0.0, df), tl.where(kept, 0.0, dg), tl.where(kept, 0.0, do)
        )  # fmt: skip
        on, passed = tl.where(kept, later, on), tl.where(kept, hidden, 0.0)
    out = delta + s * delta_s + four
    tl.store(out, di, inside)
    tl.store(out + size, df, inside)
    tl.store(out + 2 * size, dg, inside)
    tl.store(out + 3 * size, do, inside)
    tl.store(dc + place, on, inside)
    tl.store(dh + place, passed, inside)


def forward_step(
    gates: Tensor,
    recurrent: Tensor,
    h: Tensor,
    c: Tensor,
    live: Tensor | None,
    next_h: Tensor,
    next_c: Tensor,
    active: Tensor,
) -> None:
    """As `recurrence.forward_step`."""
    note_launch("recurrence")
    before = (gates.stride(0), gates.stride(1), h.stride(0), c.stride(0), *_strides(live))
    after = (next_h.stride(0), next_c.stride(0), active.stride(0))
    seen = gates if live is None else live
    with launching_on(gates):
        _forward[_programs(c)](
            gates, recurrent, h, c, seen, next_h, next_c, active, c.numel(), *c.shape[1:], *before, *after,
            masked=live is not None, cells=CELLS,
        )  # fmt: skip


def backward_step(
    grad: Tensor, active: Tensor, cell: Tensor, c: Tensor, live: Tensor | None, dh: Tensor, dc: Tensor, delta: Tensor
) -> None:
    """As `recurrence.backward_step`."""
    strides = (grad.stride(0), grad.stride(1), active.stride(0), cell.stride(0), c.stride(0), *_strides(live))
    seen = grad if live is None else live
    with launching_on(grad):
        _backward[_programs(c)](
            grad, active, cell, c, seen, dh, dc, delta, c.numel(), *c.shape[1:], *strides, delta.stride(0),
            masked=live is not None, cells=CELLS,
        )  # fmt: skip


def _programs(c: Tensor) -> tuple[int]:
    return (triton.cdiv(c.numel(), CELLS),)


def _strides(live: Tensor | None) -> tuple[int, int]:
    return (0, 0) if live is None else (live.stride(0), live.stride(1))
