"""The Transformer in its three forms: language model, translator, classifier (Vaswani et al. 2017).

`build` builds the model of a frozen configuration. Every attention of the registry fits into each of the three forms.
Padding is on the right; a position is a column of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.mechanisms import attention
from attnlab.models.attention import MultiHead
from attnlab.models.blocks import Block, FeedForward, Stack
from attnlab.models.cache import Decoding
from attnlab.models.embedding import (
    AdaptiveEmbedding,
    AdaptiveReadout,
    InputEmbedding,
    LearnedPositions,
    LinearReadout,
    Readout,
    SinusoidalPositions,
)
from attnlab.models.initialise import initialise
from attnlab.models.model import Model, ModelConfig

Words = nn.Embedding | AdaptiveEmbedding


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """The configuration of a Transformer."""

    model: Literal["language-model", "translator", "classifier"]
    vocabulary: int  # number of words; in a translator, of the source
    target_vocabulary: int | None = None  # translator: number of target words; None: as vocabulary
    classes: int = 2  # classifier: number of classes
    layers: int = 6
    decoder_layers: int | None = None  # translator; None: as layers
    width: int = 512
    heads: int = 8
    key_value_heads: int | None = None  # fewer than heads: grouped attention; None: as heads
    feed_forward: int = 2048
    attention: str = "softmax"  # a name in MECHANISMS, or ./file.py:Class
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cross_attention: str | None = None  # translator; None: as attention, with its options
    cross_attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention_bias: bool = True  # in the four projections
    norm: Literal["pre", "post"] = "pre"
    final_norm: bool = True  # after the last layer of each stack
    positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    max_length: int = 1024  # number of learned positions
    embedding_scale: bool = True  # multiply embeddings by √width
    tie: Literal["none", "output", "all"] = "output"  # share decoder input and output; all: encoder input too
    adaptive_cutoffs: tuple[int, ...] = ()  # language model: adaptive input and softmax, always tied
    adaptive_factor: int = 4
    adaptive_dropout: float = 0.0
    dropout: float = 0.1  # on embeddings and on each residual branch
    attention_dropout: float = 0.0  # on attention weights
    activation_dropout: float = 0.0  # inside the feed-forward
    activation: Literal["relu", "gelu"] = "relu"
    pool: Literal["mean", "first"] = "mean"  # classifier: pooling of the states
    padding: int = 0  # the padding token
    init: Literal["fairseq", "normal"] = "fairseq"

    def __post_init__(self) -> None:
        self.check_values()
        if self.width % self.heads:
            raise ValueError(f"width must be divisible by heads={self.heads}, got {self.width}")
        if self.heads % (self.key_value_heads or self.heads):
            raise ValueError(f"key_value_heads must divide heads={self.heads}, got {self.key_value_heads}")
        if self.model != "translator":
            self.reject_keys("target_vocabulary", "decoder_layers", "cross_attention", owner="translators")
            if self.tie == "all":
                raise ValueError(f"tie='all' needs an encoder and a decoder; use tie='output' for a {self.model}")
        elif self.tie == "all" and self.target_vocabulary not in (None, self.vocabulary):
            sizes = f"{self.vocabulary} and {self.target_vocabulary}"
            raise ValueError(f"tie='all' needs vocabularies of one size, got {sizes}")
        if self.cross_attention_options and self.cross_attention is None:
            raise ValueError("cross_attention_options need cross_attention=NAME")
        self._check_adaptive()

    def _check_adaptive(self) -> None:
        cuts = (0, *self.adaptive_cutoffs, self.vocabulary)
        if not self.adaptive_cutoffs:
            self.reject_keys("adaptive_dropout", owner="models with adaptive_cutoffs")
        elif self.model != "language-model" or self.tie != "output":
            raise ValueError("adaptive_cutoffs need model=language-model and tie='output'")
        elif list(cuts) != sorted(set(cuts)):
            raise ValueError(f"adaptive_cutoffs must increase from 0 to {self.vocabulary}, got {self.adaptive_cutoffs}")
        elif self.width % (smallest := self.adaptive_factor ** len(self.adaptive_cutoffs)):
            powers = f"{self.adaptive_factor}^{len(self.adaptive_cutoffs)} = {smallest}"
            raise ValueError(f"width must be divisible by adaptive_factor^cutoffs = {powers}, got {self.width}")


class Transformer(Model):
    """The base class of the three models."""

    def all_blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, Block)]


class LanguageModel(Transformer):
    """p(token_{t+1} | token_1 … token_t): a decoder without cross attention.

    Padding on the right needs no mask: it lies in the future of every token. mask (b,n) hides other tokens.
    """

    def __init__(self, decoder: Stack, readout: Readout, *, padding: int = 0) -> None:
        super().__init__()
        self.decoder, self.readout, self.padding = decoder, readout, padding

    def hidden(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map tokens (b,n) to the input of the readout (b,n,e)."""
        return self.decoder(tokens, mask=_expand_mask(mask, tokens))

    def sequences(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        return {"target": (tokens, tokens != self.padding if mask is None else mask)}

    def start(self, *, static: int | None = None) -> Decoding:
        """Start incremental decoding; static: number of tokens to allocate caches for."""
        return self.decoder.start(static=static)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: Decoding) -> Tensor:
        """Return logits (b,n,vocabulary) of the next n tokens (b,n), as in the full pass, and advance the state.

        Call model.eval() first: in training mode every step has dropout and noise, as the full pass does.
        """
        return self.readout(self.decoder(tokens, state=state))


