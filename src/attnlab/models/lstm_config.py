"""What the LSTM models of Snell et al. 2021 are made of, and the settings of its experiments (A.8, and its code)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from attnlab.mechanisms import attention
from attnlab.mechanisms.mechanism import Mechanism


@dataclass(frozen=True, kw_only=True)
class LSTMConfig:
    """What an LSTM model is made of; SETTINGS has the paper's."""

    model: Literal["translator", "classifier"]
    vocabulary: int  # a translator's source
    target_vocabulary: int | None = None  # a translator's target; None: the same words
    classes: int = 2  # a classifier's
    layers: int = 2  # of the encoder, and of a translator's decoder
    width: int = 256  # of a state in one direction, and of every hidden layer
    embedding_width: int = 256
    bidirectional: bool = True  # the encoder; a decoder never is
    share_embeddings: bool = True  # one matrix for source and target words
    attention: str = "dot"  # a name in MECHANISMS, or ./file.py:Class
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # scale is 1 unless said here
    heads: int = 1  # a translator's
    join: Literal["sum", "mean"] = "sum"  # of heads: Σ_k P c_k (eq. 21), or mean_k P_k c_k
    combine: Literal["concatenate", "add"] = "concatenate"  # of s_t and the context: eq. 2 or eq. 32
    activation: Literal["relu", "tanh"] = "relu"  # of concatenate
    dropout: float = 0.0  # between layers
    trained: Literal["all", "attention"] = "all"  # attention: the rest stays as it is (A.6)
    padding: int = 0  # the token that is none

    def __post_init__(self) -> None:
        self._check_values()
        if not 0 <= self.padding < min(self.vocabulary, self.target_vocabulary or self.vocabulary):
            raise ValueError(f"padding={self.padding} is not a token of the vocabulary")
        if self.share_embeddings and self.target_vocabulary not in (None, self.vocabulary):
            sizes = f"{self.vocabulary} and {self.target_vocabulary}"
            raise ValueError(f"share_embeddings needs one vocabulary, but there are two, of {sizes} words: say false")
        if self.model == "classifier":
            if self.classes < 2:
                raise ValueError("classes must be at least 2")
            defaults = {f.name: f.default for f in fields(self)}
            for name in ("target_vocabulary", "heads", "join", "combine"):
                if getattr(self, name) != defaults[name]:
                    raise ValueError(f"{name}={getattr(self, name)!r} belongs to a translator; this is a classifier")

    def _check_values(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}, not {value!r}")
            if hint in (int, int | None) and name != "padding" and value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")

    @property
    def memory_width(self) -> int:
        """The size of an encoder state h_l."""
        return self.width * (2 if self.bidirectional else 1)

    def mechanism(self, head_dim: int) -> Mechanism:
        options = {"scale": 1.0, **self.attention_options}
        return attention(self.attention, heads=self.heads, head_dim=head_dim, **options)


TRANSLATION = LSTMConfig(model="translator", vocabulary=8000, dropout=0.5)
COPY = replace(TRANSLATION, vocabulary=42, layers=1, bidirectional=False, activation="tanh", dropout=0.0)

SETTINGS: dict[str, LSTMConfig] = {
    "translation": TRANSLATION,  # 8,180,544 parameters, 6,132,544 of them not embeddings
    "copy": COPY,  # 1,337,130 with 40 types and two marks
    "multi-head": replace(COPY, heads=8),
    "classification": LSTMConfig(model="classifier", vocabulary=11_022, layers=1, embedding_width=300),  # SST's words
}
