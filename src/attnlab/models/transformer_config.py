"""The configuration of a Transformer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from attnlab.config import Natural, Positive, Probability
from attnlab.mechanisms import choose_attentions
from attnlab.mechanisms.per_layer import split_layers
from attnlab.models.model_config import ModelConfig

ROPE_HIGH = {"llama3": 4.0, "yarn": 32.0}  # defaults of rope_high, as in transformers


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """The configuration of a Transformer."""

    model: Literal["language-model", "translator", "classifier"]
    vocabulary: int  # number of words; in a translator, of the source
    target_vocabulary: int | None = None  # translator: number of target words; None: as vocabulary
    classes: int = 2  # classifier: number of classes
    layers: int = 6  # number of layers; in a translator, of the encoder
    decoder_layers: int | None = None  # number of decoder layers of a translator; none: as layers
    width: int = 512  # size of the hidden states
    heads: int = 8  # number of attention heads
    key_value_heads: int | None = None  # number of key and value heads; fewer: grouped attention; none: as heads
    head_dim: int | None = None  # size of each head; none: width divided by heads
    feed_forward: int = 2048  # width of the hidden layer of each feed-forward block
    attention: str = "softmax"  # a mechanism that attnlab list names, or ./file.py:Class; per layer: softmax*3,dagpam
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cross_attention: str | None = None  # attention to the encoder; none: as attention, with its options
    cross_attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention_bias: bool = True  # whether the four projections of an attention have a bias
    query_key_norm: bool = False  # normalise the queries and keys of each head by an RMSNorm, as in Qwen3
    feed_forward_bias: bool = True  # whether the projections of the feed-forward blocks have a bias
    norm: Literal["pre", "post"] = "pre"  # normalise before each block (pre) or after it (post)
    norm_type: Literal["layer", "rms"] = "layer"  # a LayerNorm, or an RMSNorm, which neither centres nor has a bias
    norm_epsilon: Positive = 1e-5  # constant under the root of every norm
    final_norm: bool = True  # whether each stack ends with a norm
    positions: Literal["sinusoidal", "learned", "rope", "none"] = "sinusoidal"  # how positions are encoded
    max_length: int = 1024  # number of learned positions
    rope_theta: Annotated[float, "(1, inf)"] = 10000.0  # base of the wavelengths of RoPE
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"  # how RoPE is stretched for longer texts
    rope_factor: Annotated[float, "[1, inf)"] = 1.0  # factor by which rope_scaling stretches
    rope_length: int = 8192  # number of tokens before stretching, for llama3 and yarn
    rope_low: Positive = 1.0  # rotations within rope_length below which a frequency is stretched fully
    rope_high: Positive | None = None  # rotations above which it is not; none: 4 for llama3, 32 for yarn
    embedding_scale: Positive | bool = True  # factor of the embeddings; true: √width, false: 1
    residual_scale: Positive = 1.0  # factor of the output of each block before it is added
    logit_cap: Positive | None = None  # soft cap c of the logits, c·tanh(logit/c); none: no cap
    tie: Literal["none", "output", "all"] = "output"  # shared embeddings; output: the decoder's; all: the encoder's too
    adaptive_cutoffs: tuple[int, ...] = ()  # ranks where words are divided into clusters, in language models
    adaptive_factor: int = 4  # factor by which each cluster of rarer words is narrower
    adaptive_dropout: Probability = 0.0  # dropout in the adaptive softmax
    dropout: Probability = 0.1  # dropout on embeddings and on each residual branch
    attention_dropout: Probability = 0.0  # dropout on attention weights
    activation_dropout: Probability = 0.0  # dropout inside the feed-forward blocks
    activation: Literal["relu", "gelu", "swiglu", "geglu"] = "relu"  # of the feed-forward; swiglu and geglu are gated
    pool: Literal["mean", "first"] = "mean"  # how a classifier pools the states of its last layer
    padding: Natural = 0  # the padding token
    init: Literal["fairseq", "normal"] = "fairseq"  # random initialization: as in fairseq, or normal

    def __post_init__(self) -> None:
        self.check_values()
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width must be divisible by heads={self.heads}, got {self.width}; or set head_dim=")
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
        for kind in self.attention_kinds:
            split_layers(self._get_attention(kind)[0], *self._count_layers(kind))
        self._check_adaptive()
        self._check_rope()

    @property
    def attentions(self) -> tuple[str | None, ...]:
        """The attentions as they are written; those of files run code."""
        return self.attention, self.cross_attention

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """The kinds of attention that the model has."""
        kinds = {"classifier": ("encoder-self",), "language-model": ("decoder-self",)}
        return kinds.get(self.model, ("encoder-self", "decoder-self", "cross"))

    def list_attentions(self, kind: str) -> list[tuple[Any, dict[str, Any]]]:
        """Return the name and the options of the attention of each layer. Raises ValueError if they do not fit."""
        layers, where = self._count_layers(kind)
        return choose_attentions(*self._get_attention(kind), layers, where=where)

    def check_attention(self) -> None:
        """Raise ValueError if an attention is unknown or cannot be in its layer; a user's file is imported for this."""
        for kind in self.attention_kinds:
            self.list_attentions(kind)

    def _get_attention(self, kind: str) -> tuple[str, Mapping[str, Any]]:
        if kind == "cross" and self.cross_attention is not None:
            return self.cross_attention, self.cross_attention_options
        return self.attention, self.attention_options

    def _count_layers(self, kind: str) -> tuple[int, str]:
        """Return the number of layers of a kind, and what has them."""
        if self.model != "translator":
            return self.layers, "the model"
        if kind == "encoder-self":
            return self.layers, "the encoder"
        return self.decoder_layers or self.layers, "the decoder"

    @property
    def head_size(self) -> int:
        """Size of each head."""
        return self.head_dim or self.width // self.heads

    @property
    def embedding_factor(self) -> float:
        """Factor of the embeddings."""
        scale = self.embedding_scale
        return (self.width**0.5 if scale else 1.0) if isinstance(scale, bool) else scale

    def _check_rope(self) -> None:
        stretching = ("rope_factor", "rope_length", "rope_low", "rope_high")
        if self.positions != "rope":
            self.reject_keys("rope_theta", "rope_scaling", *stretching, owner="models with positions=rope")
            return
        if self.head_size % 2:
            raise ValueError(f"positions=rope needs heads of an even size, got {self.head_size}; set head_dim=")
        if self.rope_scaling == "none":
            self.reject_keys(*stretching, owner="models with rope_scaling=")
        elif self.rope_scaling == "linear":
            self.reject_keys(*stretching[1:], owner="models with rope_scaling=llama3 or yarn")
        elif (high := self.rope_high or ROPE_HIGH[self.rope_scaling]) <= self.rope_low:
            raise ValueError(f"rope_low must be below rope_high={high:g}, got {self.rope_low:g}")

    def _check_adaptive(self) -> None:
        cuts = (0, *self.adaptive_cutoffs, self.vocabulary)
        if not self.adaptive_cutoffs:
            self.reject_keys("adaptive_dropout", owner="models with adaptive_cutoffs")
        elif self.logit_cap is not None:
            raise ValueError(f"logit_cap must be none with adaptive_cutoffs, got {self.logit_cap:g}")
        elif self.model != "language-model" or self.tie != "output":
            raise ValueError("adaptive_cutoffs need model=language-model and tie='output'")
        elif list(cuts) != sorted(set(cuts)):
            raise ValueError(f"adaptive_cutoffs must increase from 0 to {self.vocabulary}, got {self.adaptive_cutoffs}")
        elif self.width % (smallest := self.adaptive_factor ** len(self.adaptive_cutoffs)):
            powers = f"{self.adaptive_factor}^{len(self.adaptive_cutoffs)} = {smallest}"
            raise ValueError(f"width must be divisible by adaptive_factor^cutoffs = {powers}, got {self.width}")
