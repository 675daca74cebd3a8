"""A whole LSTM recurrence as one Triton launch, forward and one backward; `recurrence.py` defines it.

A program has one recurrence and a tile of its batch, and goes through time by itself: nothing waits for another
program, nothing is launched between two positions. What a step needs of all units, h_{t−1} or δ_t, it writes and reads
again behind a barrier; W is read anew at every position, from the cache that all programs share, while the units
before are worked on.

    forward    a tile of W has the rows i, f, g, o of some units; W h_{t−1} for them, then the gates, c_t and h_t
    backward   δ_t of all units from ∂L/∂h_t, then ∂L/∂h_{t−1} = Wᵀ δ_t, its sum over tiles of gates

Where none of a program's examples has a token the state is passed on, forth and back, and W is not read.

Sums and the state are float32. Where nn.LSTM's products of float32 may be tf32 (torch.backends.cudnn.rnn, which says so
unless told otherwise) these are of float16: it has tf32's ten bits in half the bytes, its range does for h and W, and
each example's δ_t is brought to it by its largest. Else each is three of tf32, of what it keeps and what it drops, as
exact as float32's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import launching_on, note_launch

LARGEST = 512  # units
TILE_BYTES = 64 * 1024  # of W, at most
CELLS = 8  # of a thread, of which δ is made at a time; not fewer than one, or two threads would write one cell
STAGES = 3  # tiles of W on their way and worked on
HOPPER = 227 * 1024  # bytes of shared memory, where there is no GPU to ask


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """By its series near 0, where the other form has nothing left of it."""
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    return tl.where(y < 0.09, near, 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)


@triton.jit
def _load(base, rows, columns, row_stride, inside):
    return tl.load(base + rows[:, None] * row_stride + columns[None, :], inside, 0.0)


@triton.jit
def _forward(
    gates, weight, h, c, live, outputs, cells, active, n, batch, size,
    gates_s, gates_b, gates_n, live_s, live_b, live_n, outputs_s, outputs_b, outputs_n,
    MASKED: tl.constexpr, B: tl.constexpr, U: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * B + tl.arange(0, B)).to(tl.int64)
    inputs, row = tl.arange(0, D), tl.arange(0, 4 * U)  # a row of a tile of W: gate row % 4 of unit row // 4
    here, known = rows < batch, inputs < size
    gates += s * gates_s
    live += s * live_s
    weight += s * 4 * size * size
    before, before_b, cell_before = h + s * batch * size, size + 0 * s, c + s * batch * size  # the stride as int64
    outputs += s * outputs_s
    cells += s * n * batch * size
    active += s * n * batch * 4 * size
    for _ in range(n):
        tl.debug_barrier()
        token, any_token = here, True
        if MASKED:
            token = tl.load(live + rows * live_b, here, 0) != 0
            any_token = tl.max(token.to(tl.int32), 0) > 0
        if any_token:
            earlier = _load(before, rows, inputs, before_b, here[:, None] & known[None, :])  # (B,D)
            for first in tl.range(0, size, U):
                unit = first + tl.arange(0, U)
                inside = (unit < size)[:, None] & here[None, :]
                given = gates + rows[None, :] * gates_b + unit[:, None]
                place = rows[None, :] * size + unit[:, None]  # (U,B)
                given_i, given_f = tl.load(given, inside, 0.0), tl.load(given + size, inside, 0.0)
                given_g, given_o = tl.load(given + 2 * size, inside, 0.0), tl.load(given + 3 * size, inside, 0.0)
                held = tl.load(cell_before + place, inside, 0.0)
                of_tile = first + row // 4
                w = _load(weight, row % 4 * size + of_tile, inputs, size, (of_tile < size)[:, None] & known[None, :])
                x = tl.dot(w, tl.trans(earlier.to(w.dtype)), input_precision="tf32x3")  # (4U,B)
                x = tl.trans(tl.reshape(x, (U, 4, B)), (0, 2, 1))  # (U,B,4)
                i_g, f_o = tl.split(tl.reshape(x, (U, B, 2, 2)))
                i, g = tl.split(i_g)
                f, o = tl.split(f_o)
                i, f = _sigmoid(i + given_i.to(tl.float32)), _sigmoid(f + given_f.to(tl.float32))
                g, o = _tanh(g + given_g.to(tl.float32)), _sigmoid(o + given_o.to(tl.float32))
                cell = f * held + i * g
                hidden = o * _tanh(cell)
                if MASKED:
                    cell = tl.where(token[None, :], cell, held)
                    last = tl.load(before + rows[None, :] * before_b + unit[:, None], inside, 0.0)
                    hidden = tl.where(token[None, :], hidden, last.to(tl.float32))
                tl.store(cells + place, cell, inside)
                tl.store(outputs + rows[None, :] * outputs_b + unit[:, None], hidden, inside)
                kept = active + rows[None, :] * 4 * size + unit[:, None]
                tl.store(kept, i, inside)
                tl.store(kept + size, f, inside)
                tl.store(kept + 2 * size, g, inside)
                tl.store(kept + 3 * size, o, inside)
        else:  # padding only: the state stays, and no gate is looked at again
            whole = here[:, None] & known[None, :]
            state = rows[:, None] * size + inputs[None, :]  # (B,D)
            tl.store(cells + state, tl.load(cell_before + state, whole, 0.0), whole)
            stays = _load(before, rows, inputs, before_b, whole)
            tl.store(outputs + rows[:, None] * outputs_b + inputs[None, :], stays, whole)
        before, before_b, cell_before = outputs, outputs_b + 0 * s, cells
        outputs += outputs_n
        cells += batch * size
        active += batch * 4 * size
        gates += gates_n
        live += live_n


@triton.jit
def _backward(
    grad, across, c, live, cells, active, delta, dh, dc, n, batch, size,
    grad_s, grad_n, grad_b, live_s, live_b, live_n, delta_s, delta_n, delta_b,
    MASKED: tl.constexpr, SCALED: tl.constexpr,
    B: tl.constexpr, U: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """grad, live and delta are given at the last position, and are gone through from there."""
    s = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * B + tl.arange(0, B)).to(tl.int64)
    here = rows < batch
    outs, gate = tl.arange(0, D), tl.arange(0, G)
    grad += s * grad_s
    live += s * live_s
    delta += s * delta_s
    across += s * 4 * size * size  # Wᵀ
    dh += s * batch * size
    dc += s * batch * size
    for back in range(n):
        position = s * n + (n - 1 - back)
        tl.debug_barrier()
        token, any_token = here, True
        if MASKED:
            token = tl.load(live + rows * live_b, here, 0) != 0
            any_token = tl.max(token.to(tl.int32), 0) > 0
        if any_token:
            largest = tl.zeros((B,), tl.float32)
            for first in tl.range(0, size, U, num_stages=1):
                unit = first + tl.arange(0, U)
                inside = here[:, None] & (unit < size)[None, :]
                place = rows[:, None] * size + unit[None, :]  # (B,U)
                four = (position * batch + rows[:, None]) * 4 * size + unit[None, :]
                i = tl.load(active + four, inside, 0.0).to(tl.float32)
                f = tl.load(active + four + size, inside, 0.0).to(tl.float32)
                g = tl.load(active + four + 2 * size, inside, 0.0).to(tl.float32)
                o = tl.load(active + four + 3 * size, inside, 0.0).to(tl.float32)
                squashed = _tanh(tl.load(cells + position * batch * size + place, inside, 0.0))
                if back < n - 1:
                    held = tl.load(cells + (position - 1) * batch * size + place, inside, 0.0)
                else:
                    held = tl.load(c + s * batch * size + place, inside, 0.0)
                hidden = tl.load(dh + place, inside, 0.0)
                hidden += _load(grad, rows, unit, grad_b, inside).to(tl.float32)
                later = tl.load(dc + place, inside, 0.0)
                inner = later + hidden * o * (1.0 - squashed * squashed)
                di, df = inner * g * i * (1.0 - i), inner * held * f * (1.0 - f)
                dg, do = inner * i * (1.0 - g * g), hidden * squashed * o * (1.0 - o)
                on, passed = inner * f, tl.zeros_like(hidden)
                if MASKED:
                    real = token[:, None]
                    di, df = tl.where(real, di, 0.0), tl.where(real, df, 0.0)
                    dg, do = tl.where(real, dg, 0.0), tl.where(real, do, 0.0)
                    on, passed = tl.where(real, on, later), tl.where(real, 0.0, hidden)
                if SCALED:
                    most = tl.maximum(tl.maximum(tl.abs(di), tl.abs(df)), tl.maximum(tl.abs(dg), tl.abs(do)))
                    largest = tl.maximum(largest, tl.max(most, 1))
                made = delta + rows[:, None] * delta_b + unit[None, :]
                tl.store(made, di, inside)
                tl.store(made + size, df, inside)
                tl.store(made + 2 * size, dg, inside)
                tl.store(made + 3 * size, do, inside)
                tl.store(dc + place, on, inside)
                tl.store(dh + place, passed, inside)
            tl.debug_barrier()
            shrink = tl.where(largest > 0.0, largest, 1.0)
            total = tl.zeros((D, B), tl.float32)
            for first in tl.range(0, 4 * size, G):
                of_tile = first + gate
                known = of_tile < 4 * size
                w = _load(across, outs, of_tile, 4 * size, (outs < size)[:, None] & known[None, :])  # (D,G)
                d = _load(delta, rows, of_tile, delta_b, here[:, None] & known[None, :])
                if SCALED:
                    d = d / shrink[:, None]
                total = tl.dot(w, tl.trans(d.to(w.dtype)), total, input_precision="tf32x3")  # (D,B)
            if SCALED:
                total = total * shrink[None, :]
            on_h = dh + rows[None, :] * size + outs[:, None]
            inside = (outs < size)[:, None] & here[None, :]
            tl.store(on_h, tl.load(on_h, inside, 0.0) + total, inside)
        else:  # padding only: what comes later passes by
            whole = here[:, None] & (outs < size)[None, :]
            state = dh + rows[:, None] * size + outs[None, :]  # (B,D)
            own = _load(grad, rows, outs, grad_b, whole).to(tl.float32)
            tl.store(state, tl.load(state, whole, 0.0) + own, whole)
            nothing = delta + rows[:, None] * delta_b + outs[None, :]
            for part in tl.static_range(4):
                tl.store(nothing + part * size, tl.zeros((B, D), tl.float32), whole)
        grad -= grad_n
        live -= live_n
        delta -= delta_n


def covers(x: Tensor, h: Tensor) -> bool:
    """Whether these kernels are for it: not float64, and not so many units that a tile of W has too few rows."""
    return x.dtype != torch.float64 and 0 < h.shape[-1] <= LARGEST and x.numel() > 0


def forward(
    gates: Tensor,
    weight: Tensor,
    h: Tensor,
    c: Tensor,
    live: Tensor | None,
    outputs: Tensor,
    cells: Tensor,
    active: Tensor,
) -> None:
    """As `recurrence.forward`; the last axis of gates and outputs lies together, the others have any strides."""
    note_launch("recurrence")
    (s, b, n, _), size = gates.shape, h.shape[-1]
    weight, seen = _factor(weight).contiguous(), gates if live is None else live
    tiles = Tiles.of(s, b, size, weight)
    with launching_on(gates):
        _forward[(s, triton.cdiv(b, tiles.rows))](
            gates, weight, h, c, seen, outputs, cells, active, n, b, size,
            *_strides(gates), *_strides(live), outputs.stride(0), outputs.stride(2), outputs.stride(1),
            MASKED=live is not None, **tiles.forward,
        )  # fmt: skip


def backward(
    grad: Tensor,
    weight: Tensor,
    c: Tensor,
    live: Tensor | None,
    cells: Tensor,
    active: Tensor,
    delta: Tensor,
    dh: Tensor,
    dc: Tensor,
) -> None:
    """As `recurrence.backward`; the last axis of grad and delta lies together, the others have any strides."""
    (s, n, b, _), size = grad.shape, c.shape[-1]
    weight, seen = _factor(weight).mT.contiguous(), grad[:, -1] if live is None else live[:, :, -1]
    tiles = Tiles.of(s, b, size, weight)
    with launching_on(grad):
        _backward[(s, triton.cdiv(b, tiles.rows))](
            grad[:, -1], weight, c, seen, cells, active, delta[:, -1], dh, dc, n, b, size,
            *_strides(grad), *_strides(live), *_strides(delta),
            MASKED=live is not None, SCALED=weight.dtype != delta.dtype, **tiles.backward,
        )  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """What a program works on: some rows of the batch, all units, and rows of W, tile by tile, of which some are on
    their way (num_stages) while one is worked on: as many, and as large, as the shared memory takes."""

    rows: int
    width: int  # units, up to a power of two
    element: int  # bytes of a number of W
    memory: int  # bytes

    @classmethod
    def of(cls, s: int, b: int, size: int, weight: Tensor, memory: int | None = None) -> "Tiles":
        """Few rows of the batch, unless there would be more programs than can run at once."""
        width, together = max(16, triton.next_power_of_2(size)), 1
        if weight.is_cuda:
            device = triton.runtime.driver.active.utils.get_device_properties(weight.device.index)
            memory, together = memory or device["max_shared_mem"], device["multiprocessor_count"]
        rows = next((rows for rows in (16, 32) if s * triton.cdiv(b, rows) <= together), 64)
        rows = min(rows, max(16, triton.next_power_of_2(b)))
        tiles = cls(rows, width, weight.element_size(), memory or HOPPER)
        while tiles.rows > 16 and tiles.of_batch > tiles.memory // 2:  # half of it is for W
            tiles = replace(tiles, rows=tiles.rows // 2)
        return tiles

    @property
    def of_batch(self) -> int:
        """Bytes that h_{t−1} takes; the products of older chips have it once more."""
        return self.rows * self.width * (5 if self.memory >= HOPPER else 7)

    @property
    def warps(self) -> int:
        return 16 if self.rows == 64 else 8

    @property
    def forward(self) -> dict[str, int]:
        """Of W as tall a tile as there is room for: fewer stages do."""
        choices = [(tall, stages) for tall in self._heights for stages in range(STAGES, 1, -1)]
        of_weight, stages = self._fitting(choices, lambda tall: 0, self.of_batch)
        return {"B": self.rows, "U": of_weight // 4, "D": self.width, "num_warps": self.warps, "num_stages": stages}

    @property
    def backward(self) -> dict[str, int]:
        """All stages: a lower tile does."""
        units = min(self.width, CELLS * 32 * self.warps // self.rows)
        choices = [(tall, stages) for stages in range(STAGES, 1, -1) for tall in self._heights]
        of_weight, stages = self._fitting(choices, lambda tall: 4 * self.rows * tall, 0)
        told = {"B": self.rows, "U": units, "G": of_weight, "D": self.width}
        return told | {"num_warps": self.warps, "num_stages": stages}

    @property
    def _heights(self) -> list[int]:
        """Rows that a tile of W may have, falling."""
        tallest = min(128, 4 * self.width, TILE_BYTES // (self.width * self.element))
        return [tallest >> times for times in range(tallest.bit_length()) if tallest >> times > 16]

    def _fitting(self, choices: list[tuple[int, int]], beside: Callable[[int], int], once: int) -> tuple[int, int]:
        """The first rows of a tile of W, and stages, that there is room for; beside: bytes that go with each of so many
        rows, once: with all of them."""
        for tall, stages in choices:
            if stages * (tall * self.width * self.element + beside(tall)) + once <= self.memory:
                return tall, stages
        return 16, 1


def _factor(weight: Tensor) -> Tensor:
    """W as the products take it."""
    said = torch.backends.cudnn.rnn.fp32_precision  # type: ignore[attr-defined]
    return weight.half() if weight.dtype == torch.float32 and said == "tf32" else weight


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Of its first three axes."""
    return (0, 0, 0) if x is None else x.stride()[:3]
