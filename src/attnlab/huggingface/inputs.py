"""Build and check the inputs of a Hugging Face model: token ids and masks from texts, or tensors from the user.

Padding is always on the right, whatever the tokenizer's default, so that it does not change a token's position.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attnlab.records.pieces import show_pieces
from attnlab.tasks.vocabulary import is_byte_level

PROOF_TEXTS = ("The cat sat on the mat.", "Nobody saw it.")  # texts to prove a model on
SIDES = ("", "decoder_")  # prefixes of the names of inputs


def build_batch(model: Any, tokenizer: Any, text: Any, target: Any, max_length: int | None) -> dict[str, Tensor]:
    """Return the model's inputs on its device, from texts or from tensors by name."""
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(f"tokenizer= must be a loaded tokenizer, got {tokenizer!r}: use AutoTokenizer.from_pretrained")
    if isinstance(text, Tensor):
        raise TypeError('pass text, or a mapping of tensors by name, as {"input_ids": tensor}; got one tensor')
    if not isinstance(text, Mapping):
        batch = encode_texts(model, tokenizer, text, target, max_length)
    elif target is not None or max_length is not None:
        raise ValueError("target= and max_length= need text; the batch is a mapping of tensors")
    else:
        batch = _drop_labels(model, text)
    check_batch(model, batch)
    return {name: value.to(model.device) for name, value in batch.items()}


def _drop_labels(model: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without labels, with which a loss comes first. A decoder without inputs reads its text shifted."""
    batch = dict(given)
    labels = batch.pop("labels", None)
    needs_inputs = model.config.is_encoder_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(batch)
    if labels is not None and needs_inputs and model.get_output_embeddings() is not None:  # else a classifier
        batch["decoder_input_ids"] = shift_right(model, labels)
    return batch


def encode_texts(
    model: Any, tokenizer: Any, text: str | Sequence[str], target: str | Sequence[str] | None, max_length: int | None
) -> dict[str, Tensor]:
    """Tokenize texts and pad them. The decoder of an encoder-decoder model reads target, shifted by one."""
    texts = _list_texts(text, "text")
    if tokenizer is None:
        raise ValueError("text needs a tokenizer=; or pass the model's inputs as a mapping of tensors")
    batch = _pad_texts(model, tokenizer, texts, max_length, "text")
    if not model.config.is_encoder_decoder:
        if target is not None:
            raise ValueError(f"target= is for encoder-decoder models, which {type(model).__name__} is not")
        return batch
    if target is None:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model: pass the text of its decoder as target=")
    if len(targets := _list_texts(target, "target")) != len(batch["input_ids"]):
        raise ValueError(f"{len(targets)} targets for {len(batch['input_ids'])} texts: pass one target for each text")
    ahead = _pad_texts(model, tokenizer, targets, max_length, "text_target")
    return batch | {
        "decoder_input_ids": shift_right(model, ahead["input_ids"]),
        "decoder_attention_mask": ahead["attention_mask"],
    }


def check_batch(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise an error for tensors that the model cannot read or whose shapes do not match."""
    kind = type(model).__name__
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; pass texts as strings")
    if not {model.main_input_name, "inputs_embeds"} & batch.keys():
        raise ValueError(f"{kind} reads {model.main_input_name}, but the batch has {', '.join(batch) or 'nothing'}")
    if model.config.is_encoder_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & batch.keys():
        raise ValueError(f"{kind} is an encoder-decoder model: the batch also needs decoder_input_ids")
    for side in SIDES:
        if (name := f"{side}input_ids") in batch:
            _check_tokens(model, name, batch[name])
            _check_companions(batch, side, name)
        elif (name := f"{side}inputs_embeds") in batch:
            _check_companions(batch, side, name)


def _check_tokens(model: Any, name: str, ids: Tensor) -> None:
    """Check that the model has an embedding and a position for every token (b,n)."""
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise ValueError(f"{name} must be integers (batch, length), got {ids.dtype} {tuple(ids.shape)}")
    kind, limit, length = type(model).__name__, count_positions(model), ids.shape[1]
    if limit is not None and length > limit:
        raise ValueError(f"{name} has {length} tokens and {kind} {limit} positions; max_length={limit} truncates texts")
    embeddings = find_embeddings(model.get_decoder() if name.startswith("decoder") else model)
    vocabulary = getattr(embeddings, "num_embeddings", None)
    lowest, highest = int(ids.min()), int(ids.max())
    if vocabulary is not None and not 0 <= lowest <= highest < vocabulary:
        wrong = lowest if lowest < 0 else highest
        known = f"{kind} knows only 0 to {vocabulary - 1}"
        raise ValueError(f"{name} has the token {wrong}, but {known}: use the model's own tokenizer")


def _check_companions(batch: Mapping[str, Tensor], side: str, name: str) -> None:
    """Check that masks, types and positions have the shape of the sequence, and that no mask hides a whole example."""
    b, n = batch[name].shape[:2]
    for other in (f"{side}attention_mask", f"{side}token_type_ids", f"{side}position_ids"):
        if other not in batch or (shape := tuple(batch[other].shape)) == (b, n):
            continue
        every_query = len(shape) == 4 and shape[0] in (1, b) and other.endswith("mask")
        if not shape or shape[-1] != n or not (every_query or other.endswith("position_ids")):
            raise ValueError(f"{other} has shape {shape}, but {name} has {b} examples of {n} tokens: pass shape {b, n}")
    mask = batch.get(f"{side}attention_mask")
    if mask is not None and mask.dim() == 2 and (blank := (~mask.bool().any(1)).nonzero()).numel():
        raise ValueError(f"{side}attention_mask hides every token of example {int(blank[0])}")


def count_positions(model: Any) -> int | None:
    """Return the number of positions that the model has, or None if it has no limit (T5)."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = find_embeddings(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not tokens and module.num_embeddings == limit:
            return limit if module.padding_idx is None else limit - module.padding_idx - 1  # RoBERTa skips the first
    return limit


def find_embeddings(model: Any) -> nn.Module | None:
    """Return the model's embedding of tokens, or None if it does not say which one it is (CLIP)."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def split_sides(
    model: Any, batch: Mapping[str, Tensor], kinds: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tokens and masks by side, "source" and/or "target", for a Record whose layers have these kinds."""
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


def show_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the tokens of one text in the notation of `attnlab.records.pieces`."""
    pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(list(ids))]
    plain = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    return show_pieces(pieces, byte_level=is_byte_level(tokenizer), plain=plain)


