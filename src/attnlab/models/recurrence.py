"""The LSTM recurrence as one operator, forward and backward written out (Hochreiter & Schmidhuber 1997; torch's form).

    i, f, g, o = σ, σ, tanh, σ of (gates_t + W h_{t−1})        c_t = f c_{t−1} + i g        h_t = o tanh(c_t)

gates_t = W_ih x_t + b_ih + b_hh of all positions are made before, by one matrix product. Where a position is not live
(padding) the state stays as it is, so the last state is that of the last token, and a sequence turned round, its
padding in front, needs no packing.

    backward   δ_t = ∂L/∂(gates_t + W h_{t−1})     ∂L/∂h_{t−1} += δ_t W     ∂L/∂W = Σ_t δ_tᵀ h_{t−1}, one product

Everything has a leading axis s of independent recurrences: the two directions of a layer, and under torch.func.vmap the
models of a population, which `nn.LSTM` has no batching rule for. On a GPU the whole sequence is one Triton kernel.
Nothing waits for the device, so a CUDA graph can hold it. c is kept in float32 where the rest is in half precision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import wide
from attnlab.models.batching_rule import as_one_call

by_sigmoid = torch.ops.aten.sigmoid_backward  # ∂L/∂y and σ(y) -> ∂L/∂y σ(y) (1 − σ(y))
by_tanh = torch.ops.aten.tanh_backward


def recurrence(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None = None) -> tuple[Tensor, ...]:
    """Outputs h_1 … h_n (b,n,d) and the last h and c (b,d).

    gates (b,n,4d), weight W_hh (4d,d), h and c before the first position (b,d), live (b,n) bool, None: every position.
    Each with one leading axis more, of the same size s: s recurrences side by side, and results (s,…).
    """
    _check(gates, weight, h, c, live)
    if gates.dim() == 3:
        one = [None if x is None else x.unsqueeze(0) for x in (gates, weight, h, c, live)]
        return tuple(x.squeeze(0) for x in recurrence(*one))  # type: ignore[arg-type]
    outputs, last_h, last_c, _, _ = _Differentiable.apply(gates, weight, h, c, live)
    return outputs, last_h, last_c


@torch.library.custom_op("attnlab::lstm_recurrence", mutates_args=())
def _recurrence(
    gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h_t (s,b,n,d) of all t, the last h and c (s,b,d); for the backward c_t (s,n,b,d) and i, f, g, o (s,n,b,4d)."""
    outputs, last_h, last_c, cells, active = _empty(gates, h)
    gates, h, first = _rows(gates), h.contiguous(), wide(c).contiguous()
    _passes(gates, h).forward(gates, weight, h, first, live, outputs.transpose(1, 2), cells, active)
    some = gates.shape[2] > 0
    return (
        outputs,
        last_h.copy_(outputs[:, :, -1] if some else h),
        last_c.copy_(cells[:, -1] if some else first),
        cells,
        active,
    )


