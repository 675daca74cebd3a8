"""The layers of a Transformer, and the stack that threads carries and caches through them."""

from collections.abc import Iterable
from itertools import repeat
from typing import cast

from torch import Tensor, nn

from attnlab.models.attention import MultiHead
from attnlab.models.cache import Cache, Decoding, Growing, Kept, Static
from attnlab.models.dropout import Dropout
from attnlab.models.embedding import InputEmbedding

Carries = tuple[Tensor | None, Tensor | None]  # of self and of cross attention


class Residual(nn.Module):
    """A part f beside the identity:  x + dropout(f(norm(x)))  if pre,  else  norm(x + dropout(f(x)))."""

    def __init__(self, width: int, *, pre: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.pre = nn.LayerNorm(width), pre
        self.dropout = Dropout(dropout)

    def before(self, x: Tensor) -> Tensor:
        """What the part is given."""
        return self.norm(x) if self.pre else x

    def after(self, x: Tensor, part: Tensor) -> Tensor:
        """The sum with what the part returned."""
        x = x + self.dropout(part)
        return x if self.pre else self.norm(x)


class FeedForward(nn.Module):
    """W₂ dropout(activation(W₁ x + b₁)) + b₂."""

    def __init__(self, width: int, inner: int, *, activation: nn.Module, dropout: float) -> None:
        super().__init__()
        self.inner, self.output = nn.Linear(width, inner), nn.Linear(inner, width)
        self.activation, self.dropout = activation, Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.dropout(self.activation(self.inner(x))))


class Block(nn.Module):
    """Self-attention, cross attention where there is one, feed-forward; each beside its residual."""

    def __init__(
        self,
        attention: MultiHead,
        feed_forward: FeedForward,
        cross: MultiHead | None = None,
        *,
        width: int,
        pre: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention, self.cross, self.feed_forward = attention, cross, feed_forward
        self.attention_residual = Residual(width, pre=pre, dropout=dropout)
        self.cross_residual = None if cross is None else Residual(width, pre=pre, dropout=dropout)
        self.feed_forward_residual = Residual(width, pre=pre, dropout=dropout)

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
        places: Tensor | None,
        caches: tuple[Cache | None, Cache | None],
    ) -> tuple[Tensor, Carries]:
        """at and places: where the queries stand among the keys, and in their own sequence."""
        own, crossed = carries
        residual = self.attention_residual
        y, own = self.attention(residual.before(x), None, mask, own, causal=causal, at=at, cache=caches[0])
        x = residual.after(x, y)
        if self.cross is not None and self.cross_residual is not None:
            residual = self.cross_residual
            y, crossed = self.cross(residual.before(x), memory, memory_mask, crossed, at=places, cache=caches[1])
            x = residual.after(x, y)
        residual = self.feed_forward_residual
        return residual.after(x, self.feed_forward(residual.before(x))), (own, crossed)

    def caches(self, memory: Tensor | None, static: int | None) -> tuple[Cache, Cache | None]:
        """Empty caches for decoding step by step; the keys and values of the memory are made here, once."""
        own = Growing() if static is None else Static(static)
        return own, None if self.cross is None or memory is None else Kept(self.cross.keys_values(memory))


class Stack(nn.Module):
    """Embedding, blocks and a last norm where there is one: tokens (b,n) -> hidden (b,n,e).

    Each kind of attention has its own carry, from layer to layer of one pass.
    """

    def __init__(
        self, embedding: InputEmbedding, blocks: Iterable[Block], norm: nn.Module | None, *, causal: bool
    ) -> None:
        super().__init__()
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
        """Masks are (b,1,1,j). With a state, tokens are those after the ones it has seen, and it moves on."""
        x = self.embedding(tokens, 0 if state is None else state.length)
        places = None if state is None else state.places(tokens.shape[1], tokens.device)
        at = None if state is None or state.limit is None else places  # keys that grow end with the queries
        caches = repeat((None, None), len(self.blocks)) if state is None else state.caches
        carries: Carries = (None, None)
        for block, kept in zip(self.blocks, caches, strict=True):
            x, carries = block(
                x, memory, mask, memory_mask, carries, causal=self.causal, at=at, places=places, caches=kept
            )
        if state is not None:
            state.advance(tokens.shape[1])
        return x if self.norm is None else self.norm(x)

    def start(
        self, memory: Tensor | None = None, memory_mask: Tensor | None = None, *, static: int | None = None
    ) -> Decoding:
        """The state before the first token; static: caches are allocated for so many tokens, else they grow.

        state.limit says for how many: there are never more than learned positions.
        """
        if static is not None and self.embedding.limit is not None:
            static = min(static, self.embedding.limit)
        caches = [cast(Block, block).caches(memory, static) for block in self.blocks]
        return Decoding(caches, memory_mask, limit=static)
