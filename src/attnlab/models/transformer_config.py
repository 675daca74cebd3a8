"""The configuration of a Transformer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnlab.config import Natural, Probability
from attnlab.models.model_config import ModelConfig


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
    feed_forward: int = 2048  # width of the hidden layer of each feed-forward block
    attention: str = "softmax"  # a mechanism that attnlab list names, or ./file.py:Class
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cross_attention: str | None = None  # attention to the encoder; none: as attention, with its options
    cross_attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention_bias: bool = True  # whether the four projections of an attention have a bias
    norm: Literal["pre", "post"] = "pre"  # normalise before each block (pre) or after it (post)
    final_norm: bool = True  # whether each stack ends with a norm
    positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"  # how positions are encoded
    max_length: int = 1024  # number of learned positions
    embedding_scale: bool = True  # multiply embeddings by √width
    tie: Literal["none", "output", "all"] = "output"  # shared embeddings; output: the decoder's; all: the encoder's too
    adaptive_cutoffs: tuple[int, ...] = ()  # ranks where words are divided into clusters, in language models
    adaptive_factor: int = 4  # factor by which each cluster of rarer words is narrower
    adaptive_dropout: Probability = 0.0  # dropout in the adaptive softmax
    dropout: Probability = 0.1  # dropout on embeddings and on each residual branch
    attention_dropout: Probability = 0.0  # dropout on attention weights
    activation_dropout: Probability = 0.0  # dropout inside the feed-forward blocks
    activation: Literal["relu", "gelu"] = "relu"  # activation function of the feed-forward blocks
    pool: Literal["mean", "first"] = "mean"  # how a classifier pools the states of its last layer
    padding: Natural = 0  # the padding token
    init: Literal["fairseq", "normal"] = "fairseq"  # random initialization: as in fairseq, or normal

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
