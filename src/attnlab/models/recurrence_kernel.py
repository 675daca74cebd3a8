"""A whole LSTM recurrence as one Triton launch for the forward and one for the backward; `recurrence.py` defines it.

A program handles one recurrence and a tile of its batch, and loops over time by itself. It waits for no other program,
and nothing is launched between two positions. A step needs h_{t−1} or δ_t of all units: the program writes them and
reads them again after a barrier. W is read at every position, from the cache that all programs share. Its next tiles
load while the current one is used.

    forward    a tile of W has the rows i, f, g, o of some units; W h_{t−1} for them, then the gates, c_t and h_t
    backward   δ_t of all units from ∂L/∂h_t, then ∂L/∂h_{t−1} = Wᵀ δ_t, its sum over tiles of gates

At a position where all examples of a program are padding, both passes copy the state and do not read W.

Sums and the state are float32. If nn.LSTM may use tf32 for float32 products (torch.backends.cudnn.rnn, the default),
products here use float16. It has the ten mantissa bits of tf32 in half the bytes, and its range suffices for h and W;
δ_t of each example is divided by its largest entry first. Otherwise each product is three tf32 products (tf32x3) of the
rounded values and the remainders, as exact as float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import note_launch, select_device

LARGEST = 512  # maximum number of units
TILE_BYTES = 64 * 1024  # maximum size of a tile of W
CELLS = 8  # cells of δ that a thread computes at a time; below one, two threads would write the same cell
STAGES = 3  # maximum number of tiles of W in flight (num_stages)
HOPPER = 227 * 1024  # bytes of shared memory of a Hopper GPU, the default without a GPU


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """tanh, by its series near 0, where the other form loses all digits."""
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    return tl.where(y < 0.09, near, 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)


@triton.jit
def _load(base, rows, columns, row_stride, inside):
    return tl.load(base + rows[:, None] * row_stride + columns[None, :], inside, 0.0)


@triton.jit
def _load_four(base, size, inside):
    """Four numbers of each unit, as i, f, g and o of its gates, which lie `size` apart."""
    i, f = tl.load(base, inside, 0.0), tl.load(base + size, inside, 0.0)
    return i, f, tl.load(base + 2 * size, inside, 0.0), tl.load(base + 3 * size, inside, 0.0)


@triton.jit
def _store_four(base, size, i, f, g, o, inside):
    tl.store(base, i, inside)
    tl.store(base + size, f, inside)
    tl.store(base + 2 * size, g, inside)
    tl.store(base + 3 * size, o, inside)


@triton.jit
def _multiply(weight, earlier, first, size, B: tl.constexpr, U: tl.constexpr, D: tl.constexpr):
    """W h of the gates i, f, g and o of U units from `first` on, (U,B) each; earlier: h (B,D)."""
    inputs, row = tl.arange(0, D), tl.arange(0, 4 * U)  # a row of a tile of W: gate row % 4 of unit row // 4
    unit = first + row // 4
    w = _load(weight, row % 4 * size + unit, inputs, size, (unit < size)[:, None] & (inputs < size)[None, :])
    x = tl.dot(w, tl.trans(earlier.to(w.dtype)), input_precision="tf32x3")  # (4U,B)
    x = tl.trans(tl.reshape(x, (U, 4, B)), (0, 2, 1))  # (U,B,4)
    i_g, f_o = tl.split(tl.reshape(x, (U, B, 2, 2)))
    i, g = tl.split(i_g)
    f, o = tl.split(f_o)
    return i, f, g, o


@triton.jit
def _copy_state(before, before_b, cell_before, outputs, outputs_b, cells, rows, inputs, size, whole):
    """Write h and c of the position before, where there is only padding."""
    state = rows[:, None] * size + inputs[None, :]  # (B,D)
    tl.store(cells + state, tl.load(cell_before + state, whole, 0.0), whole)
    stays = _load(before, rows, inputs, before_b, whole)
    tl.store(outputs + rows[:, None] * outputs_b + inputs[None, :], stays, whole)


@triton.jit
def _forward(
    gates, weight, h, c, live, outputs, cells, active, n, batch, size,
    gates_s, gates_b, gates_n, live_s, live_b, live_n, outputs_s, outputs_b, outputs_n,
    MASKED: tl.constexpr, B: tl.constexpr, U: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Long, with many parameters, because Triton takes pointers, sizes and strides one by one in one function."""
    s = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * B + tl.arange(0, B)).to(tl.int64)
    inputs, here = tl.arange(0, D), rows < batch
    whole = here[:, None] & (inputs < size)[None, :]
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
            earlier = _load(before, rows, inputs, before_b, whole)  # (B,D)
            for first in tl.range(0, size, U):
                unit = first + tl.arange(0, U)
                inside = (unit < size)[:, None] & here[None, :]
                given = gates + rows[None, :] * gates_b + unit[:, None]
                place = rows[None, :] * size + unit[:, None]  # (U,B)
                given_i, given_f, given_g, given_o = _load_four(given, size, inside)
                held = tl.load(cell_before + place, inside, 0.0)
                i, f, g, o = _multiply(weight, earlier, first, size, B, U, D)
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
                _store_four(active + rows[None, :] * 4 * size + unit[:, None], size, i, f, g, o, inside)
        else:  # padding only; nothing reads the gates later
            _copy_state(before, before_b, cell_before, outputs, outputs_b, cells, rows, inputs, size, whole)
        before, before_b, cell_before = outputs, outputs_b + 0 * s, cells
        outputs += outputs_n
        cells += batch * size
        active += batch * 4 * size
        gates += gates_n
        live += live_n


