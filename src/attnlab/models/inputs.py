"""Texts as a Hugging Face model takes them: token ids and masks, padded on the right, checked against its positions.

Padding is on the right whatever the tokenizer's habit, so that a token's position is what it would be alone.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

PROOF = ("The cat sat on the mat.", "Nobody saw it.")  # what a model is proved on
LENGTHS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


def encode(
    model: Any, tokenizer: Any, text: str | Sequence[str], target: str | Sequence[str] | None, max_length: int | None
) -> dict[str, Tensor]:
    """Everything the model is to be called with; target goes, shifted by one, to the decoder of an encoder-decoder."""
    batch = _padded(model, tokenizer, _texts(text, "text"), max_length, "text")
    if not model.config.is_encoder_decoder:
        if target is not None:
            raise ValueError(f"target= is for encoder-decoder models; {type(model).__name__} reads text alone")
        return batch
    if target is None:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model: give target= too, the text its decoder reads"
        )
    if len(targets := _texts(target, "target")) != len(batch["input_ids"]):
        raise ValueError(f"{len(targets)} targets for {len(batch['input_ids'])} texts; give one for each")
    ahead = _padded(model, tokenizer, targets, max_length, "text_target")
    return batch | {
        "decoder_input_ids": _shifted(model, ahead["input_ids"]),
        "decoder_attention_mask": ahead["attention_mask"],
    }


def check_tensors(model: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """A batch given as tensors."""
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not a {type(value).__name__}; give texts as a string or a list")
    if model.config.is_encoder_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & batch.keys():
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model: the batch needs decoder_input_ids too")
    return {name: value.to(model.device) for name, value in batch.items()}


def check_positions(model: Any, batch: Mapping[str, Tensor]) -> None:
    limit = positions(model)
    for name in LENGTHS.keys() & batch.keys():
        if limit is not None and (length := batch[name].shape[1]) > limit:
            kind = type(model).__name__
            raise ValueError(
                f"{name} has {length} tokens and {kind} has {limit} positions; max_length={limit} cuts it off"
            )


def positions(model: Any) -> int | None:
    """How many positions the model has, or None if it sets no limit (T5)."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not tokens and module.num_embeddings == limit:
            return limit if module.padding_idx is None else limit - module.padding_idx - 1  # RoBERTa counts from there
    return limit


def sequences(
    model: Any, batch: Mapping[str, Tensor], kinds: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tokens and masks of "source" and/or "target", as a Record names them; kinds are those of its layers."""
    if model.config.is_encoder_decoder:
        sides = {"source": "input_ids", "target": "decoder_input_ids"}
    else:
        sides = {"target" if "decoder-self" in kinds else "source": "input_ids"}
    tokens = {side: batch[name] for side, name in sides.items() if name in batch}
    masks = {}
    for side, ids in tokens.items():
        mask = batch.get(LENGTHS[sides[side]])
        masks[side] = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.dim() != 2 else mask.bool()
    return tokens, masks


def words(tokenizer: Any, ids: Tensor) -> list[list[str]]:
    return [tokenizer.convert_ids_to_tokens(row) for row in ids.tolist()]


def sample(model: Any, inputs: Mapping[str, Tensor], tokenizer: Any) -> dict[str, Tensor]:
    """A small batch to prove a model on: two short texts, or without a tokenizer the last columns of the inputs."""
    if tokenizer is not None:
        return encode(model, tokenizer, PROOF, PROOF if model.config.is_encoder_decoder else None, max_length=16)
    if all(value.dim() == 2 for value in inputs.values()):
        return {name: value[:, -64:] for name, value in inputs.items()}
    return dict(inputs)


def dummy(model: Any) -> dict[str, Tensor]:
    """A few tokens, some of them hidden: enough for every attention module to run once."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    if model.main_input_name != "input_ids" or vocabulary is None:
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name}, and only models that read tokens can be adapted"
        )
    ids = torch.arange(2, 12, device=model.device).reshape(2, 5) % vocabulary
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs | {"decoder_input_ids": ids[:, 1:4]} if model.config.is_encoder_decoder else inputs


def _texts(text: str | Sequence[str], name: str) -> list[str]:
    texts = [text] if isinstance(text, str) else list(text)
    if not texts:
        raise ValueError(f"{name} is an empty list: there is nothing to record")
    for number, one in enumerate(texts):
        if not isinstance(one, str):
            raise TypeError(f"{name} must be a string or a list of strings, not a list with a {type(one).__name__}")
        if not one.strip():
            raise ValueError(f"{name} {number} of {len(texts)} is empty: there is nothing to record")
    return texts


def _padded(model: Any, tokenizer: Any, texts: list[str], max_length: int | None, argument: str) -> dict[str, Tensor]:
    encoded = dict(tokenizer(**{argument: texts}, truncation=max_length is not None, max_length=max_length))
    encoded["attention_mask"] = [[1] * len(row) for row in encoded["input_ids"]]
    fill = {"input_ids": next((n for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)}
    return {
        name: pad_sequence([torch.tensor(row) for row in rows], True, fill.get(name, 0)).to(model.device)
        for name, rows in encoded.items()
    }


def _shifted(model: Any, labels: Tensor) -> Tensor:
    """What a decoder reads to predict these: its start token, then all but the last."""
    if (shift := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is not None:
        return shift(labels=labels)
    if (start := model.config.decoder_start_token_id) is None:
        raise ValueError(f"the config of {type(model).__name__} has no decoder_start_token_id to begin the target with")
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
