"""The Transformer in its three forms: language model, translator, classifier (Vaswani et al. 2017).

`build` builds the model of a frozen configuration. Every attention of the registry fits into each of the three forms.
Padding is on the right; a position is a column of the batch.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.mechanisms import Mechanism, attention
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
from attnlab.models.model import Model
from attnlab.models.rotary import Rotary
from attnlab.models.transformer_config import ROPE_HIGH, TransformerConfig

Words = nn.Embedding | AdaptiveEmbedding
ChosenAttention = tuple[Any, dict[str, Any]]  # name and options
ACTIVATIONS: dict[str, tuple[type[nn.Module], bool]] = {  # and whether the feed-forward is gated
    "relu": (nn.ReLU, False), "gelu": (nn.GELU, False), "swiglu": (nn.SiLU, True), "geglu": (nn.GELU, True),
}  # fmt: skip


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
        readout = LinearReadout(linear.weight, linear.bias, cap=config.logit_cap)
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
    weight = words.weight if config.tie != "none" else nn.Parameter(torch.empty_like(words.weight))
    return LinearReadout(weight, cap=config.logit_cap)


def _build_stack(config: TransformerConfig, words: Words, kind: str, layers: int, *, cross: bool = False) -> Stack:
    crossing = config.list_attentions("cross") if cross else [None] * layers
    chosen = zip(config.list_attentions(kind), crossing, strict=True)
    blocks = [_build_block(config, kind, index, *pair) for index, pair in enumerate(chosen)]
    norm = _build_norm(config) if config.final_norm else None
    rotary = _build_rotary(config) if config.positions == "rope" else None
    return Stack(_build_embedding(config, words), blocks, norm, causal=kind == "decoder-self", rotary=rotary)


def _build_norm(config: TransformerConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm_type == "layer" else nn.RMSNorm
    return kind(config.width, eps=config.norm_epsilon)


def _build_rotary(config: TransformerConfig) -> Rotary:
    high = config.rope_high or ROPE_HIGH.get(config.rope_scaling, config.rope_low)
    return Rotary(
        config.head_size, theta=config.rope_theta, scaling=config.rope_scaling, factor=config.rope_factor,
        length=config.rope_length, low=config.rope_low, high=high,
    )  # fmt: skip


def _build_embedding(config: TransformerConfig, words: Words) -> InputEmbedding:
    positions: nn.Module | None = None
    if config.positions == "sinusoidal":
        positions = SinusoidalPositions()
    elif config.positions == "learned":
        positions = LearnedPositions(config.max_length, config.width)
    return InputEmbedding(words, positions, scale=config.embedding_factor, dropout=config.dropout)


def _build_attention(config: TransformerConfig, kind: str, index: int, chosen: ChosenAttention) -> MultiHead:
    name, options = chosen
    sizes = {"heads": config.heads, "head_dim": config.head_size, "model_size": config.width}
    mechanism = attention(name, **sizes, layer=index, dropout=config.attention_dropout, **options)
    _check_parts(config, name, mechanism)
    return MultiHead(
        mechanism, config.width, kind=kind, index=index, key_value_heads=config.key_value_heads,
        bias=config.attention_bias, head_norm=config.norm_epsilon if config.query_key_norm else None,
        scale=config.residual_scale,
    )  # fmt: skip


def _check_parts(config: TransformerConfig, name: str, mechanism: Mechanism) -> None:
    if config.positions == "rope" and config.head_size % (even := 2 * mechanism.head_parts):
        parts = f"attention={name} with positions=rope needs a head size that {even} divides"
        raise ValueError(f"{parts}, got {config.head_size}; set head_dim=")


def _build_block(
    config: TransformerConfig, kind: str, index: int, chosen: ChosenAttention, cross: ChosenAttention | None
) -> Block:
    own = _build_attention(config, kind, index, chosen)
    crossing = None if cross is None else _build_attention(config, "cross", index, cross)
    activation, gated = ACTIVATIONS[config.activation]
    feed_forward = FeedForward(
        config.width, config.feed_forward, activation=activation(), dropout=config.activation_dropout, gated=gated,
        bias=config.feed_forward_bias, scale=config.residual_scale,
    )  # fmt: skip
    make_norm, pre = partial(_build_norm, config), config.norm == "pre"
    return Block(own, feed_forward, crossing, make_norm=make_norm, pre=pre, dropout=config.dropout)


def _expand_mask(real: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Expand a mask (b,j) to (b,1,1,j)."""
    if real is None:
        return None
    if real.shape != tokens.shape or real.dtype != torch.bool:
        actual = f"{real.dtype} {tuple(real.shape)}"
        raise ValueError(f"mask must be bool with the shape of the tokens, {tuple(tokens.shape)}, got {actual}")
    return real[:, None, None, :]