@triton.jit
def _propagate(
    across, delta, delta_b, rows, here, size, largest, SCALED: tl.constexpr, B: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Wᵀ δ, (D,B); across: Wᵀ. largest: that of |δ| of each example."""
    outs, gate, shrink = tl.arange(0, D), tl.arange(0, G), tl.where(largest > 0.0, largest, 1.0)
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
    return total


@triton.jit
def _pass_gradient(grad, grad_b, delta, delta_b, dh, rows, outs, size, whole, B: tl.constexpr, D: tl.constexpr):
    """Add ∂L/∂h of a position where there is only padding to that of the position before; its δ is 0."""
    state = dh + rows[:, None] * size + outs[None, :]  # (B,D)
    own = _load(grad, rows, outs, grad_b, whole).to(tl.float32)
    tl.store(state, tl.load(state, whole, 0.0) + own, whole)
    nothing = delta + rows[:, None] * delta_b + outs[None, :]
    for part in tl.static_range(4):
        tl.store(nothing + part * size, tl.zeros((B, D), tl.float32), whole)


@triton.jit
def _differentiate(
    i, f, g, o, held, squashed, hidden, later, token, MASKED: tl.constexpr
):  # fmt: skip
    """δ of the gates i, f, g and o, and the gradients of the cell and of h of the position before.

    held: the cell before; squashed: tanh of the cell; hidden, later: the gradients of h and of the cell.
    """
    inner = later + hidden * o * (1.0 - squashed * squashed)
    di, df = inner * g * i * (1.0 - i), inner * held * f * (1.0 - f)
    dg, do = inner * i * (1.0 - g * g), hidden * squashed * o * (1.0 - o)
    on, passed = inner * f, tl.zeros_like(hidden)
    if MASKED:
        real = token[:, None]
        di, df = tl.where(real, di, 0.0), tl.where(real, df, 0.0)
        dg, do = tl.where(real, dg, 0.0), tl.where(real, do, 0.0)
        on, passed = tl.where(real, on, later), tl.where(real, 0.0, hidden)
    return di, df, dg, do, on, passed


@triton.jit
def _backward(
    grad, across, c, live, cells, active, delta, dh, dc, n, batch, size,
    grad_s, grad_n, grad_b, live_s, live_b, live_n, delta_s, delta_n, delta_b,
    MASKED: tl.constexpr, SCALED: tl.constexpr,
    B: tl.constexpr, U: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """grad, live and delta point to the last position and move backwards.

    Long, with many parameters, for the same reason as `_forward`.
    """
    s = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * B + tl.arange(0, B)).to(tl.int64)
    here = rows < batch
    outs = tl.arange(0, D)
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
                i, f, g, o = _load_four(active + four, size, inside)
                i, f, g, o = i.to(tl.float32), f.to(tl.float32), g.to(tl.float32), o.to(tl.float32)
                squashed = _tanh(tl.load(cells + position * batch * size + place, inside, 0.0))
                if back < n - 1:
                    held = tl.load(cells + (position - 1) * batch * size + place, inside, 0.0)
                else:
                    held = tl.load(c + s * batch * size + place, inside, 0.0)
                hidden = tl.load(dh + place, inside, 0.0)
                hidden += _load(grad, rows, unit, grad_b, inside).to(tl.float32)
                later = tl.load(dc + place, inside, 0.0)
                di, df, dg, do, on, passed = _differentiate(i, f, g, o, held, squashed, hidden, later, token, MASKED)
                if SCALED:
                    most = tl.maximum(tl.maximum(tl.abs(di), tl.abs(df)), tl.maximum(tl.abs(dg), tl.abs(do)))
                    largest = tl.maximum(largest, tl.max(most, 1))
                _store_four(delta + rows[:, None] * delta_b + unit[None, :], size, di, df, dg, do, inside)
                tl.store(dc + place, on, inside)
                tl.store(dh + place, passed, inside)
            tl.debug_barrier()
            total = _propagate(across, delta, delta_b, rows, here, size, largest, SCALED, B, G, D)
            on_h = dh + rows[None, :] * size + outs[:, None]
            inside = (outs < size)[:, None] & here[None, :]
            tl.store(on_h, tl.load(on_h, inside, 0.0) + total, inside)
        else:  # padding only
            whole = here[:, None] & (outs < size)[None, :]
            _pass_gradient(grad, grad_b, delta, delta_b, dh, rows, outs, size, whole, B, D)
        grad -= grad_n
        live -= live_n
        delta -= delta_n


def supports(x: Tensor, h: Tensor) -> bool:
    """Return whether the kernels support these inputs: not float64, not empty, and at most LARGEST units."""
    return x.dtype != torch.float64 and 0 < h.shape[-1] <= LARGEST and x.numel() > 0


def forward(
    gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None,
    outputs: Tensor, cells: Tensor, active: Tensor,
) -> None:  # fmt: skip
    """Compute `recurrence.forward`. The last axis of gates and outputs must be contiguous."""
    note_launch("recurrence")
    (s, b, n, _), size = gates.shape, h.shape[-1]
    weight, mask = _cast_weight(weight).contiguous(), gates if live is None else live
    tiles = Tiles.choose(s, b, size, weight)
    with select_device(gates):
        _forward[(s, triton.cdiv(b, tiles.rows))](
            gates, weight, h, c, mask, outputs, cells, active, n, b, size,
            *_first_strides(gates), *_first_strides(live), outputs.stride(0), outputs.stride(2), outputs.stride(1),
            MASKED=live is not None, **tiles.forward,
        )  # fmt: skip


def backward(
    grad: Tensor, weight: Tensor, c: Tensor, live: Tensor | None, cells: Tensor, active: Tensor,
    delta: Tensor, dh: Tensor, dc: Tensor,
) -> None:  # fmt: skip
    """Compute `recurrence.backward`. The last axis of grad and delta must be contiguous."""
    (s, n, b, _), size = grad.shape, c.shape[-1]
    weight, mask = _cast_weight(weight).mT.contiguous(), grad[:, -1] if live is None else live[:, :, -1]
    tiles = Tiles.choose(s, b, size, weight)
    with select_device(grad):
        _backward[(s, triton.cdiv(b, tiles.rows))](
            grad[:, -1], weight, c, mask, cells, active, delta[:, -1], dh, dc, n, b, size,
            *_first_strides(grad), *_first_strides(live), *_first_strides(delta),
            MASKED=live is not None, SCALED=weight.dtype != delta.dtype, **tiles.backward,
        )  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of a program: rows of the batch, all units, and tiles of W.

    Several tiles of W load ahead (num_stages). Their number and size are the largest that fit into shared memory.
    """

    rows: int  # of the batch
    width: int  # number of units, rounded up to a power of two
    element: int  # bytes of one entry of W
    memory: int  # bytes of shared memory

    @classmethod
    def choose(cls, s: int, b: int, size: int, weight: Tensor, memory: int | None = None) -> "Tiles":
        """Choose few rows of the batch, unless that makes more programs than can run at once."""
        width, together = max(16, triton.next_power_of_2(size)), 1
        if weight.is_cuda:
            device = triton.runtime.driver.active.utils.get_device_properties(weight.device.index)
            memory, together = memory or device["max_shared_mem"], device["multiprocessor_count"]
        rows = next((rows for rows in (16, 32) if s * triton.cdiv(b, rows) <= together), 64)
        rows = min(rows, max(16, triton.next_power_of_2(b)))
        tiles = cls(rows, width, weight.element_size(), memory or HOPPER)
        while tiles.rows > 16 and tiles.batch_bytes > tiles.memory // 2:  # reserve half for W
            tiles = replace(tiles, rows=tiles.rows // 2)
        return tiles

    @property
    def batch_bytes(self) -> int:
        """Bytes of h_{t−1} in shared memory; products on older chips hold one more copy."""
        return self.rows * self.width * (5 if self.memory >= HOPPER else 7)

    @property
    def warps(self) -> int:
        return 16 if self.rows == 64 else 8

    @property
    def forward(self) -> dict[str, int]:
        """Launch options of the forward: the tallest tile of W that fits, with fewer stages if necessary."""
        choices = [(tall, stages) for tall in self._heights for stages in range(STAGES, 1, -1)]
        of_weight, stages = self._find_fit(choices, lambda tall: 0, self.batch_bytes)
        return {"B": self.rows, "U": of_weight // 4, "D": self.width, "num_warps": self.warps, "num_stages": stages}

    @property
    def backward(self) -> dict[str, int]:
        """Launch options of the backward: the most stages that fit, with a lower tile of W if necessary."""
        units = min(self.width, CELLS * 32 * self.warps // self.rows)
        choices = [(tall, stages) for stages in range(STAGES, 1, -1) for tall in self._heights]
        of_weight, stages = self._find_fit(choices, lambda tall: 4 * self.rows * tall, 0)
        sizes = {"B": self.rows, "U": units, "G": of_weight, "D": self.width}
        return sizes | {"num_warps": self.warps, "num_stages": stages}

    @property
    def _heights(self) -> list[int]:
        """Candidate numbers of rows of a tile of W, in decreasing order."""
        tallest = min(128, 4 * self.width, TILE_BYTES // (self.width * self.element))
        return [tallest >> times for times in range(tallest.bit_length()) if tallest >> times > 16]

    def _find_fit(self, choices: list[tuple[int, int]], beside: Callable[[int], int], once: int) -> tuple[int, int]:
        """Return the first (rows of a tile of W, stages) that fits into shared memory.

        beside: extra bytes of each stage, given the rows of its tile; once: extra bytes independent of the stages.
        """
        for tall, stages in choices:
            if stages * (tall * self.width * self.element + beside(tall)) + once <= self.memory:
                return tall, stages
        return 16, 1


def _cast_weight(weight: Tensor) -> Tensor:
    """Return W in the dtype of the products."""
    precision = torch.backends.cudnn.rnn.fp32_precision  # type: ignore[attr-defined]
    return weight.half() if weight.dtype == torch.float32 and precision == "tf32" else weight


def _first_strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of the first three axes."""
    return (0, 0, 0) if x is None else x.stride()[:3]