@torch.library.custom_op("attnlab::lstm_recurrence_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_h: Tensor,
    grad_c: Tensor,
    weight: Tensor,
    h: Tensor,
    c: Tensor,
    live: Tensor | None,
    outputs: Tensor,
    cells: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """∂L by gates (s,b,n,4d), weight, h and c, from ∂L by h_t (s,b,n,d) and by the last h and c (s,b,d)."""
    grad, cells, active = _rows(grad).transpose(1, 2), cells.contiguous(), active.contiguous()
    first, delta = wide(c).contiguous(), active.new_empty(active.transpose(1, 2).shape)
    dh, dc = (wide(x).clone(memory_format=torch.contiguous_format) for x in (grad_h, grad_c))  # by what comes later
    _passes(grad, h).backward(grad, weight, first, live, cells, active, delta.transpose(1, 2), dh, dc)
    earlier = outputs.new_empty(outputs.shape)  # h_{t−1}
    earlier[:, :, :1], earlier[:, :, 1:] = h.unsqueeze(2), outputs[:, :, :-1]
    with _products_as_nn_lstm_has_them(delta):
        dweight = torch.bmm(delta.flatten(1, 2).mT, earlier.flatten(1, 2))
    return delta, dweight, dh.to(h.dtype), dc.to(c.dtype)


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
    """Fill h_t and c_t (s,n,b,d) and i, f, g, o (s,n,b,4d), one position after another. The definition."""
    for t in range(gates.shape[2]):
        now = None if live is None else live[:, :, t]
        forward_step(gates[:, :, t], torch.bmm(h, weight.mT), h, c, now, outputs[:, t], cells[:, t], active[:, t])
        h, c = outputs[:, t], cells[:, t]


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
    """Fill delta (s,n,b,4d); dh and dc (s,b,d), wide, go from ∂L by the last state to ∂L by the first."""
    for t in reversed(range(grad.shape[1])):
        now = None if live is None else live[:, :, t]
        backward_step(grad[:, t], active[:, t], cells[:, t], cells[:, t - 1] if t else c, now, dh, dc, delta[:, t])
        dh += torch.bmm(delta[:, t], weight)


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
    """One step of (s,b,…), from the state (h, c) into (next_h, next_c) and active, the i, f, g, o."""
    x, size = wide(gates) + recurrent, h.shape[-1]
    i, f, g, o = x.chunk(4, dim=-1)
    for gate, squash in ((x[..., : 2 * size], torch.sigmoid_), (g, torch.tanh_), (o, torch.sigmoid_)):
        squash(gate)
    cell = torch.addcmul(i * g, f, c)
    hidden = o * cell.tanh()
    if live is not None:
        kept = ~live.unsqueeze(-1)
        cell, hidden = torch.where(kept, c, cell), torch.where(kept, wide(h), hidden)
    active.copy_(x)
    next_c.copy_(cell)
    next_h.copy_(hidden)


def backward_step(
    grad: Tensor, active: Tensor, cell: Tensor, c: Tensor, live: Tensor | None, dh: Tensor, dc: Tensor, delta: Tensor
) -> None:
    """One step back: writes delta; dh and dc become what passes by the gates, dc all of it, dh where not live."""
    i, f, g, o = wide(active).chunk(4, dim=-1)
    squashed, hidden = cell.tanh(), wide(grad) + dh
    inner = dc + by_tanh(hidden * o, squashed)
    di, df, dg, do = delta.chunk(4, dim=-1)
    di.copy_(by_sigmoid(inner * g, i))
    df.copy_(by_sigmoid(inner * c, f))
    dg.copy_(by_tanh(inner * i, g))
    do.copy_(by_sigmoid(hidden * squashed, o))
    if live is None:
        torch.mul(inner, f, out=dc)
        dh.zero_()
    else:
        kept = ~live.unsqueeze(-1)
        delta.masked_fill_(kept, 0.0)
        dc.copy_(torch.where(kept, dc, inner * f))
        dh.copy_(hidden.masked_fill(~kept, 0.0))


def _passes(x: Tensor, h: Tensor) -> Any:
    """Where forward and backward are: the Triton kernels on a GPU, for what they cover, else the definition."""
    kernel = _kernel() if x.is_cuda else None
    return kernel if kernel is not None and kernel.covers(x, h) else _Definition


class _Definition:
    forward = staticmethod(forward)
    backward = staticmethod(backward)


def _kernel() -> ModuleType | None:
    try:
        from attnlab.models import recurrence_kernel
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None  # there is none for this system
    return recurrence_kernel


@contextmanager
def _products_as_nn_lstm_has_them(x: Tensor) -> Iterator[None]:
    """On a GPU in tf32 where torch.backends.cudnn.rnn says so, which it does unless told otherwise; else as other
    products are. The setting is the process's, and is changed for no longer than it takes to start these."""
    products: Any = torch.backends.cuda.matmul
    before, said = products.fp32_precision, torch.backends.cudnn.rnn.fp32_precision  # type: ignore[attr-defined]
    if not x.is_cuda or x.dtype != torch.float32 or said != "tf32" or before == "tf32":
        yield
        return
    products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def _rows(x: Tensor) -> Tensor:
    """x, each row of it in one piece of memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty(gates: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (s, b, n, _), size = gates.shape, h.shape[-1]
    cells = torch.promote_types(gates.dtype, torch.float32)
    return (
        gates.new_empty(s, b, n, size),
        h.new_empty(h.shape),
        h.new_empty(h.shape),
        gates.new_empty(s, n, b, size, dtype=cells),
        gates.new_empty(s, n, b, 4 * size),
    )


@_recurrence.register_fake
def _(gates, weight, h, c, live):
    return _empty(gates, h)


@_backward.register_fake
def _(grad, grad_h, grad_c, weight, h, c, live, outputs, cells, active):
    delta = active.new_empty(active.transpose(1, 2).shape)
    return delta, weight.new_empty(weight.shape), h.new_empty(h.shape), c.new_empty(c.shape)


class _Differentiable(torch.autograd.Function):
    """The operator with its derivative. Functions, since an operator's own registration stops torch.func.grad."""

    @staticmethod
    def forward(gates, weight, h, c, live):
        return _recurrence(gates, weight, h, c, live)

    @staticmethod
    def vmap(info, in_dims, *given):
        return as_one_call(_Differentiable, info.batch_size, in_dims, given), 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, weight, h, c, live = inputs
        outputs, _, _, cells, active = output
        ctx.mark_non_differentiable(cells, active)
        ctx.set_materialize_grads(False)  # of these two there are none: zeros of their size would be made
        ctx.save_for_backward(weight, h, c, live, outputs, cells, active)

    @staticmethod
    def backward(ctx, grad, grad_h, grad_c, _cells, _active):
        _, h, c, _, outputs, *_ = ctx.saved_tensors
        given = [torch.zeros_like(x) if g is None else g for g, x in ((grad, outputs), (grad_h, h), (grad_c, c))]
        delta, dweight, dh, dc = _Derivative.apply(*given, *ctx.saved_tensors)
        return delta, dweight, dh, dc, None


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        return _backward(*arguments)

    @staticmethod
    def vmap(info, in_dims, *given):
        return as_one_call(_Derivative, info.batch_size, in_dims, given), 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("the second derivative of the LSTM recurrence is not there; take the first alone")


def _check(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None) -> None:
    """Refuse arguments that do not fit together, saying which and how."""
    if gates.dim() not in (3, 4):
        raise ValueError(f"gates must be (batch, length, 4·size), or one axis more, not {tuple(gates.shape)}")
    *stack, b, n, four = gates.shape
    size, odd = divmod(four, 4)
    if odd:
        raise ValueError(f"the last axis of gates holds i, f, g, o: a multiple of 4, not {four}")
    expected: dict[str, tuple[Tensor | None, list[int]]] = {
        "weight": (weight, [four, size]), "h": (h, [b, size]), "c": (c, [b, size]), "live": (live, [b, n])
    }  # fmt: skip
    for name, (x, shape) in expected.items():
        if x is not None and list(x.shape) != [*stack, *shape]:
            fits = f"with gates {tuple(gates.shape)} it must be {(*stack, *shape)}"
            raise ValueError(f"{name} is {tuple(x.shape)}; {fits}")
        if x is not None and x.dtype != (torch.bool if name == "live" else gates.dtype):
            kind = "bool, True = a token" if name == "live" else f"{gates.dtype}, as gates are"
            raise TypeError(f"{name} must be {kind}, not {x.dtype}")
