"""Multi-head attention around one mechanism (Vaswani et al. 2017, §3.2.2).

    q = x W_q      k, v = y W_k, y W_v,  y = memory or x itself      output = concat_h mechanism(q, k, v) W_o + b_o

QK-norm (Qwen3) replaces each head's q and k by RMSNorm(q) and RMSNorm(k), with one gain for all heads. Then RoPE
rotates them (`rotary.py`). So a cache holds rotated keys. The module does not know which mechanism it holds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.decoding_check import check_cached_decoding, has_laws
from attnlab.mechanisms.mechanism import ALL, Mechanism, widen
from attnlab.models.affine import apply_linear
from attnlab.models.cache import Cache, Project, Tensors
from attnlab.models.rotary import Rotation, rotate
from attnlab.models.scaled_linear import ScaledLinear
from attnlab.records.record import KINDS


class Attention(nn.Module, ABC):
    """A mechanism and the projection of its output, as recording sees them. forward returns (output, carry)."""

    mechanism: Mechanism
    kind: str  # "encoder-self", "decoder-self" or "cross"
    index: int  # position among the attentions of its kind

    @abstractmethod
    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        """Return weight (h,d,e) and bias (e,) of output = Σ_h context_h · weight_h + bias."""


class MultiHead(Attention):
    """Projections of queries, keys, values and output around a mechanism that is already built.

    key_value_heads   number of key heads; if smaller than heads, consecutive query heads share a key head
    head_norm         ε of the norms of queries and keys; None: no QK-norm
    scale             factor of the output

    Raises ValueError for an unknown kind, a mechanism that does not fit, or heads that do not divide.
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
        head_norm: float | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        heads, head_dim = mechanism.heads, mechanism.head_dim
        groups = heads if key_value_heads is None else key_value_heads
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if kind == "cross" and mechanism.self_only:
            raise ValueError(
                f"{type(mechanism).__name__} is defined for self-attention only and cannot be a cross attention; "
                "choose another mechanism with cross_attention=NAME"
            )
        if kind == "cross" and mechanism.lookback == ALL:
            raise ValueError(
                f"{type(mechanism).__name__} reads all former queries, which a cross attention does not keep"
            )
        if mechanism.lookback and mechanism.carries and mechanism.carry_of == "pairs":
            raise ValueError(f"{type(mechanism).__name__} reads former queries, so it cannot carry logits (lookback)")
        if groups < 1 or heads % groups:
            raise ValueError(f"key_value_heads must divide heads={heads}, got {groups}")
        self.mechanism, self.kind, self.index = mechanism, kind, index
        self._cacheable = False  # proved by check_caching
        self.joint: Callable[[Tensor], Sequence[Tensor]] | None = None  # all maps of one input as one, if set
        self.query = nn.Linear(width, mechanism.query_heads * head_dim, bias=bias)
        self.key = nn.Linear(width, groups * head_dim, bias=bias)
        self.value = nn.Linear(width, groups * head_dim, bias=bias)
        self.output = ScaledLinear(heads * head_dim, width, bias=bias, scale=scale)
        self.query_norm = None if head_norm is None else nn.RMSNorm(head_dim, eps=head_norm)
        self.key_norm = None if head_norm is None else nn.RMSNorm(head_dim, eps=head_norm)

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
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map x (b,i,e) and memory (b,j,e) to the output (b,i,e) and the mechanism's carry."""
        source, mechanism = self._select_source(x, memory, cache), self.mechanism
        if cache is None:
            q, k, v = self._project_all(x, source)
            keys = pack(self._place(k, self.key_norm, rotation), v, mechanism.key_side(source))
        else:
            q, keys = self._split_heads(self.query(x)), ()
        queries, rows = pack(self._place(q, self.query_norm, rotation), mechanism.query_side(x)), at
        if cache is not None:
            queries, keys, at = self._extend_cache(cache, queries, lambda: self.project_keys(source, rotation), at)
        (q, *query_side), (k, v, *key_side) = queries, keys
        sides = (query_side[0] if query_side else None, key_side[0] if key_side else None)
        carry = carry if mechanism.carries else None  # it may be of another mechanism, in the layer before
        if not causal and not self._reads_places():
            at = None  # kernels take no `at`
        context, carry = mechanism(q, k, v, mask, carry, causal=causal, at=at, sides=sides)
        if rows is not None and mechanism.lookback == ALL:
            context = context.index_select(2, rows)
        context = context[:, :, context.shape[2] - x.shape[1] :]  # without the former queries
        return self.output(context.transpose(1, 2).flatten(2)), carry

    def check_caching(self) -> None:
        """Raise ValueError if a user's mechanism decodes with a cache differently from the full pass.

        It measures once. Mechanisms of attnlab are proved by the laws.
        """
        if not self._cacheable and not has_laws(self.mechanism):
            check_cached_decoding(self.mechanism, cross=self.kind == "cross")
            self._cacheable = True

    def can_share_keys(self) -> bool:
        """Return whether queries of several hypotheses can read one cache, each through its own mask.

        The laws prove it: hidden keys have no influence, nor has the order of keys, unless the mechanism declares it.
        """
        mechanism = self.mechanism
        ordered = mechanism.positional and self.kind != "cross"
        return has_laws(mechanism) and not mechanism.lookback and not ordered

    def project_keys(self, source: Tensor, rotation: Rotation | None = None) -> Tensors:
        """Project (b,j,e) to k and v, (b,g,j,d) each, and add the key side where the mechanism has one."""
        k, v = self._split_heads(self.key(source)), self._split_heads(self.value(source))
        return pack(self._place(k, self.key_norm, rotation), v, self.mechanism.key_side(source))

    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.output.fold_scale()
        return weight.T.unflatten(0, (self.mechanism.heads, -1)), bias

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, index={self.index}"

    def _reads_places(self) -> bool:
        """Return whether the key index of a query changes more than what is causal."""
        mechanism = self.mechanism
        noisy = mechanism.stochastic and (mechanism.training or mechanism.sample_seed is not None)
        return noisy or mechanism.self_only or mechanism.positional or not has_laws(mechanism)

    def _select_source(self, x: Tensor, memory: Tensor | None, cache: Cache | None) -> Tensor:
        """Return the input of keys and values. It is not used in a cross attention whose cache holds them already."""
        if self.kind != "cross" and memory is not None:
            raise ValueError(f"a {self.kind} attention takes no memory: it attends to its own input")
        if self.kind == "cross" and memory is None and cache is None:
            raise ValueError("a cross attention needs a memory, or the cache that was built from it")
        return x if memory is None else memory

    def _extend_cache(
        self, cache: Cache, queries: Tensors, project: Project, at: Tensor | None
    ) -> tuple[Tensors, Tensors, Tensor | None]:
        """Return all keys, the queries with the former ones that the mechanism reads, and the key index of each query.

        A mechanism that reads ALL former queries gets one query for each key: they are cached beside the keys.
        """
        back = self.mechanism.lookback
        if back == ALL:
            both = cache.extend(lambda: (*queries, *project()), at)
            return both[: len(queries)], both[len(queries) :], None
        keys = cache.extend(project, at)
        if back:
            queries = cache.look_back(queries, back)
            at = None if at is None else torch.cat([at[0] + torch.arange(-back, 0, device=at.device), at])
        return queries, keys, at

    def _project_all(self, x: Tensor, source: Tensor) -> Tensors:
        """Return q, k and v."""
        if source is x:
            return self._project_jointly(x, self.query, self.key, self.value)
        return self._split_heads(self.query(x)), *self._project_jointly(source, self.key, self.value)

    def _project_jointly(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Apply several linear maps to x by one matrix product. Joining their weights is cheap for many tokens."""
        if self.joint is not None and not torch.compiler.is_compiling():
            return tuple(self._split_heads(part) for part in self.joint(x))
        weight = torch.cat([linear.weight for linear in linears], dim=-2)
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears], dim=-1)
        parts = apply_linear(x, weight, bias).split([linear.out_features for linear in linears], dim=-1)
        return tuple(self._split_heads(part) for part in parts)

    def _place(self, x: Tensor, norm: nn.RMSNorm | None, rotation: Rotation | None) -> Tensor:
        """Normalise and rotate the queries or keys (b,g,n,d) of each head, where the model does so."""
        if isinstance(norm, nn.RMSNorm):  # in float32 at least
            x = F.rms_norm(widen(x), x.shape[-1:], widen(norm.weight), norm.eps).to(x.dtype)
        elif norm is not None:  # of the members of a population
            x = norm(widen(x)).to(x.dtype)
        return x if rotation is None else rotate(x, rotation, self.mechanism.head_parts)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.mechanism.head_dim)).transpose(1, 2)  # (b,n,g·d) -> (b,g,n,d)


def pack(*tensors: Tensor | None) -> Tensors:
    """Return the tensors that exist."""
    return tuple(x for x in tensors if x is not None)
