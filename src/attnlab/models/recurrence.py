"""The LSTM recurrence as one operator, forward and backward written out (Hochreiter & Schmidhuber 1997; torch's form).

    i, f, g, o = σ, σ, tanh, σ of (gates_t + W h_{t−1})        c_t = f c_{t−1} + i g        h_t = o tanh(c_t)

gates_t = W_ih x_t + b_ih + b_hh of all positions are computed before, by one matrix product. At positions that are not
live (padding) the state does not change. So the last state is that of the last token, and a reversed sequence, with its
padding first, needs no packing.

    backward   δ_t = ∂L/∂(gates_t + W h_{t−1})     ∂L/∂h_{t−1} += δ_t W     ∂L/∂W = Σ_t δ_tᵀ h_{t−1}, one product

All tensors have a leading axis s of independent recurrences: the two directions of a layer and, under torch.func.vmap,
the models of a population (`nn.LSTM` has no batching rule for vmap). On a GPU the whole sequence is one Triton kernel.
There is no device sync, so a CUDA graph can capture it. If the rest is in half precision, c is still in float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import widen
from attnlab.models.batching_rule import apply_as_one_call
from attnlab.provenance import HAS_TRITON

sigmoid_backward = torch.ops.aten.sigmoid_backward  # ∂L/∂y and σ(y) -> ∂L/∂y σ(y) (1 − σ(y))
tanh_backward = torch.ops.aten.tanh_backward


def recurrence(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the outputs h_1 … h_n (b,n,d) and the last h and c (b,d).

    gates    (b,n,4d)                weight   (4d,d), W_hh
    h, c     (b,d) each, the state before the first position
    live     (b,n) bool, True at tokens; None: every position

    With one more leading axis of size s in all of them, s recurrences run side by side, and the results are (s,…).
    Raises ValueError for shapes, and TypeError for dtypes, that do not fit together.
    """
    _check(gates, weight, h, c, live)
    if gates.dim() == 3:
        single = [None if x is None else x.unsqueeze(0) for x in (gates, weight, h, c, live)]
        return tuple(x.squeeze(0) for x in recurrence(*single))  # type: ignore[arg-type]
    outputs, last_h, last_c, _, _ = _Differentiable.apply(gates, weight, h, c, live)
    return outputs, last_h, last_c


