"""What a Hugging Face model is called with: texts made token ids and masks, or tensors as given; checked in one place.

Padding is on the right whatever the tokenizer's habit, so that a token's position is what it would be alone.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

PROOF = ("The cat sat on the mat.", "Nobody saw it.")  # what a model is proved on
SIDES = ("", "decoder_")  # how the names of inputs begin


def read(model: Any, tokenizer: Any, text: Any, target: Any, max_length: int | None) -> dict[str, Tensor]:
    """Everything the model is to be called with, from texts or from tensors by name, on its device."""
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(f"tokenizer= must be a loaded one, not {tokenizer!r}: AutoTokenizer.from_pretrained loads it")
    if isinstance(text, Tensor):
        raise TypeError('a Hugging Face model is given text, or its tensors by name: {"input_ids": tensor}')
    if not isinstance(text, Mapping):
        batch = encode(model, tokenizer, text, target, max_length)
    elif target is not None or max_length is not None:
        raise ValueError("target= and max_length= are for texts; tensors by name say it all themselves")
    else:
        batch = dict(text)
    check(model, batch)
    return {name: value.to(model.device) for name, value in batch.items()}


def encode(
    model: Any, tokenizer: Any, text: str | Sequence[str], target: str | Sequence[str] | None, max_length: int | None
) -> dict[str, Tensor]:
    """Texts as tensors; target goes, shifted by one, to the decoder of an encoder-decoder."""
    texts = _texts(text, "text")
    if tokenizer is None:
        raise ValueError("text needs a tokenizer=, or give the model's inputs as a mapping of tensors")
    batch = _padded(model, tokenizer, texts, max_length, "text")
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


def check(model: Any, batch: Mapping[str, Any]) -> None:
    """Refuse tensors that the model cannot read, or that do not belong together."""
    kind = type(model).__name__
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not a {type(value).__name__}; give texts as a string or a list")
    if not {model.main_input_name, "inputs_embeds"} & batch.keys():
        there = ", ".join(batch) or "nothing"
        raise ValueError(f"{kind} reads {model.main_input_name}, and the batch has {there}")
    if model.config.is_encoder_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & batch.keys():
        raise ValueError(f"{kind} is an encoder-decoder model: the batch needs decoder_input_ids too")
    for side in SIDES:
        if (name := f"{side}input_ids") in batch:
            _check_tokens(model, name, batch[name])
            _check_beside(batch, side, name)
        elif (name := f"{side}inputs_embeds") in batch:
            _check_beside(batch, side, name)


def _check_tokens(model: Any, name: str, ids: Tensor) -> None:
    """Tokens (b,n) that the model has vectors and positions for."""
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise ValueError(f"{name} must be whole numbers (batch, length), not {ids.dtype} {tuple(ids.shape)}")
    kind, limit, length = type(model).__name__, positions(model), ids.shape[1]
    if limit is not None and length > limit:
        raise ValueError(
            f"{name} has {length} tokens and {kind} has {limit} positions; max_length={limit} cuts texts off"
        )
    words = (model.get_decoder() if name.startswith("decoder") else model).get_input_embeddings()
    vocabulary = getattr(words, "num_embeddings", None)
    lowest, highest = int(ids.min()), int(ids.max())
    if vocabulary is not None and not 0 <= lowest <= highest < vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"{name} has the token {wrong}, and {kind} knows 0 to {vocabulary - 1}: is the tokenizer that of the model?"
        )


def _check_beside(batch: Mapping[str, Tensor], side: str, name: str) -> None:
    """What goes with a sequence is as long; a mask leaves something of every example."""
    b, n = batch[name].shape[:2]
    for other in (f"{side}attention_mask", f"{side}token_type_ids", f"{side}position_ids"):
        if other not in batch or (shape := tuple(batch[other].shape)) == (b, n):
            continue
        every_query = len(shape) == 4 and shape[0] in (1, b) and other.endswith("mask")
        if not shape or shape[-1] != n or not (every_query or other.endswith("position_ids")):
            raise ValueError(f"{other} is of shape {shape}, and {name} has {b} examples of {n} tokens: make it {b, n}")
    mask = batch.get(f"{side}attention_mask")
    if mask is not None and mask.dim() == 2 and (blank := (~mask.bool().any(1)).nonzero()).numel():
        raise ValueError(f"{side}attention_mask hides all of example {int(blank[0])}: there is nothing to record")


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
        sides = dict(zip(("source", "target"), SIDES, strict=True))
    else:
        sides = {"target" if "decoder-self" in kinds else "source": ""}
    tokens = {side: batch[f"{start}input_ids"] for side, start in sides.items() if f"{start}input_ids" in batch}
    masks = {}
    for side, ids in tokens.items():
        mask = batch.get(f"{sides[side]}attention_mask")
        masks[side] = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.dim() != 2 else mask.bool()
    return tokens, masks


def words(tokenizer: Any, ids: Tensor) -> list[list[str]]:
    """The tokens as their tokenizer writes them; where it writes bytes as letters, as the text they are."""
    rows = [tokenizer.convert_ids_to_tokens(row) for row in ids.tolist()]
    if "ByteLevel" not in type(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)).__name__:
        return rows
    return [[_as_text(tokenizer, piece) for piece in row] for row in rows]


def _as_text(tokenizer: Any, piece: str) -> str:
    """A piece of bytes with the mark of a word's beginning; as it is, where it is no whole letter, or none to print."""
    mark = "Ġ" if piece.startswith("Ġ") else ""
    text = tokenizer.convert_tokens_to_string([piece]).strip()
    return f"{mark}{text}" if text and text.isprintable() and "\ufffd" not in text else piece


def sample(model: Any, inputs: Mapping[str, Tensor], tokenizer: Any) -> dict[str, Tensor]:
    """A small batch to prove a model on: two short texts, or without a tokenizer the last tokens of the inputs."""
    if tokenizer is not None:
        return encode(model, tokenizer, PROOF, PROOF if model.config.is_encoder_decoder else None, max_length=16)
    if not all(value.dim() == 2 for value in inputs.values()):
        return dict(inputs)
    kept = {}
    for name, value in inputs.items():
        mask = inputs.get(f"{SIDES[name.startswith('decoder_')]}attention_mask")
        if mask is None or mask.shape != value.shape:
            kept[name] = value[:, -64:]
        else:
            kept[name] = value[:, mask.bool().any(0).nonzero()[-64:, 0]]  # where any example has a token
    return kept


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
    if not isinstance(text, Iterable):
        raise TypeError(f"{name} must be a string or a list of strings, not a {type(text).__name__}")
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
    least = 1 + tokenizer.num_special_tokens_to_add()
    if max_length is not None and (not isinstance(max_length, int) or max_length < least):
        raise ValueError(f"max_length must be a whole number, at least {least} with this tokenizer, not {max_length!r}")
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
