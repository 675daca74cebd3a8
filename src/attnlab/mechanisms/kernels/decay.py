"""The decay of forgetting attention as a bias of keys, in one pass over the gates.

    forward    −c_j = −Σ_{l ≤ j} log f_l over visible keys l        backward   d log f_l = −Σ_{j ≥ l} dB_j, 0 if hidden

A program goes through the keys of one head, in float64, because c may reach thousands. It also writes the two float32
numbers by which `pairs.read_bias` lets kernels read the result.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    is_intercepted,
    operator,
    refuse_second_derivative,
    remember_calls,
    round_up,
    select_device,
)

LONGEST = 1024  # keys of a step


@remember_calls
@triton.jit(do_not_specialize=["heads", "keys"])
def _sum_gates(
    x, mask, out, halves, heads, keys, x_b, x_h, x_j, m_b, m_j, BACKWARD: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """−c of log f; BACKWARD: d log f of dB, with the memory layout (b,j,h). halves (2,b,h,j) are written forward."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    total, steps = tl.zeros((1,), dtype=tl.float64), tl.cdiv(keys, BLOCK)
    for step in range(0, steps):
        place = steps - 1 - step if BACKWARD else step
        j = place * BLOCK + tl.arange(0, BLOCK)
        inside, seen = j < keys, j < keys
        if MASKED:
            seen &= tl.load(mask + b * m_b + j * m_j, mask=inside, other=0) != 0
        if BACKWARD:
            each = tl.load(x + b * x_b + h * x_h + j * x_j, mask=inside, other=0.0).to(tl.float64)
            sums = tl.where(seen, -total - tl.cumsum(each, 0, reverse=True), 0.0)
            tl.store(out + (b * keys + j) * heads + h, sums, mask=inside)
        else:
            each = tl.load(x + b * x_b + h * x_h + j * x_j, mask=seen, other=0.0).to(tl.float64)
            sums = -total - tl.cumsum(each, 0)
            coarse = sums.to(tl.float32)
            finite = sums < float("inf")
            fine = tl.where(finite, sums, 0.0) - tl.where(finite, coarse, 0.0).to(tl.float64)
            tl.store(out + head * keys + j, sums, mask=inside)
            tl.store(halves + head * keys + j, coarse, mask=inside)
            behind = halves + tl.num_programs(0).to(tl.int64) * keys
            tl.store(behind + head * keys + j, fine.to(tl.float32), mask=inside)
        total += tl.sum(each, 0)


@operator("attnlab::sum_gates")
def sum_gates(log_f: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """−c of log f (b,h,j,1), in float64 (b,h,1,j), and its halves in float32; mask: bool, the same for all queries."""
    b, h, j, _ = log_f.shape
    out = log_f.new_empty(b, h, 1, j, dtype=torch.float64)
    halves = log_f.new_empty(2, b, h, 1, j, dtype=torch.float32)
    _launch(log_f, mask, out, halves, log_f.stride()[:3])
    return out, halves


@operator("attnlab::sum_gates_backward")
def sum_gates_backward(grad: Tensor, log_f: Tensor, mask: Tensor | None) -> Tensor:
    """d log f, (b,h,j,1)."""
    b, h, j, _ = log_f.shape
    out = log_f.new_empty(b, j, h).transpose(1, 2).unsqueeze(-1)
    _launch(grad, mask, out, grad, (grad.stride(0), grad.stride(1), grad.stride(3)), backward=True)
    return out


def _launch(
    x: Tensor, mask: Tensor | None, out: Tensor, halves: Tensor, strides: tuple[int, ...], backward: bool = False
) -> None:
    b, h = x.shape[:2]
    keys, seen, places = out.numel() // (b * h), x, (0, 0)
    if mask is not None:
        wide = mask[(None,) * (4 - mask.dim())].expand(b, 1, 1, keys)
        seen, places = mask.view(torch.uint8), (wide.stride(0), wide.stride(3))
    flags = {"BACKWARD": backward, "MASKED": mask is not None, "BLOCK": min(LONGEST, round_up(keys, 128))}
    with select_device(x):
        _sum_gates[(b * h,)](x, seen, out, halves, h, keys, *strides, *places, **flags)


@sum_gates.register_fake
def _(log_f: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    b, h, j, _ = log_f.shape
    out = log_f.new_empty(b, h, 1, j, dtype=torch.float64)
    return out, log_f.new_empty(2, b, h, 1, j, dtype=torch.float32)


@sum_gates_backward.register_fake
def _(grad: Tensor, log_f: Tensor, mask: Tensor | None) -> Tensor:
    b, h, j, _ = log_f.shape
    return log_f.new_empty(b, j, h).transpose(1, 2).unsqueeze(-1)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None]:
    refuse_second_derivative()
    return sum_gates_backward(grad, *ctx.saved_tensors), None


sum_gates.register_autograd(_gradients, setup_context=_save_inputs)


def make_decay(log_f: Tensor, mask: Tensor | None) -> Tensor:
    """−c as a bias, (b,h,1,j), which keeps its halves as `pairs.read_bias` does."""
    decay: Tensor
    decay, halves = sum_gates(log_f, mask)
    if not (torch.compiler.is_compiling() or is_intercepted() or decay.is_inference()):
        decay.halves = decay._version, halves  # type: ignore[attr-defined]
    return decay
