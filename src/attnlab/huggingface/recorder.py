"""Record any model, of attnlab or of Hugging Face. Only the latter imports transformers."""

from pathlib import Path
from typing import Any

from torch import nn

from attnlab.models.model import Model
from attnlab.recording import watch
from attnlab.records.record import Record


def record(
    model: nn.Module | str | Path, batch: Any, *, noise: int | None = None, feed_forward: bool = False, **options: Any
) -> Record:
    """Record what a model in evaluation mode attends to on one batch.

    model         an attnlab model; or a Hugging Face model, its id or its folder
    batch         for attnlab models, the inputs of forward: a tensor, tuple or mapping; for Hugging Face models, text
    noise         seed for one sampled pass of a stochastic mechanism, instead of its mean
    feed_forward  also record the feed-forward after each attention; its weights take memory
    options       for Hugging Face models: the options of attnlab.huggingface.pretrained.record
    """
    inner = model if isinstance(model, str | Path) else watch.unwrap_model(model)
    if isinstance(inner, Model):
        if options:
            raise TypeError(f"{', '.join(options)}: only for Hugging Face models, got {type(inner).__name__}")
        return watch.record(inner, batch, noise=noise, feed_forward=feed_forward)
    from attnlab.huggingface import pretrained

    return pretrained.record(inner, batch, noise=noise, feed_forward=feed_forward, **options)
