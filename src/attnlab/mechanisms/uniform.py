"""Uniform attention (Snell et al. 2021, §3.2): every visible key has the same weight.

    P = softmax(0 + bias)        without a bias, 1/n over the n visible keys

Nothing is learnt: the gradient of q and k is 0. impl="auto" is a mean of the values, without a bias and dropout. On a
GPU one kernel computes it in causal self-attention without a mask.
"""

from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.kernels.launch import is_intercepted
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, masked_softmax, repeat_heads
from attnlab.mechanisms.visible_sums import mean_visible


class Uniform(Mechanism):
    row_sum = 1.0

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = 0.0 * (q.sum(-1, keepdim=True) + repeat_heads(k, self.heads).sum(-1).unsqueeze(2))  # (b,h,i,j)
        return masked_softmax(z if bias is None else z + bias, seen), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        if self.impl == "reference" or bias is not None or (self.training and self.dropout > 0):
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        self.check(q, k, mask, at, v)
        if self.wants_kernels(q):
            from attnlab.mechanisms.kernels import shaped

            if shaped.find_gap(q, v, mask, causal, at) is None and k.dtype == v.dtype:
                past: Tensor = shaped.average_past(q, k, v)
                return past, None
        mean = repeat_heads(mean_visible(v, q, k, mask, causal=causal, at=at), self.heads)
        if torch.compiler.is_compiling() or is_intercepted():
            return mean + q[..., :0].sum(-1, keepdim=True) + k[..., :0].sum(), None  # a gradient of 0 for q and k
        context: Tensor = _Unread.apply(mean.expand(*q.shape[:3], -1), q, k)  # type: ignore[no-untyped-call]
        return context, None


class _Unread(torch.autograd.Function):
    """The context, with a gradient of 0 for q and k."""

    @staticmethod
    def forward(ctx: Any, context: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return context.view_as(context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return grad, *(torch.zeros_like(x) if needed else None for x, needed in pairs)
