"""Scaled dot-product attention (Vaswani et al. 2017, §3.2.1): the weights of each query are a softmax over the keys.

    S = q kᵀ / √d        P = softmax(S)

impl="auto" is a Triton kernel on a GPU for short rows, and for a few masked queries as in beam search; elsewhere it is
torch's `scaled_dot_product_attention`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax, repeat_heads, visible
from attnlab.mechanisms.seeding import DROPOUT, draw_seed

FEW = 16  # queries that one tile of a kernel holds
Arguments = tuple[Tensor, Tensor, Tensor | None, bool, Tensor | None]  # q, k, mask, causal, bias


class Softmax(Mechanism):
    kernels = frozenset({"softmax"})
    row_sum = 1.0

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at)
        q, k, mask, causal, bias = self.prepare(q, k, mask, causal, at, bias)
        return masked_softmax(logits(q, k, self.scale, bias), visible(q, k, mask, causal=causal, at=at)), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        if self.impl == "reference":
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        self.check(q, k, mask, at, v)
        wanted = self.wants_kernels(q)
        prepare = self.prepare_by_kernels if wanted else self.prepare
        q, k, mask, causal, bias = prepare(q, k, mask, causal, at, bias)
        kernel = wanted and self.is_covered(find_gap(q, k, v, at, bias))
        return attend(self, q, k, v, mask, causal=causal, at=at, bias=bias, kernel=kernel), None

    def takes_members(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None) -> bool:
        if not (self.training and self.dropout):
            return True
        short = self.wants_kernels(q) and find_gap(q, k, v, at, bias) is None
        return short or can_mix_one_pass(self, q, k, v, at=at, bias=bias)

    def prepare(
        self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Arguments:
        """Return the arguments of the softmax: the same, unless a mechanism is softmax of something else."""
        return q, k, mask, causal, bias

    def prepare_by_kernels(
        self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Arguments:
        """Return what `prepare` returns, by kernels where they cover the arguments."""
        return self.prepare(q, k, mask, causal, at, bias)


def find_gap(q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None) -> str | None:
    """Name what the kernel for short rows does not cover, or return None."""
    if at is not None or bias is not None:
        return "a bias, or queries placed by at="
    from attnlab.mechanisms.kernels import softmax

    return softmax.find_gap(q, k, v)


def is_decoding(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Return whether a few queries, without gradient, can be read by the kernel that prepares no mask of torch's."""
    if torch.is_grad_enabled() or q.shape[2] > FEW or bias is not None or not mechanism.wants_kernels(q):
        return False
    from attnlab.mechanisms.kernels import tiles

    return tiles.find_tile_gap(q, k, v) is None


def attend(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None,
    bias: Tensor | None, kernel: bool, number: int = 0,
) -> Tensor:  # fmt: skip
    """softmax(scale·qkᵀ + bias) v without ever storing the weights: by the kernel for short rows, or by torch.

    number   of these weights, where a mechanism has several, whose dropout differs

    torch gets no mask tensor where it needs none: all keys visible, or causal with as many queries as keys.
    A row without visible keys attends to every key and its context is set to 0, so no backend meets a row of −∞.
    """
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias must be floating-point, got {bias.dtype}; pass a boolean mask as mask=")
    scale, dropout = mechanism.scale, mechanism.dropout if mechanism.training else 0.0
    if kernel:
        from attnlab.mechanisms.kernels.softmax import short_softmax

        seed = draw_seed(mechanism, DROPOUT, q.device, number) if dropout else None
        context: Tensor = short_softmax(q, k, v, mask, seed, causal, scale, dropout)
        return context
    if mask is not None and not causal and is_decoding(mechanism, q, k, v, bias):
        return mix_one_pass(mechanism, q, k, v, mask, causal=False)
    if dropout and mechanism.seeds is not None:  # which torch's attention would not draw from
        return attend_by_seed(mechanism, q, k, v, mask, causal=causal, at=at, bias=bias, number=number)
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    bare = mask is None and bias is None
    if q.is_cuda and q.shape[1] != k.shape[1] and not (bare and q.dtype in (torch.bfloat16, torch.float16)):
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])  # no fused backend supports groups then
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": q.shape[1] != k.shape[1]}
    causal = causal and not (q.shape[2] == 1 and at is None)  # the last query sees every key
    square = causal and at is None and q.shape[2] == k.shape[2]
    if bare and (square or not causal):
        return attend_by_torch(q, k, v, is_causal=square, **options)
    seen = visible(q, k, mask, causal=causal, at=at)
    if bias is not None:
        seen = seen & (bias != -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    allow = (seen | blind).expand(-1, -1, q.shape[2], -1)
    if bias is not None:
        allow = bias.to(q.dtype).masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0)
    return attend_by_torch(q, k, v, attn_mask=allow, **options).masked_fill(blind, 0.0)


def attend_by_seed(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None,
    bias: Tensor | None, number: int,
) -> Tensor:  # fmt: skip
    """softmax(scale·qkᵀ + bias) v with dropout from the mechanism's seeds: by kernels, else by the definition.

    Values wider than the queries are mixed in parts as wide as they, by the same weights.
    """
    parts = torch.split(v, q.shape[3], dim=-1)
    if all(can_mix_one_pass(mechanism, q, k, part, at=at, bias=bias) for part in parts):
        seed = draw_seed(mechanism, DROPOUT, q.device, number)
        mixed = [mix_one_pass(mechanism, q, k, x, mask, causal=causal, bias=bias, dropping=seed) for x in parts]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=-1)
    from attnlab.mechanisms.by_rows import mix_by_rows

    def weigh(q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None, bias: Tensor | None
              ) -> Tensor:  # fmt: skip
        return masked_softmax(logits(q, k, mechanism.scale, bias), visible(q, k, mask, causal=causal, at=at))

    return mix_by_rows(mechanism, weigh, q, k, v, mask, causal=causal, at=at, bias=bias, number=number)


def attend_by_torch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return torch's attention. Its backward pass gets a gradient with the memory layout of the result.

    In torch 2.11 cuDNN plans the backward pass for the first layout that it meets, and misreads gradients with another.
    """
    context = F.scaled_dot_product_attention(q, k, v, **options)
    if context.is_cuda and context.requires_grad and not torch.compiler.is_compiling():
        context.register_hook(partial(match_layout, context.stride()))  # type: ignore[no-untyped-call]
    return context


def match_layout(strides: tuple[int, ...], x: Tensor) -> Tensor:
    """Return x with these strides: itself, or a copy."""
    if all(own == wanted or size == 1 for own, wanted, size in zip(x.stride(), strides, x.shape, strict=True)):
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)
