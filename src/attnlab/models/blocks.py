"""The layers of a Transformer, and the stack that threads carries and caches through them."""

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnlab.models.attention import MultiHead
from attnlab.models.cache import BeamDecoding, Cache, CrossCache, Decoding, make_empty_cache
from attnlab.models.dropout import Dropout
from attnlab.models.embedding import InputEmbedding
from attnlab.models.rotary import Rotary, Rotation
from attnlab.models.scaled_linear import ScaledLinear

Carries = tuple[Tensor | None, Tensor | None]  # of self-attention and of cross attention


class Residual(nn.Module):
    """A residual connection around a part f:  x + dropout(f(norm(x)))  if pre,  else  norm(x + dropout(f(x)))."""

    def __init__(self, norm: nn.Module, *, pre: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.pre = norm, pre
        self.dropout = Dropout(dropout)

    def prepare(self, x: Tensor) -> Tensor:
        """Return the input of the part."""
        return self.norm(x) if self.pre else x

    def add(self, x: Tensor, part: Tensor) -> Tensor:
        """Add the output of the part to x."""
        x = self.dropout.add(x, part)
        return x if self.pre else self.norm(x)


class FeedForward(nn.Module):
    """W₂ dropout(g(W₁ x + b₁)) + b₂, or gated (Shazeer 2020): W₂ dropout(g(W₁ x + b₁) ∘ (W₃ x + b₃)) + b₂.

    activation   g; SiLU makes a gated one SwiGLU, GELU makes it GeGLU        scale   factor of the output
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: nn.Module,
        dropout: float,
        gated: bool = False,
        bias: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.inner, self.output = nn.Linear(width, inner, bias), ScaledLinear(inner, width, bias=bias, scale=scale)
        self.factor = nn.Linear(width, inner, bias) if gated else None
        self.activation, self.dropout = activation, Dropout(dropout)
        self.rectified: Callable[[Tensor], Tensor] | None = None  # inner and activation as one, if set

    def forward(self, x: Tensor) -> Tensor:
        if self.rectified is None or torch.compiler.is_compiling():
            inner = self.activation(self.inner(x))
        else:
            inner = self.rectified(x)
        return self.output(self.dropout(inner if self.factor is None else inner * self.factor(x)))


class Block(nn.Module):
    """Self-attention, optional cross attention and feed-forward, each with a residual connection."""

    def __init__(
        self,
        attention: MultiHead,
        feed_forward: FeedForward,
        cross: MultiHead | None = None,
        *,
        make_norm: Callable[[], nn.Module],
        pre: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention, self.cross, self.feed_forward = attention, cross, feed_forward
        self.attention_residual = Residual(make_norm(), pre=pre, dropout=dropout)
        self.cross_residual = None if cross is None else Residual(make_norm(), pre=pre, dropout=dropout)
        self.feed_forward_residual = Residual(make_norm(), pre=pre, dropout=dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: Tensor | None,
        memory_mask: Tensor | None,
        carries: Carries,
        *,
        causal: bool,
        at: Tensor | None,
        positions: Tensor | None,
        caches: tuple[Cache | None, Cache | None],
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Carries]:
        """Map x (b,n,e) to (b,n,e) and new carries; at (n,): key index of each query, positions (n,): its position.

        rotation   of these positions, for the queries and keys of self-attention
        """
        own, crossed = carries  # self-attention, cross attention
        residual = self.attention_residual
        options: dict[str, Any] = {"causal": causal, "at": at, "cache": caches[0], "rotation": rotation}
        y, own = self.attention(residual.prepare(x), None, mask, own, **options)
        x = residual.add(x, y)
        if self.cross is not None and self.cross_residual is not None:
            residual = self.cross_residual
            y, crossed = self.cross(residual.prepare(x), memory, memory_mask, crossed, at=positions, cache=caches[1])
            x = residual.add(x, y)
        residual = self.feed_forward_residual
        return residual.add(x, self.feed_forward(residual.prepare(x))), (own, crossed)

    def make_caches(self, memory: Tensor | None, static: int | None) -> tuple[Cache, Cache | None]:
        """Make empty caches for incremental decoding. Keys and values of the memory are computed here, once."""
        self.attention.check_caching()
        if self.cross is not None:
            self.cross.check_caching()
        own = make_empty_cache(static)
        return own, None if self.cross is None or memory is None else CrossCache(self.cross.project_keys(memory))

    def can_share_caches(self) -> bool:
        """Return whether several hypotheses of an example can keep their keys in one cache."""
        return self.attention.can_share_keys() and (self.cross is None or self.cross.can_share_keys())


class Stack(nn.Module):
    """Embedding, blocks and an optional final norm: tokens (b,n) -> hidden (b,n,e).

    Each kind of attention passes its own carry from layer to layer.
    """

    def __init__(
        self,
        embedding: InputEmbedding,
        blocks: Iterable[Block],
        norm: nn.Module | None,
        *,
        causal: bool,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.rotary = rotary
        self.embedding, self.blocks, self.norm, self.causal = embedding, nn.ModuleList(blocks), norm, causal

    def forward(
        self,
        tokens: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        state: Decoding | None = None,
    ) -> Tensor:
        """Map tokens (b,n), which follow those that the state has seen, to hidden (b,n,e). Masks are (b,1,1,j)."""
        start = 0 if state is None else state.length
        x = self.embedding(tokens, start)
        rotation = None if self.rotary is None else self.rotary(x, start)
        positions = None if state is None else state.positions(tokens.shape[1], tokens.device)
        at = None if state is None or state.limit is None else positions  # growing: queries are the last keys
        caches = repeat((None, None), len(self.blocks)) if state is None else state.caches
        beams = state if isinstance(state, BeamDecoding) else None
        if beams is not None and positions is not None:
            x, mask = beams.fold(x), beams.extend_mask(positions, len(tokens))
        carries: Carries = (None, None)
        causal = self.causal and beams is None  # the mask of the beams hides the future, too
        options: dict[str, Any] = {"causal": causal, "at": at, "positions": positions, "rotation": rotation}
        for block, pair in zip(self.blocks, caches, strict=True):
            x, carries = block(x, memory, mask, memory_mask, carries, caches=pair, **options)
        if state is not None:
            state.advance(tokens.shape[1])
        x = x.view(*tokens.shape, -1)  # beams are rows again
        return x if self.norm is None else self.norm(x)

    def start(
        self, memory: Tensor | None = None, memory_mask: Tensor | None = None, *, static: int | None = None
    ) -> Decoding:
        """Return the decoding state before the first token; state.limit is the capacity of its caches.

        static   number of tokens to allocate caches for, at most that of learned positions; None: caches grow
        """
        if static is not None and self.embedding.limit is not None:
            static = min(static, self.embedding.limit)
        caches = [cast(Block, block).make_caches(memory, static) for block in self.blocks]
        can_share = all(cast(Block, block).can_share_caches() for block in self.blocks)
        return Decoding(caches, memory_mask, limit=static, can_share=can_share)
