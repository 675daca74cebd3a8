"""Record any model: one of ours, or a Hugging Face model. transformers is imported only for the latter."""

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

    model         a model of ours; a Hugging Face model, its id or its folder
    batch         for ours, what forward takes: a tensor, a tuple or a mapping; for Hugging Face models, text
    noise         a seed: one sampled pass of a stochastic mechanism, instead of the mean
    feed_forward  also what the feed-forward after each attention does; its weights take memory
    options       for Hugging Face models: those of attnlab.huggingface.pretrained.record
    """
    inner = model if isinstance(model, str | Path) else watch.unwrapped(model)
    if isinstance(inner, Model):
        if options:
            raise TypeError(f"{', '.join(options)}: only for Hugging Face models; {type(inner).__name__} is not one")
        return watch.record(inner, batch, noise=noise, feed_forward=feed_forward)
    from attnlab.huggingface import pretrained

    return pretrained.record(inner, batch, noise=noise, feed_forward=feed_forward, **options)
