"""Multi-head attention around one mechanism (Vaswani et al. 2017, §3.2.2).

    q = x W_q      k, v = y W_k, y W_v,  y = memory or x itself      output = concat_h mechanism(q, k, v) W_o + b_o

The module does not know which mechanism it holds.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import Mechanism
from attnlab.models.cache import Cache
from attnlab.records.record import KINDS


class Attention(nn.Module, ABC):
    """What recording sees: a mechanism, and the projection of what it returns. forward gives (output, carry)."""

    mechanism: Mechanism
    kind: str  # "encoder-self", "decoder-self" or "cross"
    index: int  # its place among the attentions of its kind

    @abstractmethod
    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight (h,d,e) and bias (e,) in output = Σ_h context_h · weight_h + bias."""


class MultiHead(Attention):
    """Projections of queries, keys, values and output; the mechanism is given already built.

    kind   "encoder-self", "decoder-self" or "cross"            index   its place among the attentions of its kind
    key_value_heads   fewer than heads: each key head serves as many query heads in a row
    """

    def __init__(
        self,
        mechanism: Mechanism,
        width: int,
        *,
        kind: str,
        index: int = 0,
        key_value_heads: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        heads, head_dim = mechanism.heads, mechanism.head_dim
        groups = heads if key_value_heads is None else key_value_heads
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        if kind == "cross" and mechanism.self_only:
            raise ValueError(
                f"{type(mechanism).__name__} means nothing where queries and keys are different sequences, "
                "so it cannot be a cross attention; choose another one there (in a configuration: cross_attention=…)"
            )
        if groups < 1 or heads % groups:
            raise ValueError(f"{heads} query heads cannot share {groups} key heads: {groups} does not divide {heads}")
        self.mechanism, self.kind, self.index = mechanism, kind, index
        self.query = nn.Linear(width, heads * head_dim, bias=bias)
        self.key = nn.Linear(width, groups * head_dim, bias=bias)
        self.value = nn.Linear(width, groups * head_dim, bias=bias)
        self.output = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        carry: Tensor | None = None,
        *,
        causal: bool = False,
        at: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x (b,i,e), memory (b,j,e) -> output (b,i,e) and the mechanism's carry."""
        source = self._source(x, memory, cache)
        if cache is not None:
            q, (k, v) = self._split(self.query(x)), cache.extend(lambda: self.keys_values(source), at)
        elif source is x:
            q, k, v = self._jointly(x, self.query, self.key, self.value)
        else:
            q, (k, v) = self._split(self.query(x)), self._jointly(source, self.key, self.value)
        context, carry = self.mechanism(q, k, v, mask, carry, causal=causal, at=at)
        return self.output(context.transpose(1, 2).flatten(2)), carry

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """(b,j,e) -> k, v (b,g,j,d)."""
        return self._split(self.key(source)), self._split(self.value(source))

    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        return self.output.weight.T.unflatten(0, (self.mechanism.heads, -1)), self.output.bias

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, index={self.index}"

    def _source(self, x: Tensor, memory: Tensor | None, cache: Cache | None) -> Tensor:
        """What keys and values are made of. A cross attention with a cache has made them before."""
        if self.kind != "cross" and memory is not None:
            raise ValueError(f"a {self.kind} attention attends to its own input and takes no memory")
        if self.kind == "cross" and memory is None and cache is None:
            raise ValueError("a cross attention needs a memory to attend to, or the cache that was made from it")
        return x if memory is None else memory

    def _jointly(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """x through several linears by one matrix product: over many tokens, joining the weights costs next to none."""
        weight = torch.cat([linear.weight for linear in linears])
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        parts = F.linear(x, weight, bias).split([linear.out_features for linear in linears], dim=-1)
        return tuple(self._split(part) for part in parts)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.mechanism.head_dim)).transpose(1, 2)  # (b,n,g·d) -> (b,g,n,d)
