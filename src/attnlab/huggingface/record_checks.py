"""Check that a model can be recorded, and explain failures of its own code. Nothing here imports transformers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.config import describe_error
from attnlab.huggingface import dispatch, support
from attnlab.huggingface.registration import PARAMETER_FREE, PREFIX
from attnlab.records.record import Layer


def check_loaded(given: Mapping[str, Any]) -> None:
    """Raise ValueError if options of loading are given with a model that is already loaded."""
    if names := [f"{name}=" for name, value in given.items() if value is not None]:
        change = "move it with model.to(…)" if names[0] in ("device=", "dtype=") else "pass its id or folder"
        raise ValueError(f"{' and '.join(names)} cannot be set: this model is already loaded; {change}")


def check_recordable(model: Any) -> None:
    """Raise ValueError if a model is in training mode, or runs an attention that a record cannot show."""
    if any(module.training for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} is in training mode; call model.eval() before recording it")
    by_name = str(model.config._attn_implementation)
    if (name := by_name.removeprefix(PREFIX)) in PARAMETER_FREE and name != by_name:
        how = f"call model.set_attn_implementation('sdpa'), then attnlab.adapt(model, {name!r})"
        raise ValueError(f"this model runs attn_implementation={by_name!r}, which a record cannot show: {how}")
    for part in dispatch.list_models(model):
        support.check_class(type(part))


def check_examples(model: Any, layers: Iterable[Layer], batch: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a layer attends within parts of an example, such as windows, as if each were an example."""
    counts = {len(x) for x in batch.values() if x.dim()}
    for layer in layers:
        if (found := len(layer.context)) not in counts:
            raise ValueError(
                f"{type(model).__name__} cannot be recorded: {layer.name} attends to {found} parts of the "
                f"{max(counts)} examples, such as windows, and a record holds whole examples"
            )


@contextmanager
def explain_failure(model: nn.Module) -> Iterator[None]:
    """Replace what the code of a model raises on its inputs by an error of one sentence."""
    try:
        yield
    except (ValueError, TypeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of many types
        what = f"{type(model).__name__} cannot be recorded: it fails on this batch ({describe_error(error)})"
        raise ValueError(what) from error
