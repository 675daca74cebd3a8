"""Scaled dot-product attention (Vaswani et al. 2017, §3.2.1).

    S = q kᵀ / √d        P = softmax(S)

`mix` is torch's `scaled_dot_product_attention`, or on a GPU a kernel for short rows. impl says which:

    auto    the kernel where it covers the case        sdpa    torch's        fused   the kernel, or an error
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import Mechanism, logits, masked_softmax, repeat_heads, visible

Impl = Literal["auto", "sdpa", "fused"]


class Softmax(Mechanism):
    row_sum = 1.0

    def __init__(self, heads: int, head_dim: int, *, impl: Impl = "auto", **base) -> None:
        super().__init__(heads, head_dim, **base)
        if impl not in get_args(Impl):
            raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, not {impl!r}")
        self.impl: Impl = impl

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_softmax(logits(q, k, self.scale, bias), seen), None

    def mix(self, q, k, v, mask=None, carry=None, *, causal=False, at=None, bias=None):
        self.check(q, k, mask, at, v)
        dropout = self.dropout if self.training else 0.0
        options = {"causal": causal, "at": at, "bias": bias, "scale": self.scale, "dropout": dropout}
        return fused(q, k, v, mask, impl=self.impl, **options), None


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    at: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float,
    dropout: float = 0.0,
    impl: Impl = "auto",
) -> Tensor:
    """softmax(scale·qkᵀ + bias) v, fused; what a blind row gives does not depend on the backend.

    No mask tensor is made where torch needs none: every key visible, or causal with as many queries as keys.
    A blind row is shown every key and its context erased, so that no backend ever meets a row of −∞.
    """
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias must be floating-point, not {bias.dtype}; for a mask use mask=")
    if impl == "fused" or (impl == "auto" and q.is_cuda):
        from attnlab.mechanisms.kernels import softmax as kernel

        reason = "a bias, or queries placed by at=" if at is not None or bias is not None else None
        if (reason := reason or kernel.unsupported(q, k, v)) is None:
            seed = torch.randint(2**62, (), device=q.device) if dropout else None
            return kernel.short_softmax(q, k, v, mask, seed, causal, scale, dropout)
        if impl == "fused":
            raise ValueError(f"impl='fused' does not cover {reason}; say impl='auto' or 'sdpa'")
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    bare = mask is None and bias is None
    if q.is_cuda and q.shape[1] != k.shape[1] and not (bare and q.dtype in (torch.bfloat16, torch.float16)):
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])  # no fused backend has groups then
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": q.shape[1] != k.shape[1]}
    causal = causal and not (q.shape[2] == 1 and at is None)  # the last query sees every key
    square = causal and at is None and q.shape[2] == k.shape[2]
    if bare and (square or not causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=square, **options)
    seen = visible(q, k, mask, causal=causal, at=at)
    if bias is not None:
        seen = seen & (bias > -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    allow = (seen | blind).expand(-1, -1, q.shape[2], -1)
    if bias is not None:
        allow = bias.to(q.dtype).masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allow, **options).masked_fill(blind, 0.0)