class Translator(Transformer):
    """p(target_t | source, target_1 … target_{t−1}): an encoder, and a decoder that attends to it."""

    def __init__(self, encoder: Stack, decoder: Stack, readout: Readout, *, padding: int = 0) -> None:
        super().__init__()
        self.encoder, self.decoder, self.readout, self.padding = encoder, decoder, readout, padding

    def hidden(self, source: Tensor, target: Tensor) -> Tensor:
        """Map source (b,j) and decoder input (b,i) to the input of the readout (b,i,e)."""
        memory, mask = self._encode(source)
        return self.decoder(target, memory, memory_mask=mask)

    def sequences(self, source: Tensor, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"source": (source, source != self.padding), "target": (target, target != self.padding)}

    @torch.no_grad()
    def start(self, source: Tensor, *, static: int | None = None) -> Decoding:
        """Encode the source and start decoding; static: number of target tokens to allocate caches for."""
        return self.decoder.start(*self._encode(source), static=static)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: Decoding) -> Tensor:
        """Return logits (b,n,vocabulary) after the next n target tokens (b,n), as `LanguageModel.step` does."""
        return self.readout(self.decoder(tokens, memory_mask=state.memory_mask, state=state))

    def _encode(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the memory (b,j,e) and its mask (b,1,1,j)."""
        mask = _expand_mask(source != self.padding, source)
        return self.encoder(source, mask=mask), mask


class Classifier(Transformer):
    """p(class | tokens): an encoder, and a readout of the mean of its states or of the first state."""

    def __init__(self, encoder: Stack, readout: Readout, *, pool: Literal["mean", "first"], padding: int = 0) -> None:
        super().__init__()
        self.encoder, self.readout, self.pool, self.padding = encoder, readout, pool, padding

    def hidden(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map tokens (b,n) to the input of the readout (b,e); mask (b,n) hides padding by default."""
        real = tokens != self.padding if mask is None else mask
        x = self.encoder(tokens, mask=_expand_mask(real, tokens))
        if self.pool == "first":
            return x[:, 0]
        real = real.unsqueeze(-1)  # (b,n,1)
        return (x * real).sum(1) / real.sum(1).clamp_min(1)

    def sequences(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        return {"source": (tokens, tokens != self.padding if mask is None else mask)}


def build(config: TransformerConfig) -> Transformer:
    """Build the model of a configuration, with random initialization."""
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"build needs a TransformerConfig, as in attnlab.models.presets.PRESETS, got {config!r}")
    words, padding = _build_words(config, config.vocabulary), config.padding
    if config.model == "classifier":
        linear = nn.Linear(config.width, config.classes)
        readout = LinearReadout(linear.weight, linear.bias)
        encoder = _build_stack(config, words, "encoder-self", config.layers)
        model: Transformer = Classifier(encoder, readout, pool=config.pool, padding=padding)
    elif config.model == "language-model":
        decoder = _build_stack(config, words, "decoder-self", config.layers)
        model = LanguageModel(decoder, _build_readout(config, words), padding=padding)
    else:
        target = words if config.tie == "all" else _build_words(config, config.target_vocabulary or config.vocabulary)
        decoder = _build_stack(config, target, "decoder-self", config.decoder_layers or config.layers, cross=True)
        encoder = _build_stack(config, words, "encoder-self", config.layers)
        model = Translator(encoder, decoder, _build_readout(config, target), padding=padding)
    initialise(model, config.init)
    return model


def _build_words(config: TransformerConfig, vocabulary: int) -> Words:
    if cutoffs := config.adaptive_cutoffs:
        factor, padding = config.adaptive_factor, config.padding
        return AdaptiveEmbedding(vocabulary, config.width, cutoffs, factor=factor, padding=padding)
    return nn.Embedding(vocabulary, config.width, config.padding)


def _build_readout(config: TransformerConfig, words: Words) -> Readout:
    if isinstance(words, AdaptiveEmbedding):
        return AdaptiveReadout(words, dropout=config.adaptive_dropout)
    return LinearReadout(words.weight if config.tie != "none" else nn.Parameter(torch.empty_like(words.weight)))


def _build_stack(config: TransformerConfig, words: Words, kind: str, layers: int, *, cross: bool = False) -> Stack:
    blocks = [_build_block(config, kind, index, cross=cross) for index in range(layers)]
    norm = nn.LayerNorm(config.width) if config.final_norm else None
    return Stack(_build_embedding(config, words), blocks, norm, causal=kind == "decoder-self")


def _build_embedding(config: TransformerConfig, words: Words) -> InputEmbedding:
    positions: nn.Module | None = None
    if config.positions == "sinusoidal":
        positions = SinusoidalPositions()
    elif config.positions == "learned":
        positions = LearnedPositions(config.max_length, config.width)
    scale = config.width**0.5 if config.embedding_scale else 1.0
    return InputEmbedding(words, positions, scale=scale, dropout=config.dropout)


def _build_attention(config: TransformerConfig, kind: str, index: int) -> MultiHead:
    name, options = config.attention, config.attention_options
    if kind == "cross" and config.cross_attention is not None:
        name, options = config.cross_attention, config.cross_attention_options
    size, dropout = config.width // config.heads, config.attention_dropout
    mechanism = attention(name, heads=config.heads, head_dim=size, layer=index, dropout=dropout, **options)
    groups, bias = config.key_value_heads, config.attention_bias
    return MultiHead(mechanism, config.width, kind=kind, index=index, key_value_heads=groups, bias=bias)


def _build_block(config: TransformerConfig, kind: str, index: int, *, cross: bool = False) -> Block:
    own = _build_attention(config, kind, index)
    crossing = _build_attention(config, "cross", index) if cross else None
    activation = nn.ReLU() if config.activation == "relu" else nn.GELU()
    inner, dropout = config.feed_forward, config.activation_dropout
    feed_forward = FeedForward(config.width, inner, activation=activation, dropout=dropout)
    return Block(own, feed_forward, crossing, width=config.width, pre=config.norm == "pre", dropout=config.dropout)


def _expand_mask(real: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Expand a mask (b,j) to (b,1,1,j)."""
    if real is None:
        return None
    if real.shape != tokens.shape or real.dtype != torch.bool:
        actual = f"{real.dtype} {tuple(real.shape)}"
        raise ValueError(f"mask must be bool with the shape of the tokens, {tuple(tokens.shape)}, got {actual}")
    return real[:, None, None, :]
