"""The Transformer in its three forms: language model, translator, classifier (Vaswani et al. 2017).

A configuration is a frozen value, `build` makes the model from it. Any attention of the registry fits into any of the
three. Padding is on the right; a position is a column of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
    Learned,
    LinearReadout,
    Readout,
    Sinusoidal,
)
from attnlab.models.initialise import initialise
from attnlab.models.model import Model

Words = nn.Embedding | AdaptiveEmbedding


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a Transformer is made of."""

    model: Literal["language-model", "translator", "classifier"]
    vocabulary: int  # a translator's source
    target_vocabulary: int | None = None  # a translator's target; None: the same size
    classes: int = 2  # a classifier's
    layers: int = 6
    decoder_layers: int | None = None  # a translator's; None: as many as layers
    width: int = 512
    heads: int = 8
    key_value_heads: int | None = None  # fewer than heads: grouped; None: as many
    feed_forward: int = 2048
    attention: str = "softmax"  # a name in MECHANISMS, or ./file.py:Class
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cross_attention: str | None = None  # a translator's; None: as attention, with its options
    cross_attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention_bias: bool = True  # in the four projections
    norm: Literal["pre", "post"] = "pre"
    final_norm: bool = True  # after the last layer of each stack
    positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    max_length: int = 1024  # of learned positions
    embedding_scale: bool = True  # by √width
    tie: Literal["none", "output", "all"] = "output"  # decoder input with output; all: and encoder input
    adaptive_cutoffs: tuple[int, ...] = ()  # a language model's: adaptive input and softmax, always tied
    adaptive_factor: int = 4
    adaptive_dropout: float = 0.0
    dropout: float = 0.1  # on embeddings and on each residual branch
    attention_dropout: float = 0.0  # on attention weights
    activation_dropout: float = 0.0  # inside the feed-forward
    activation: Literal["relu", "gelu"] = "relu"
    pool: Literal["mean", "first"] = "mean"  # a classifier's: what it reads
    padding: int = 0  # the token that is none
    init: Literal["fairseq", "normal"] = "fairseq"

    def __post_init__(self) -> None:
        self._check_values()
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not divisible by heads={self.heads}")
        if self.heads % (self.key_value_heads or self.heads):
            raise ValueError(f"heads={self.heads} is not divisible by key_value_heads={self.key_value_heads}")
        if not 0 <= self.padding < min(self.vocabulary, self.target_vocabulary or self.vocabulary):
            raise ValueError(f"padding={self.padding} is not a token of the vocabulary")
        if self.model != "translator":
            self._refuse("target_vocabulary", "decoder_layers", "cross_attention", of="translator")
            if self.tie == "all":
                raise ValueError(f"tie='all' shares encoder and decoder embeddings; a {self.model} has but one")
        elif self.tie == "all" and self.target_vocabulary not in (None, self.vocabulary):
            sizes = f"{self.vocabulary} and {self.target_vocabulary}"
            raise ValueError(f"tie='all' needs one vocabulary, but there are two, of {sizes} words")
        if self.cross_attention_options and self.cross_attention is None:
            raise ValueError("cross_attention_options are given but not cross_attention")
        self._check_adaptive()

    def _check_values(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}, not {value!r}")
            if name.endswith("dropout") and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1), not {value}")
            if hint in (int, int | None) and name != "padding" and value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    def _check_adaptive(self) -> None:
        cuts = (0, *self.adaptive_cutoffs, self.vocabulary)
        if not self.adaptive_cutoffs:
            self._refuse("adaptive_dropout", of="model with adaptive_cutoffs")
        elif self.model != "language-model" or self.tie != "output":
            raise ValueError("adaptive_cutoffs are for a language-model with tie='output'")
        elif list(cuts) != sorted(set(cuts)):
            raise ValueError(f"adaptive_cutoffs={self.adaptive_cutoffs} must rise between 0 and {self.vocabulary}")
        elif self.width % (smallest := self.adaptive_factor ** len(self.adaptive_cutoffs)):
            powers = f"{self.adaptive_factor}^{len(self.adaptive_cutoffs)} = {smallest}"
            raise ValueError(f"width={self.width} is not divisible by adaptive_factor^cutoffs = {powers}")

    def _refuse(self, *names: str, of: str) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} belongs to a {of}; this is a {self.model}")