@torch.library.custom_op("attnlab::lstm_recurrence", mutates_args=())
def _recurrence(
    gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return h_t (s,b,n,d), the last h and c (s,b,d); for the backward c_t (s,n,b,d) and i, f, g, o (s,n,b,4d)."""
    outputs, last_h, last_c, cells, active = _allocate_results(gates, h)
    gates, h, first = _with_contiguous_rows(gates), h.contiguous(), widen(c).contiguous()
    _choose_passes(gates, h)[0](gates, weight, h, first, live, outputs.transpose(1, 2), cells, active)
    last_h.copy_(outputs[:, :, -1] if gates.shape[2] else h)
    last_c.copy_(cells[:, -1] if gates.shape[2] else first)
    return outputs, last_h, last_c, cells, active


@torch.library.custom_op("attnlab::lstm_recurrence_backward", mutates_args=())
def _backward(
    grad: Tensor, grad_h: Tensor, grad_c: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None,
    outputs: Tensor, cells: Tensor, active: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return ∂L by gates (s,b,n,4d), weight, h and c, given ∂L by h_t (s,b,n,d) and by the last h and c (s,b,d)."""
    grad, cells, active = _with_contiguous_rows(grad).transpose(1, 2), cells.contiguous(), active.contiguous()
    first, delta = widen(c).contiguous(), active.new_empty(active.transpose(1, 2).shape)
    dh, dc = (widen(x).clone(memory_format=torch.contiguous_format) for x in (grad_h, grad_c))  # from later positions
    _choose_passes(grad, h)[1](grad, weight, first, live, cells, active, delta.transpose(1, 2), dh, dc)
    earlier = outputs.new_empty(outputs.shape)  # h_{t−1}
    earlier[:, :, :1], earlier[:, :, 1:] = h.unsqueeze(2), outputs[:, :, :-1]
    with _match_nn_lstm_precision(delta):
        dweight = torch.bmm(delta.flatten(1, 2).mT, earlier.flatten(1, 2))
    return delta, dweight, dh.to(h.dtype), dc.to(c.dtype)


def forward(
    gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None,
    outputs: Tensor, cells: Tensor, active: Tensor,
) -> None:  # fmt: skip
    """Fill h_t and c_t (s,n,b,d) and i, f, g, o (s,n,b,4d), position by position. This is the definition."""
    for t in range(gates.shape[2]):
        now = None if live is None else live[:, :, t]
        forward_step(gates[:, :, t], torch.bmm(h, weight.mT), h, c, now, outputs[:, t], cells[:, t], active[:, t])
        h, c = outputs[:, t], cells[:, t]


def backward(
    grad: Tensor, weight: Tensor, c: Tensor, live: Tensor | None, cells: Tensor, active: Tensor,
    delta: Tensor, dh: Tensor, dc: Tensor,
) -> None:  # fmt: skip
    """Fill delta (s,n,b,4d); dh and dc (s,b,d), at least float32, turn from ∂L by the last state to ∂L by the first."""
    for t in reversed(range(grad.shape[1])):
        now = None if live is None else live[:, :, t]
        backward_step(grad[:, t], active[:, t], cells[:, t], cells[:, t - 1] if t else c, now, dh, dc, delta[:, t])
        dh += torch.bmm(delta[:, t], weight)


def forward_step(
    gates: Tensor, recurrent: Tensor, h: Tensor, c: Tensor, live: Tensor | None,
    next_h: Tensor, next_c: Tensor, active: Tensor,
) -> None:  # fmt: skip
    """Compute one step of (s,b,…): read the state (h, c), fill (next_h, next_c) and active, the gates i, f, g, o."""
    x, size = widen(gates) + recurrent, h.shape[-1]
    i, f, g, o = x.chunk(4, dim=-1)
    for gate, squash in ((x[..., : 2 * size], torch.sigmoid_), (g, torch.tanh_), (o, torch.sigmoid_)):
        squash(gate)
    cell = torch.addcmul(i * g, f, c)
    hidden = o * cell.tanh()
    if live is not None:
        padding = ~live.unsqueeze(-1)
        cell, hidden = torch.where(padding, c, cell), torch.where(padding, widen(h), hidden)
    active.copy_(x)
    next_c.copy_(cell)
    next_h.copy_(hidden)


def backward_step(
    grad: Tensor, active: Tensor, cell: Tensor, c: Tensor, live: Tensor | None, dh: Tensor, dc: Tensor, delta: Tensor
) -> None:
    """Compute one step back: fill delta, and replace dh and dc by the gradients that bypass the gates.

    dc becomes the whole gradient of the earlier c; dh is 0 at tokens and passes through at padding.
    """
    i, f, g, o = widen(active).chunk(4, dim=-1)
    squashed, hidden = cell.tanh(), widen(grad) + dh
    inner = dc + tanh_backward(hidden * o, squashed)
    di, df, dg, do = delta.chunk(4, dim=-1)
    di.copy_(sigmoid_backward(inner * g, i))
    df.copy_(sigmoid_backward(inner * c, f))
    dg.copy_(tanh_backward(inner * i, g))
    do.copy_(sigmoid_backward(hidden * squashed, o))
    if live is None:
        torch.mul(inner, f, out=dc)
        dh.zero_()
    else:
        padding = ~live.unsqueeze(-1)
        delta.masked_fill_(padding, 0.0)
        dc.copy_(torch.where(padding, dc, inner * f))
        dh.copy_(hidden.masked_fill(~padding, 0.0))


def _choose_passes(x: Tensor, h: Tensor) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return forward and backward: the Triton kernels on a GPU if they support x, else the definitions above."""
    if x.is_cuda and HAS_TRITON:
        from attnlab.models import recurrence_kernel as kernel

        if kernel.supports(x, h):
            return kernel.forward, kernel.backward
    return forward, backward


@contextmanager
def _match_nn_lstm_precision(x: Tensor) -> Iterator[None]:
    """Set products of float32 on a GPU to the precision of nn.LSTM, torch.backends.cudnn.rnn: tf32 by default.

    The setting is global to the process, so it changes only while these products are launched.
    """
    matmul: Any = torch.backends.cuda.matmul
    before, wanted = matmul.fp32_precision, torch.backends.cudnn.rnn.fp32_precision  # type: ignore[attr-defined]
    if not x.is_cuda or x.dtype != torch.float32 or wanted != "tf32" or before == "tf32":
        yield
        return
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """Return x with each row contiguous in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _allocate_results(gates: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (s, b, n, _), size = gates.shape, h.shape[-1]
    cells = gates.new_empty(s, n, b, size, dtype=torch.promote_types(gates.dtype, torch.float32))
    active = gates.new_empty(s, n, b, 4 * size)
    return gates.new_empty(s, b, n, size), h.new_empty(h.shape), h.new_empty(h.shape), cells, active


@_recurrence.register_fake
def _(gates, weight, h, c, live):
    return _allocate_results(gates, h)


@_backward.register_fake
def _(grad, grad_h, grad_c, weight, h, c, live, outputs, cells, active):
    delta = active.new_empty(active.transpose(1, 2).shape)
    return delta, weight.new_empty(weight.shape), h.new_empty(h.shape), c.new_empty(c.shape)


class _Differentiable(torch.autograd.Function):
    """The operator with its derivative: a Function, because register_autograd of an operator breaks torch.func.grad."""

    @staticmethod
    def forward(gates, weight, h, c, live):
        return _recurrence(gates, weight, h, c, live)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return apply_as_one_call(_Differentiable, info.batch_size, in_dims, inputs), 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, weight, h, c, live = inputs
        outputs, _, _, cells, active = output
        ctx.mark_non_differentiable(cells, active)
        ctx.set_materialize_grads(False)  # do not allocate zeros for cells and active
        ctx.save_for_backward(weight, h, c, live, outputs, cells, active)

    @staticmethod
    def backward(ctx, grad, grad_h, grad_c, _cells, _active):
        _, h, c, _, outputs, *_ = ctx.saved_tensors
        grads = [torch.zeros_like(x) if g is None else g for g, x in ((grad, outputs), (grad_h, h), (grad_c, c))]
        delta, dweight, dh, dc = _Derivative.apply(*grads, *ctx.saved_tensors)
        return delta, dweight, dh, dc, None


class _Derivative(torch.autograd.Function):
    """The backward of `_Differentiable`, with a batching rule for vmap."""

    @staticmethod
    def forward(*arguments):
        return _backward(*arguments)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return apply_as_one_call(_Derivative, info.batch_size, in_dims, inputs), 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("the LSTM recurrence has no second derivative; use first derivatives only")


def _check(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, live: Tensor | None) -> None:
    """Raise an error for arguments that do not fit together."""
    if gates.dim() not in (3, 4):
        raise ValueError(f"gates must be (batch, length, 4·size), or have one more axis, got {tuple(gates.shape)}")
    *stack, b, n, four = gates.shape
    size, odd = divmod(four, 4)
    if odd:
        raise ValueError(f"the last axis of gates must be a multiple of 4 (i, f, g, o), got {four}")
    expected: dict[str, tuple[Tensor | None, list[int]]] = {
        "weight": (weight, [four, size]), "h": (h, [b, size]), "c": (c, [b, size]), "live": (live, [b, n])
    }  # fmt: skip
    for name, (x, shape) in expected.items():
        if x is not None and list(x.shape) != [*stack, *shape]:
            wanted = f"{(*stack, *shape)} for gates {tuple(gates.shape)}"
            raise ValueError(f"{name} must be {wanted}, got {tuple(x.shape)}")
        if x is not None and x.dtype != (torch.bool if name == "live" else gates.dtype):
            kind = "bool, True at tokens" if name == "live" else f"{gates.dtype}, as gates are"
            raise TypeError(f"{name} must be {kind}, got {x.dtype}")
