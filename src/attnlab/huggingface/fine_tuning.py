"""Fine-tune a causal Hugging Face model as an attnlab language model, with its own attention or another.

    id of the task      0 <pad>    1 <s>    2 </s>       3 <unk>    4 + t
    id of the model       –          –      eos token      –          t

The end of a text is always </s>, so id 4 + t of the eos token never occurs. The logits are those that the model
returns, after any transformation of its own. Nothing here imports transformers.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.config import Natural, check_fields
from attnlab.huggingface import adaptation, dispatch, lora
from attnlab.models.embedding import Readout
from attnlab.models.transformer import Transformer

SPECIALS = 4  # number of task ids that precede the model's ids
PADDING = 0


@dataclass(frozen=True, kw_only=True)
class TunedConfig:
    """The model to fine-tune and its attention."""

    path: str  # a folder, or an id on the Hugging Face hub
    attention: str = "softmax"  # softmax keeps the model's own attention
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    neutral: bool = False  # start where the attention is softmax, so that the model is unchanged
    lora: Natural = 0  # rank of trained updates of the attention's projections, other weights fixed; 0: train all
    vocabulary: Natural = 0  # size of the task's vocabulary
    max_length: Natural = 0  # number of tokens in the task's longest example

    def __post_init__(self) -> None:
        check_fields(self)


class TunedLanguageModel(Transformer):
    """p(token_{t+1} | token_1 … token_t) by the model. Padding on the right lies in the future, so it needs no mask."""

    readout: "TaskReadout"

    def __init__(self, model: Any, end: int, *, restored: frozenset[str] = frozenset()) -> None:
        """restored: names of the model's weights that are not trained."""
        super().__init__()
        self.model, self.readout = model, TaskReadout(end)
        self.restored = frozenset(f"model.{name}" for name in restored)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (b,n,4+v) from tokens (b,n)."""
        return self.readout(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Compute the model's own logits (b,n,v)."""
        return dispatch.run_forward(self.model, {"input_ids": self.readout.to_model_ids(tokens)}).logits

    def sequences(self, tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"target": (tokens, tokens != PADDING)}

    def save(self, folder: Path, tokenizer: str) -> None:
        """Save the model, LoRA merged, and its tokenizer in the format of transformers, for attnlab.load and record."""
        from attnlab.huggingface import pretrained

        lora.merge_lora(self.model)
        self.model.save_pretrained(folder)
        pretrained.open_tokenizer(os.path.expanduser(tokenizer)).save_pretrained(folder)


class TaskReadout(Readout):
    """Maps the model's logits (…,v) to the task's ids (…,4+v); ids without a token of the model get −∞."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end

    def to_model_ids(self, ids: Tensor) -> Tensor:
        """Map the task's ids to the model's. Ids without a token become the eos token, whose output is never used."""
        return torch.where(ids < SPECIALS, self.end, ids - SPECIALS)

    def forward(self, hidden: Tensor) -> Tensor:
        none = hidden.new_full((*hidden.shape[:-1], 1), -torch.inf)
        before, end, after = hidden[..., : self.end], hidden[..., self.end, None], hidden[..., self.end + 1 :]
        return torch.cat([none, none, end, none, before, none, after], dim=-1)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = hidden.flatten(0, -2)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, self.to_model_ids(targets).flatten(), reduction="none").view_as(targets)


def open_tuned_model(config: TunedConfig, *, allow_code: bool = False) -> TunedLanguageModel:
    """Load the model with its pretrained weights. The mechanism's own parameters get their initial values."""
    from attnlab.huggingface import pretrained

    model = pretrained.open_model(os.path.expanduser(config.path), dtype=torch.float32, allow_code=allow_code)
    words = _count_words(model, config.path)
    end = _find_end_token(model, config.path, words)
    _check_sizes(model, config, words)
    found = adaptation.dry_run(model, prove=False) if config.lora else []
    if config.attention != "softmax":
        pretrained.adapt(model, config.attention, neutral=config.neutral, **config.attention_options)
    if not config.lora:
        return TunedLanguageModel(model, end)
    lora.add_lora(model, [one.module for one in found], config.lora)
    named = model.named_parameters()
    fixed = frozenset(name for name, x in named if not x.requires_grad and not adaptation.is_added(name))
    return TunedLanguageModel(model, end, restored=fixed)


def _find_end_token(model: Any, path: str, words: int) -> int:
    """Return the model's eos token, which is the task's </s>."""
    given = getattr(model.config, "eos_token_id", None)
    end = given[0] if isinstance(given, list) else given
    if end is None or not 0 <= end < words:
        raise ValueError(f"{path} has no valid eos token (eos_token_id={given}): set one in its config.json")
    return end


@torch.no_grad()
def _count_words(model: Any, path: str) -> int:
    """Return the size of the vocabulary that the model predicts. Raises ValueError if the model is not causal."""
    refusal = f"{path} is a {type(model).__name__}, not a causal language model"
    if model.config.is_encoder_decoder or model.main_input_name != "input_ids":
        raise ValueError(refusal)
    texts = torch.tensor([[0, 1, 0], [0, 1, 1]])
    logits = getattr(dispatch.run_forward(model, {"input_ids": texts}), "logits", None)
    if logits is None or logits.shape[:-1] != texts.shape:
        raise ValueError(f"{refusal}: it does not predict a token at each position")
    if not torch.allclose(logits[0, :-1], logits[1, :-1], rtol=1e-3, atol=1e-4):
        raise ValueError(f"{refusal}: it sees the tokens that it should predict")
    return logits.shape[-1]


def _check_sizes(model: Any, config: TunedConfig, words: int) -> None:
    if config.vocabulary > SPECIALS + words:
        more = f"{config.vocabulary - SPECIALS} tokens, more than the {words} of {config.path}"
        raise ValueError(f"the tokenizer has {more}: choose another tokenizer=")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and config.max_length > positions:
        reads = f"{config.path} reads at most {positions} tokens and the task's examples have {config.max_length}"
        raise ValueError(f"{reads}: set block={positions} or less")
