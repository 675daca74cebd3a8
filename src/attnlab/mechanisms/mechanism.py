"""The first narrow waist: what an attention mechanism is, and the few tensor idioms that mechanisms share.

Notation, everywhere in attnlab: b batch, h heads, i query, j key, d head size; mask True = may attend.

    q (b,h,i,d)    k, v (b,g,j,d) with g dividing h (grouped heads)    weights (b,h,i,j)    context (b,h,i,d)
"""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mechanism(nn.Module, ABC):
    """How queries and keys become weights. Models hold one and do not know which.

        weights(q, k, …)  -> weights, carry      the definition, in plain PyTorch
        mix(q, k, v, …)   -> context, carry      dropout(weights) @ v, or a fused equal of it
        finish(context)   -> context             identity, unless the paper transforms the mixed context
        forward           = finish(mix(…))       what models call

    mask    bool, broadcastable to (b,1,i,j), True = may attend; never per head
    causal  key j is visible to query i only if j <= at[i]; said, not inferred from a mask
    at      (i,) the key index of each query; by default the last i keys, so causal is aligned bottom-right
    bias    added to the logits, broadcastable to (b,h,i,j)
    carry   what the previous layer of the same kind returned, or None; unspecified where hidden, and never read there

    at is also where a query stands in its own sequence, so a cross attention that draws noise may be told it.
    A row that sees no key has weights 0, context 0 and finite gradients.
    """

    carries: ClassVar[bool] = False  # hands a carry to the next layer
    stochastic: ClassVar[bool] = False  # draws noise in training
    self_only: ClassVar[bool] = False  # means nothing where queries and keys are different sequences
    row_sum: Any = None  # what every row that sees a key sums to: a number, one a head (h,), or None where it varies

    def __init__(
        self, heads: int, head_dim: int, *, layer: int = 0, scale: float | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        for name, size, least in (("heads", heads, 1), ("head_dim", head_dim, 1), ("layer", layer, 0)):
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, not {size!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {dropout}")
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be a positive number, not {scale}")
        self.heads, self.head_dim, self.layer, self.dropout = heads, head_dim, layer, dropout
        self.first = layer == 0  # torch.compile would make a program of its own for each value of layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sample_seed: int | None = None  # set by noise.sampled; read by stochastic mechanisms

    @abstractmethod
    def weights(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None = None,
        carry: Tensor | None = None,
        *,
        causal: bool = False,
        at: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        carry: Tensor | None = None,
        *,
        causal: bool = False,
        at: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        made = self.weights(q, k, mask, carry, causal=causal, at=at, bias=bias)
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(
                f"{type(self).__name__}.weights must return (weights, carry), the carry None where there is none"
            )
        self.check(q, k, mask, at, v)
        weights = F.dropout(made[0], self.dropout, self.training)
        return weights @ repeat_heads(v, self.heads), made[1]

    def finish(self, context: Tensor) -> Tensor:
        return context

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        carry: Tensor | None = None,
        *,
        causal: bool = False,
        at: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        context, carry = self.mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        return self.finish(context), carry

    def visible(
        self, q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool = False, at: Tensor | None = None
    ) -> Tensor:
        """Where a query may look: 4-D, bool, broadcastable to (b,1,i,j). Refuses arguments that do not fit."""
        self.check(q, k, mask, at)
        return visible(q, k, mask, causal=causal, at=at)

    @property
    def carry_heads(self) -> int:
        """How many heads the carry has, where there is one."""
        return self.heads

    def check(
        self, q: Tensor, k: Tensor, mask: Tensor | None = None, at: Tensor | None = None, v: Tensor | None = None
    ) -> None:
        """Refuse arguments that do not fit this mechanism or one another, saying which and how."""
        if (q.shape[1:2], q.shape[-1:]) != ((self.heads,), (self.head_dim,)):
            made = f"{type(self).__name__} has {self.heads} heads of size {self.head_dim}"
            raise ValueError(f"{made}; q is {tuple(q.shape)}, expected (batch, {self.heads}, length, {self.head_dim})")
        check(q, k, mask, at, v)

    def previous(self, carry: Tensor, z: Tensor, seen: Tensor) -> Tensor:
        """A carry as it may be read: 0 where hidden. Refuses one that does not fit, or that comes to layer 0."""
        if self.first:
            raise ValueError(f"a carry came to layer 0; build {type(self).__name__} with layer= its place in the stack")
        if carry.shape != z.shape:
            raise ValueError(f"the carry is {tuple(carry.shape)} but this layer's logits are {tuple(z.shape)}")
        return carry.masked_fill(~seen, 0.0)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}, layer={self.layer}, scale={self.scale:.4g}"


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each of g key heads serves heads/g query heads in a row: (b,g,j,d) -> (b,heads,j,d)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """S = scale · q kᵀ + bias, (b,h,i,j)."""
    if bias is not None and not bias.is_floating_point():
        raise TypeError(
            f"bias is added to the logits and must be floating-point, not {bias.dtype}; for a mask use mask="
        )
    s = (q if scale == 1 else q * scale) @ repeat_heads(k, q.shape[1]).mT
    return s if bias is None else s + bias


def position(q: Tensor, k: Tensor, at: Tensor | None = None) -> Tensor:
    """The key index of each query, (i,); by default the last i keys."""
    i, j = q.shape[2], k.shape[2]
    return torch.arange(j - i, j, device=q.device) if at is None else at


def visible(
    q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool = False, at: Tensor | None = None
) -> Tensor:
    """Where any query with any key may look, (b|1,1,i|1,j) bool."""
    if mask is None:
        seen = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=q.device)
    else:
        seen = mask[(None,) * (4 - mask.dim())]
    if causal:
        seen = seen & (torch.arange(k.shape[2], device=q.device) <= position(q, k, at)[:, None])
    return seen


def masked_softmax(z: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the visible keys, at least in float32; a row that sees nothing is 0, and so is its gradient.

    A logit of −∞, which a bias can make, hides its key too.
    """
    hidden = ~seen | (z == -torch.inf)
    p = wide(z).masked_fill(hidden, torch.finfo(wide(z).dtype).min).softmax(-1)
    return p.masked_fill(hidden, 0.0).to(z.dtype)


def wide(x: Tensor) -> Tensor:
    """x in at least float32: what a sum over keys is made in."""
    return x if x.dtype == torch.float64 else x.float()


def check(q: Tensor, k: Tensor, mask: Tensor | None = None, at: Tensor | None = None, v: Tensor | None = None) -> None:
    """Refuse arguments that do not fit together, saying which and how."""
    for name, x in (("q", q), ("k", k), ("v", k if v is None else v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head_dim); its shape is {tuple(x.shape)}")
    (b, h, i, d), (kb, g, j, kd) = q.shape, k.shape
    if (b, d) != (kb, kd):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head_dim")
    if h % g:
        raise ValueError(f"{h} query heads cannot share {g} key heads: {g} does not divide {h}")
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, heads or length")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool (True = may attend), not {mask.dtype}; for an additive mask use bias=")
        if mask.dim() > 3 and mask.shape[-3] != 1:
            raise ValueError(f"mask {tuple(mask.shape)} has a head axis: a mask is the same for all heads, (b,1,i,j)")
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(shape, (b, 1, i, j), strict=True)):
            raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to (b,1,i,j) = {(b, 1, i, j)}")
    if at is not None and (at.shape != (i,) or at.is_floating_point() or at.dtype == torch.bool):
        raise ValueError(f"at must hold one key index for each of the {i} queries; got {at.dtype} {tuple(at.shape)}")
