"""The loss of every target by one read of its logits, and the gradient of the logits by one more: two Triton kernels.

    L = log Σ_w exp x_w        loss = (1 − s)(L − x_target) + s (L − mean_w x_w) + c L²        s: smoothing, c: z-loss
    dx_w = g (p_w (1 + 2 c L) − (1 − s) 1[w = target] − s / words)        p_w = exp(x_w − L)

Neither the probabilities nor the logits in float32 are ever stored. Each part of the targets may have its own s and c.
A target that is ignored has loss 0 and no gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import operator, remember_calls, select_device

BLOCK = 2048  # words of a row that are in registers at once


@remember_calls
@triton.jit(do_not_specialize=["each", "ignored"])
def _forward(
    logits, targets, shares, factors, losses, levels, words, row, each, ignored, BLOCK: tl.constexpr
):  # fmt: skip
    """One target. row: stride of the logits; each: number of targets of a part."""
    place = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + place)
    share, factor = tl.load(shares + place // each), tl.load(factors + place // each)
    top, total, plain = float("-inf"), 0.0, 0.0
    for first in range(0, words, BLOCK):
        w = first + tl.arange(0, BLOCK)
        x = tl.load(logits + place * row + w, mask=w < words, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        plain += tl.sum(tl.where(w < words, x, 0.0), 0)
        top = higher
    level = top + tl.log(total)
    known = target != ignored
    own = tl.load(logits + place * row + target, mask=known, other=0.0).to(tl.float32)
    loss = (1.0 - share) * (level - own) + share * (level - plain / words) + factor * level * level
    tl.store(losses + place, tl.where(known, loss, 0.0))
    tl.store(levels + place, level)


@remember_calls
@triton.jit(do_not_specialize=["each", "ignored"])
def _backward(
    grad, logits, targets, shares, factors, levels, out, words, row, each, ignored, BLOCK: tl.constexpr
):  # fmt: skip
    """One target and BLOCK words."""
    place = tl.program_id(0).to(tl.int64)
    target, level = tl.load(targets + place), tl.load(levels + place)
    share, factor = tl.load(shares + place // each), tl.load(factors + place // each)
    g = tl.where(target != ignored, tl.load(grad + place), 0.0)
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + place * row + w, mask=w < words, other=0.0).to(tl.float32)
    slope = tl.exp(x - level) * (1.0 + 2.0 * factor * level) - share / words
    slope -= tl.where(w == target, 1.0 - share, 0.0)
    tl.store(out + place * words + w, g * slope, mask=w < words)


@operator("attnlab::target_losses")
def target_losses(
    logits: Tensor, targets: Tensor, shares: Tensor, factors: Tensor, ignored: int
) -> tuple[Tensor, Tensor]:
    """Losses and L of targets (t,) with logits (t,words), in float32; shares s and factors c: (parts,) in float32."""
    losses, levels = _allocate(targets)
    sizes = (logits.shape[1], logits.stride(0), len(targets) // len(shares), ignored)
    with select_device(logits):
        _forward[(len(targets),)](logits, targets, shares, factors, losses, levels, *sizes, BLOCK=BLOCK)
    return losses, levels


@operator("attnlab::target_losses_backward")
def target_losses_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, shares: Tensor, factors: Tensor, levels: Tensor, ignored: int
) -> Tensor:
    """The gradient of the logits, in their type."""
    out, words = torch.empty_like(logits, memory_format=torch.contiguous_format), logits.shape[1]
    sizes, grid = (words, logits.stride(0), len(targets) // len(shares), ignored), (len(targets), -(-words // BLOCK))
    with select_device(logits):
        _backward[grid](grad, logits, targets, shares, factors, levels, out, *sizes, BLOCK=BLOCK)
    return out


@target_losses.register_fake
def _(logits: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _allocate(targets)


@target_losses_backward.register_fake
def _(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.ignored = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return target_losses_backward(grad.contiguous(), *ctx.saved_tensors, ctx.ignored), None, None, None, None


target_losses.register_autograd(_gradients, setup_context=_save_inputs)


def _allocate(targets: Tensor) -> tuple[Tensor, Tensor]:
    return targets.new_empty(targets.shape, dtype=torch.float32), targets.new_empty(targets.shape, dtype=torch.float32)
