"""The attention that a Hugging Face model brings along: its own file's eager function, and torch's fused one.

Every model that dispatches its attention has, in its own file, `eager_attention_forward`: softcap, sinks, position bias
and grouped heads are followed there. It is found through the attention module, so nothing here imports transformers.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 256  # queries at a time, where weights are made in ranges
# tensors that reach attention functions among their keywords and mean nothing there
HARMLESS = ("position_ids", "cache_position", "position_embeddings", "num_items_in_batch")


def eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The eager function of the file that the attention module, or a class it comes from, is written in."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise ValueError(
        f"{type(module).__name__} has no eager_attention_forward in its file, so its weights cannot be had"
    )


def is_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether attention without a mask is causal: what the call says, else the module, as transformers reads them."""
    said = options.get("is_causal")
    return getattr(module, "is_causal", True) if said is None else said


def causal(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """A mask says everything by itself; without one, attention is causal if the module is."""
    return attention_mask is None and is_causal(module, options)


def visible(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Where a query may look, as one bool tensor that broadcasts to (b,1,i,j)."""
    if attention_mask is not None:
        return attention_mask
    i, j = query.shape[2], key.shape[2]
    if causal(module, attention_mask, options) and i > 1:
        return torch.ones(i, j, dtype=torch.bool, device=query.device).tril(j - i)[None, None]
    return torch.ones(1, 1, 1, j, dtype=torch.bool, device=query.device)


def fused_refuses(options: Mapping[str, Any]) -> bool:
    """torch's fused attention has no softcap, and would overlook sinks."""
    return options.get("softcap") is not None or options.get("s_aux") is not None


def fused(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """The context (b,i,h,d) by the model's sdpa; mask is bool, or None with the module saying whether it is causal."""
    for kind in type(module).__mro__:
        functions = getattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS", None)
        if functions is not None:
            return functions["sdpa"](module, q, k, v, mask, **options)[0]
    raise ValueError(f"{type(module).__name__} has no table of attention functions in its file")


def rows(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, options: Mapping[str, Any], start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Context (b,stop−start,h,d) and weights (b,h,stop−start,j) of some queries, by the eager function.

    seen is bool and broadcasts to (b,1,i,j); a query that sees nothing gets what the eager function gives it.
    """
    part = seen.expand(-1, -1, q.shape[2], -1)[:, :, start:stop]
    options = {name: value for name, value in options.items() if name not in HARMLESS}
    if (bias := options.get("position_bias")) is not None:
        options["position_bias"] = bias[:, :, start:stop] if bias.shape[2] == q.shape[2] else bias
    return eager(module)(module, q[:, :, start:stop], k, v, additive(part, q.dtype), **options)


def eager_context(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, options: Mapping[str, Any]
) -> Tensor:
    """The context (b,i,h,d) by the eager function, without ever holding all the weights."""
    starts = range(0, q.shape[2], ROWS)
    return torch.cat([rows(module, q, k, v, seen, options, start, start + ROWS)[0] for start in starts], dim=1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as the eager functions take it: 0 where visible, the least number elsewhere."""
    return torch.zeros((), dtype=dtype, device=seen.device).where(seen, torch.finfo(dtype).min)


def light(module: nn.Module) -> nn.Module:
    """The attention module with nothing in it but what its eager function reads: no submodules, parameters copied.

    Weights made from it later keep no model alive, and do not change when the model is trained on.
    """
    alone = copy.copy(module)
    alone._modules = {}
    alone._parameters = {n: None if p is None else p.detach().clone() for n, p in module._parameters.items()}  # type: ignore
    alone.training = False
    return alone