class Transformer(Model):
    """What the three models have in common."""

    def all_blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, Block)]


class LanguageModel(Transformer):
    """p(token_{t+1} | token_1 … token_t), a decoder alone.

    On the right, padding needs no mask: it lies in the future of every token. mask (b,n) hides other tokens.
    """

    def __init__(self, decoder: Stack, readout: Readout, *, padding: int = 0) -> None:
        super().__init__()
        self.decoder, self.readout, self.padding = decoder, readout, padding

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (b,n) -> logits (b,n,vocabulary)."""
        return self.readout(self.hidden(tokens, mask))

    def hidden(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.decoder(tokens, mask=_key_mask(mask, tokens))

    def sequences(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        return {"target": (tokens, tokens != self.padding if mask is None else mask)}

    def start(self, *, static: int | None = None) -> Decoding:
        """Begin decoding step by step; static: allocate caches for so many tokens at once."""
        return self.decoder.start(static=static)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: Decoding) -> Tensor:
        """Logits (b,n,vocabulary) of the next n tokens (b,n), as the full pass would give them; moves the state on.

        Call model.eval() before: in training mode dropout and noise fall on each step, as they do on the full pass.
        """
        return self.readout(self.decoder(tokens, state=state))


class Translator(Transformer):
    """p(target_t | source, target_1 … target_{t−1}), an encoder and a decoder that attends to it."""

    def __init__(self, encoder: Stack, decoder: Stack, readout: Readout, *, padding: int = 0) -> None:
        super().__init__()
        self.encoder, self.decoder, self.readout, self.padding = encoder, decoder, readout, padding

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Source (b,j) and decoder input (b,i) -> logits (b,i,vocabulary)."""
        return self.readout(self.hidden(source, target))

    def hidden(self, source: Tensor, target: Tensor) -> Tensor:
        memory, mask = self._encoded(source)
        return self.decoder(target, memory, memory_mask=mask)

    def sequences(self, source: Tensor, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"source": (source, source != self.padding), "target": (target, target != self.padding)}

    @torch.no_grad()
    def start(self, source: Tensor, *, static: int | None = None) -> Decoding:
        """Encode the source and begin decoding; static: allocate caches for so many target tokens at once."""
        return self.decoder.start(*self._encoded(source), static=static)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: Decoding) -> Tensor:
        """Logits (b,n,vocabulary) after the next n target tokens (b,n); moves the state on.

        Call model.eval() before, as for a language model.
        """
        return self.readout(self.decoder(tokens, memory_mask=state.memory_mask, state=state))

    def _encoded(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        """The memory (b,j,e) and its mask (b,1,1,j)."""
        mask = _key_mask(source != self.padding, source)
        return self.encoder(source, mask=mask), mask


class Classifier(Transformer):
    """p(class | tokens): an encoder, and a readout of the mean of its tokens or of the first one."""

    def __init__(self, encoder: Stack, readout: Readout, *, pool: Literal["mean", "first"], padding: int = 0) -> None:
        super().__init__()
        self.encoder, self.readout, self.pool, self.padding = encoder, readout, pool, padding

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (b,n) -> logits (b,classes); mask (b,n), by default what is not padding."""
        return self.readout(self.hidden(tokens, mask))

    def hidden(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        real = tokens != self.padding if mask is None else mask
        x = self.encoder(tokens, mask=_key_mask(real, tokens))
        if self.pool == "first":
            return x[:, 0]
        kept = real.unsqueeze(-1)  # (b,n,1)
        return (x * kept).sum(1) / kept.sum(1).clamp_min(1)

    def sequences(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        return {"source": (tokens, tokens != self.padding if mask is None else mask)}


def build(config: TransformerConfig) -> Transformer:
    """The model of a configuration, initialised."""
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"build takes a TransformerConfig, not {config!r}: PRESETS in attnlab.models.presets has some")
    words = _words(config, config.vocabulary)
    if config.model == "classifier":
        linear = nn.Linear(config.width, config.classes)
        readout = LinearReadout(linear.weight, linear.bias)
        model: Transformer = Classifier(_encoder(config, words), readout, pool=config.pool, padding=config.padding)
    elif config.model == "language-model":
        model = LanguageModel(_decoder(config, words, config.layers), _readout(config, words), padding=config.padding)
    else:
        target = words if config.tie == "all" else _words(config, config.target_vocabulary or config.vocabulary)
        decoder = _decoder(config, target, config.decoder_layers or config.layers, cross=True)
        model = Translator(_encoder(config, words), decoder, _readout(config, target), padding=config.padding)
    initialise(model, config.init)
    return model


def _words(config: TransformerConfig, vocabulary: int) -> Words:
    if cutoffs := config.adaptive_cutoffs:
        factor, padding = config.adaptive_factor, config.padding
        return AdaptiveEmbedding(vocabulary, config.width, cutoffs, factor=factor, padding=padding)
    return nn.Embedding(vocabulary, config.width, config.padding)


def _readout(config: TransformerConfig, words: Words) -> Readout:
    if isinstance(words, AdaptiveEmbedding):
        return AdaptiveReadout(words, dropout=config.adaptive_dropout)
    return LinearReadout(words.weight if config.tie != "none" else nn.Parameter(torch.empty_like(words.weight)))


def _encoder(config: TransformerConfig, words: Words) -> Stack:
    blocks = [_block(config, _attention(config, "encoder-self", k), None) for k in range(config.layers)]
    return Stack(_embedding(config, words), blocks, _final_norm(config), causal=False)


def _decoder(config: TransformerConfig, words: Words, layers: int, *, cross: bool = False) -> Stack:
    blocks = [
        _block(config, _attention(config, "decoder-self", k), _attention(config, "cross", k) if cross else None)
        for k in range(layers)
    ]
    return Stack(_embedding(config, words), blocks, _final_norm(config), causal=True)


def _embedding(config: TransformerConfig, words: Words) -> InputEmbedding:
    positions: nn.Module | None = None
    if config.positions == "sinusoidal":
        positions = Sinusoidal()
    elif config.positions == "learned":
        positions = Learned(config.max_length, config.width)
    scale = config.width**0.5 if config.embedding_scale else 1.0
    return InputEmbedding(words, positions, scale=scale, dropout=config.dropout)


def _attention(config: TransformerConfig, kind: str, index: int) -> MultiHead:
    name, options = config.attention, config.attention_options
    if kind == "cross" and config.cross_attention is not None:
        name, options = config.cross_attention, config.cross_attention_options
    size, dropout = config.width // config.heads, config.attention_dropout
    mechanism = attention(name, heads=config.heads, head_dim=size, layer=index, dropout=dropout, **options)
    groups, bias = config.key_value_heads, config.attention_bias
    return MultiHead(mechanism, config.width, kind=kind, index=index, key_value_heads=groups, bias=bias)


def _block(config: TransformerConfig, own: MultiHead, cross: MultiHead | None) -> Block:
    activation = nn.ReLU() if config.activation == "relu" else nn.GELU()
    inner, dropout = config.feed_forward, config.activation_dropout
    feed_forward = FeedForward(config.width, inner, activation=activation, dropout=dropout)
    return Block(own, feed_forward, cross, width=config.width, pre=config.norm == "pre", dropout=config.dropout)


def _final_norm(config: TransformerConfig) -> nn.Module | None:
    return nn.LayerNorm(config.width) if config.final_norm else None


def _key_mask(real: Tensor | None, tokens: Tensor) -> Tensor | None:
    """(b,j) -> (b,1,1,j)."""
    if real is None:
        return None
    if real.shape != tokens.shape or real.dtype != torch.bool:
        given = f"{real.dtype} {tuple(real.shape)}"
        raise ValueError(f"mask must be bool and of the shape of the tokens, {tuple(tokens.shape)}, not {given}")
    return real[:, None, None, :]
