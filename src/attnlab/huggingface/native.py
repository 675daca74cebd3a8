"""The attention functions of a Hugging Face model: the eager one from its own file, and torch's fused one.

Every model that dispatches its attention has a function `eager_attention_forward` in its own file. That function
handles softcap, sinks, position bias and grouped heads. It is found through the attention module, so nothing here
imports transformers.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 256  # number of queries in one chunk
# tensors that attention functions receive as keywords and do not use
HARMLESS = ("position_ids", "cache_position", "position_embeddings", "num_items_in_batch")


def find_eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the eager function from the file that defines the attention module's class or one of its base classes."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(
        f"{type(module).__name__} is not supported: its file has no eager_attention_forward to compute weights with"
    )


def is_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether attention without a mask is causal: is_causal of the call, else of the module."""
    option = options.get("is_causal")
    return getattr(module, "is_causal", True) if option is None else option


def is_causal_call(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Return whether the call is causal without a mask. A mask, if given, already hides the future."""
    return attention_mask is None and is_causal(module, options)


def build_bool_mask(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Return a bool tensor that broadcasts to (b,1,i,j): True where a query may attend."""
    if attention_mask is not None:
        return attention_mask
    i, j = query.shape[2], key.shape[2]
    if is_causal_call(module, attention_mask, options) and i > 1:
        return torch.ones(i, j, dtype=torch.bool, device=query.device).tril(j - i)[None, None]
    return torch.ones(1, 1, 1, j, dtype=torch.bool, device=query.device)


def needs_eager(options: Mapping[str, Any]) -> bool:
    """Return whether the call needs eager attention: torch's fused attention supports neither softcap nor sinks."""
    return options.get("softcap") is not None or options.get("s_aux") is not None


def run_fused(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Compute the context (b,i,h,d) with the model's sdpa. mask is bool; without one, the module may be causal."""
    for kind in type(module).__mro__:
        functions = getattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS", None)
        if functions is not None:
            return functions["sdpa"](module, q, k, v, mask, **options)[0]
    raise ValueError(f"{type(module).__name__} is not supported: its file has no ALL_ATTENTION_FUNCTIONS")


def attend_rows(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, options: Mapping[str, Any], start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Compute context (b,stop−start,h,d) and weights (b,h,stop−start,j) of some queries with the eager function.

    seen is bool and broadcasts to (b,1,i,j). A query that sees no key gets whatever the eager function returns.
    """
    part = seen.expand(-1, -1, q.shape[2], -1)[:, :, start:stop]
    options = {name: value for name, value in options.items() if name not in HARMLESS}
    if (bias := options.get("position_bias")) is not None:
        options["position_bias"] = bias[:, :, start:stop] if bias.shape[2] == q.shape[2] else bias
    return find_eager(module)(module, q[:, :, start:stop], k, v, to_additive(part, q.dtype), **options)


def run_eager_in_chunks(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, options: Mapping[str, Any]
) -> Tensor:
    """Compute the context (b,i,h,d) with the eager function, in chunks of ROWS queries to save memory."""
    starts = range(0, q.shape[2], ROWS)
    return torch.cat([attend_rows(module, q, k, v, seen, options, start, start + ROWS)[0] for start in starts], dim=1)


def to_additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to the additive mask of eager functions: 0 where visible, the dtype's minimum elsewhere."""
    return torch.zeros((), dtype=dtype, device=seen.device).where(seen, torch.finfo(dtype).min)


def strip_module(module: nn.Module) -> nn.Module:
    """Return a copy of the attention module that has what its eager function reads: copied parameters, no submodules.

    The copy does not keep the model alive, and later training does not change it.
    """
    alone = copy.copy(module)
    alone._modules = {}
    alone._parameters = {n: None if p is None else p.detach().clone() for n, p in module._parameters.items()}  # type: ignore
    alone.training = False
    return alone
