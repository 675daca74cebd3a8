"""Configurations of LSTM models, and the settings of Snell et al. 2021 (A.8 and the authors' code)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from attnlab.config import Natural, Probability
from attnlab.mechanisms import attention
from attnlab.models.model_config import ModelConfig

if TYPE_CHECKING:
    from attnlab.mechanisms.mechanism import Mechanism


@dataclass(frozen=True, kw_only=True)
class LSTMConfig(ModelConfig):
    """The configuration of an LSTM model; SETTINGS has the paper's."""

    model: Literal["translator", "classifier"]
    vocabulary: int  # number of words; in a translator, of the source
    target_vocabulary: int | None = None  # translator: number of target words; None: as vocabulary
    classes: Annotated[int, "[2, inf)"] = 2  # classifier: number of classes
    layers: int = 2  # number of layers of the encoder, and of a translator's decoder
    width: int = 256  # size of a state in one direction, and of every hidden layer
    embedding_width: int = 256  # size of the word embeddings
    bidirectional: bool = True  # whether the encoder reads in both directions; a decoder never does
    share_embeddings: bool = True  # one matrix for source and target words
    attention: str = "dot"  # a mechanism that attnlab list names, or ./file.py:Class
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # scale is 1 by default
    heads: int = 1  # number of attention heads of a translator
    join: Literal["sum", "mean"] = "sum"  # join heads by Σ_k P c_k (eq. 21), or by mean_k P_k c_k
    combine: Literal["concatenate", "add"] = "concatenate"  # combine s_t and the context by eq. 2, or by eq. 32
    activation: Literal["relu", "tanh"] = "relu"  # for combine="concatenate"
    dropout: Probability = 0.0  # dropout between layers
    trained: Literal["all", "attention"] = "all"  # attention: all other parameters are frozen (A.6)
    padding: Natural = 0  # the padding token

    def __post_init__(self) -> None:
        self.check_values()
        if self.share_embeddings and self.target_vocabulary not in (None, self.vocabulary):
            sizes = f"{self.vocabulary} and {self.target_vocabulary}"
            raise ValueError(f"share_embeddings needs vocabularies of one size, got {sizes}; set it to false")
        if self.model == "classifier":
            self.reject_keys("target_vocabulary", "heads", "join", "combine", owner="translators")

    @property
    def memory_width(self) -> int:
        """Size of an encoder state h_l."""
        return self.width * (2 if self.bidirectional else 1)

    def build_mechanism(self, head_dim: int) -> "Mechanism":
        options = {"scale": 1.0, **self.attention_options}
        return attention(self.attention, heads=self.heads, head_dim=head_dim, **options)


TRANSLATION = LSTMConfig(model="translator", vocabulary=8000, dropout=0.5)
COPY = replace(TRANSLATION, vocabulary=42, layers=1, bidirectional=False, activation="tanh", dropout=0.0)

SETTINGS: dict[str, LSTMConfig] = {
    "translation": TRANSLATION,  # 8,180,544 parameters, 6,132,544 of them not embeddings
    "copy": COPY,  # 1,337,130 with 40 types and two special tokens
    "multi-head": replace(COPY, heads=8),
    "classification": LSTMConfig(model="classifier", vocabulary=11_022, layers=1, embedding_width=300),  # SST's words
}
