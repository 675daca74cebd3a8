"""A causal Hugging Face model as a language model of ours, to be fine-tuned: its attention replaced, or its own.

    id of the task    0 <pad>    1 <s>    2 </s>    3 <unk>    4 + t
    of the model        –          –      its end     –          t

Text holds no end but </s>, so the end's own 4 + t is never met. The model's logits are taken as it returns them,
whatever it does to them last. Nothing here imports transformers.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.huggingface import dispatch
from attnlab.models.embedding import Readout
from attnlab.models.transformer import Transformer

SPECIALS = 4  # ids of the task before those of the model
PADDING = 0


@dataclass(frozen=True, kw_only=True)
class TunedConfig:
    """Which model is fine-tuned, and with what attention."""

    path: str  # a folder, or an id on the Hugging Face hub
    attention: str = "softmax"  # leaves the model's own as it is
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    vocabulary: int = 0  # of the task
    max_length: int = 0  # of its examples


class TunedLanguageModel(Transformer):
    """p(token_{t+1} | token_1 … token_t) by the model. Padding on the right lies in the future, so it needs no mask."""

    readout: "Renumbered"

    def __init__(self, model: Any, end: int) -> None:
        super().__init__()
        self.model, self.readout = model, Renumbered(end)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (b,n) -> logits (b,n,4+v)."""
        return self.readout(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """The model's own logits (b,n,v)."""
        return dispatch.call(self.model, {"input_ids": self.readout.own(tokens)}).logits

    def sequences(self, tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"target": (tokens, tokens != PADDING)}

    def save(self, folder: Path, tokenizer: str) -> None:
        """As transformers saves a model, with its tokenizer, for attnlab.load and attnlab.record."""
        from attnlab.huggingface import pretrained

        self.model.save_pretrained(folder)
        pretrained.open_tokenizer(os.path.expanduser(tokenizer), False).save_pretrained(folder)


class Renumbered(Readout):
    """From the model's logits (…,v) to those of the task's ids (…,4+v); −∞ for what is no token of the model."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end

    def own(self, ids: Tensor) -> Tensor:
        """The task's ids as the model's; what it has no token for is the end, where nothing looks."""
        return torch.where(ids < SPECIALS, self.end, ids - SPECIALS)

    def forward(self, hidden: Tensor) -> Tensor:
        none = hidden.new_full((*hidden.shape[:-1], 1), -torch.inf)
        before, end, after = hidden[..., : self.end], hidden[..., self.end, None], hidden[..., self.end + 1 :]
        return torch.cat([none, none, end, none, before, none, after], dim=-1)

    def log_prob(self, hidden: Tensor) -> Tensor:
        return self(hidden).log_softmax(-1, dtype=torch.promote_types(hidden.dtype, torch.float32))

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = hidden.flatten(0, -2)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, self.own(targets).flatten(), reduction="none").view_as(targets)


def tuned(config: TunedConfig) -> TunedLanguageModel:
    """The model of a configuration with the weights it comes with; a mechanism's own parameters are new."""
    from attnlab.huggingface import pretrained

    how: dict[str, Any] = {"trust_remote_code": False, "device": None, "dtype": torch.float32}
    name = os.path.expanduser(config.path)
    model = pretrained.open_model(name, allow_pickle=False, allow_code=False, **how)
    words = _words(model, config.path)
    end = _end(model, config.path, words)
    _check_sizes(model, config, words)
    if config.attention != "softmax":
        pretrained.adapt(model, config.attention, **config.attention_options)
    return TunedLanguageModel(model, end)


def _end(model: Any, path: str, words: int) -> int:
    """The token that ends a text, which is </s> of the task."""
    given = getattr(model.config, "eos_token_id", None)
    end = given[0] if isinstance(given, list) else given
    if end is None or not 0 <= end < words:
        raise ValueError(f"{path} names no token that ends a text (eos_token_id={given}): say one in its config.json")
    return end


@torch.no_grad()
def _words(model: Any, path: str) -> int:
    """How many words the model predicts; refuses one in which a token changes what was predicted before it."""
    refusal = f"{path} is a {type(model).__name__}, not a causal language model"
    if model.config.is_encoder_decoder or model.main_input_name != "input_ids":
        raise ValueError(refusal)
    texts = torch.tensor([[0, 1, 0], [0, 1, 1]])
    logits = getattr(dispatch.call(model, {"input_ids": texts}), "logits", None)
    if logits is None or logits.shape[:-1] != texts.shape:
        raise ValueError(f"{refusal}: it predicts no words")
    if not torch.allclose(logits[0, :-1], logits[1, :-1], rtol=1e-3, atol=1e-4):
        raise ValueError(f"{refusal}: it sees the words that it is to predict")
    return logits.shape[-1]


def _check_sizes(model: Any, config: TunedConfig, words: int) -> None:
    if config.vocabulary > SPECIALS + words:
        more = f"{config.vocabulary - SPECIALS} tokens, more than the {words} of {config.path}"
        raise ValueError(f"the tokenizer has {more}: say another tokenizer=")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and config.max_length > positions:
        reads = f"{config.path} reads {positions} tokens and the task's examples have {config.max_length}"
        raise ValueError(f"{reads}: say block={positions} or less, and a context= below it")
