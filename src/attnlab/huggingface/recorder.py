"""Record any model, of attnlab or of Hugging Face. Only the latter imports transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnlab.models.model import Model
from attnlab.recording import watch
from attnlab.records.record import Record


def record(
    model: nn.Module | str | Path,
    batch: Any,
    *,
    noise: int | None = None,
    feed_forward: bool = False,
    tokenizer: Any = None,
    target: str | Sequence[str] | None = None,
    lazy: bool = False,
    max_length: int | None = None,
    allow_pickle: bool = False,
    allow_code: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    gguf_file: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Record:
    """Record what a model in evaluation mode attends to on one batch.

    model         an attnlab model; or a Hugging Face model, its id or its folder
    batch         for attnlab models, the inputs of forward: a tensor, tuple or mapping; for Hugging Face models, one
                  text, several texts, or the model's inputs as a mapping of tensors
    noise         seed for one sampled pass of a stochastic mechanism, instead of its mean
    feed_forward  also record the feed-forward after each attention; its weights take memory

    The other options are for Hugging Face models. The last seven are for loading a model by its id or folder.
    tokenizer     for texts, if the model is already loaded
    target        for encoder-decoder models, the text that the decoder reads (teacher forcing)
    lazy          run torch's fused attention and compute weights only when they are read
    max_length    truncate texts to this number of tokens
    allow_pickle  also load weights that are not safetensors; loading a pickle can run code
    allow_code    also load an adapted model whose mechanism is a class in a user's file; loading runs that file
    trust_remote_code   run the code that the model's folder or id contains
    revision      branch, tag or commit of an id on the hub, as "step1000"
    gguf_file     name of a GGUF file in the folder or id, to load the model and its tokenizer from
    device, dtype where to load the model, and in which number format; None: as saved
    """
    options: dict[str, Any] = {
        "tokenizer": tokenizer, "target": target, "lazy": lazy, "max_length": max_length, "allow_pickle": allow_pickle,
        "allow_code": allow_code, "trust_remote_code": trust_remote_code, "revision": revision,
        "gguf_file": gguf_file, "device": device, "dtype": dtype,
    }  # fmt: skip
    if isinstance(inner := model if isinstance(model, str | Path) else watch.unwrap_model(model), Model):
        if given := [name for name, value in options.items() if value is not None and value is not False]:
            raise TypeError(f"{', '.join(given)}: only for Hugging Face models, got {type(inner).__name__}")
        return watch.record(inner, batch, noise=noise, feed_forward=feed_forward)
    from attnlab.huggingface import pretrained

    return pretrained.record(inner, batch, noise=noise, feed_forward=feed_forward, **options)