def build_proof_batch(model: Any, inputs: Mapping[str, Tensor], tokenizer: Any) -> dict[str, Tensor]:
    """Return a small batch to prove a model on: two short texts, or the last tokens of the inputs."""
    if tokenizer is not None:
        target = PROOF_TEXTS if model.config.is_encoder_decoder else None
        return encode_texts(model, tokenizer, PROOF_TEXTS, target, max_length=16)
    if not all(value.dim() == 2 for value in inputs.values()):
        return dict(inputs)
    batch = {}
    for name, value in inputs.items():
        mask = inputs.get(f"{SIDES[name.startswith('decoder_')]}attention_mask")
        if mask is None or mask.shape != value.shape:
            batch[name] = value[:, -64:]
        else:
            batch[name] = value[:, mask.bool().any(0).nonzero()[-64:, 0]]  # positions where any example has a token
    return batch


def _list_texts(text: str | Sequence[str], name: str) -> list[str]:
    if not isinstance(text, Iterable):
        raise TypeError(f"{name} must be a string or a list of strings, got {type(text).__name__}")
    texts = [text] if isinstance(text, str) else list(text)
    if not texts:
        raise ValueError(f"{name} is an empty list: pass at least one text")
    for number, one in enumerate(texts):
        if not isinstance(one, str):
            raise TypeError(f"{name} must be a string or a list of strings, got a list with {type(one).__name__}")
        if not one.strip():
            raise ValueError(f"{name}[{number}] of {len(texts)} is empty: remove it")
    return texts


def _pad_texts(
    model: Any, tokenizer: Any, texts: list[str], max_length: int | None, argument: str
) -> dict[str, Tensor]:
    least = 1 + tokenizer.num_special_tokens_to_add()
    if max_length is not None and (not isinstance(max_length, int) or max_length < least):
        raise ValueError(f"max_length must be an integer of at least {least} with this tokenizer, got {max_length!r}")
    encoded = dict(tokenizer(**{argument: texts}, truncation=max_length is not None, max_length=max_length))
    return {name: value.to(model.device) for name, value in pad_ids(tokenizer, encoded).items()}


def pad_ids(tokenizer: Any, encoded: Mapping[str, list[list[int]]]) -> dict[str, Tensor]:
    """Pad the outputs of a tokenizer on the right, and add the attention mask."""
    rows = {**encoded, "attention_mask": [[1] * len(row) for row in encoded["input_ids"]]}
    fill = {"input_ids": next((n for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)}
    return {name: pad_sequence([*map(torch.tensor, x)], True, fill.get(name, 0)) for name, x in rows.items()}


def shift_right(model: Any, labels: Tensor) -> Tensor:
    """Return what a decoder reads to predict the labels: its start token, then all labels but the last.

    A label of −100, which has no loss, is read as padding.
    """
    if (shift := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is not None:
        return shift(labels=labels)
    if (start := model.config.decoder_start_token_id) is None:
        raise ValueError(f"the config of {type(model).__name__} has no decoder_start_token_id, which target= needs")
    read = labels.masked_fill(labels == -100, model.config.pad_token_id or 0)
    return torch.cat([torch.full_like(read[:, :1], start), read[:, :-1]], dim=1)
