"""The attention functions of a Hugging Face model: the eager one from its own file, and torch's fused one.

Every model that dispatches its attention has a function `eager_attention_forward` in its own file. That function
handles softcap, sinks, position bias and grouped heads. It is found through the attention module, so nothing here
imports transformers.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import readers
from attnlab.records.visibility import CausalMask

ROWS = 256  # number of queries in one chunk
# tensors that attention functions receive as keywords and do not use
HARMLESS = ("position_ids", "cache_position", "position_embeddings", "num_items_in_batch")


def find_eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the eager function from the file that defines the attention module's class or one of its base classes."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(f"{type(module).__name__} is not supported: its file has no eager_attention_forward")


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments with which a model calls its attention function."""

    module: nn.Module
    query: Tensor  # (b,h,i,d)
    key: Tensor  # (b,g,j,d)
    value: Tensor  # (b,g,j,d)
    mask: Tensor | None
    options: Mapping[str, Any]

    def has_causal_module(self) -> bool:
        """Return whether attention without a mask is causal: is_causal of the call, else of the module."""
        option = self.options.get("is_causal")
        return getattr(self.module, "is_causal", True) if option is None else option

    def is_causal(self) -> bool:
        """Return whether the call is causal without a mask. A mask, if given, already hides the future."""
        return self.mask is None and self.has_causal_module()

    def describe_window(self) -> str:
        """Return what layers must have in common to see the same keys: the type of the layer and its sliding window."""
        types = getattr(getattr(self.module, "config", None), "layer_types", None)
        layer = getattr(self.module, "layer_idx", None)
        kind = types[layer] if types and layer is not None and layer < len(types) else "full_attention"
        return f"{kind} window={self.options.get('sliding_window')}"

    def find_positions(self) -> Tensor | None:
        """Return the key index of each query, (i,), in self-attention. None: they are the last keys.

        In a static cache, the last query's own key is the last one that it sees. A mask must be bool.
        """
        i, j = self.query.shape[2], self.key.shape[2]
        if self.mask is None or i == j:
            return None
        seen = self.mask[..., -1, :].flatten(0, -2).any(0)  # (j,)
        keys = torch.arange(j, device=seen.device)
        return keys.where(seen, 0).max() + torch.arange(1 - i, 1, device=seen.device)

    def find_visible(self) -> Tensor | CausalMask:
        """Return what each query may attend to: a bool tensor that broadcasts to (b,1,i,j), or a rule that needs none.

        A mask must be bool.
        """
        if self.mask is not None:
            return self.mask
        i, j = self.query.shape[2], self.key.shape[2]
        if self.is_causal() and i > 1:
            return CausalMask(i, j, self.query.device)
        return torch.ones(1, 1, 1, j, dtype=torch.bool, device=self.query.device)

    def build_bool_mask(self) -> Tensor:
        """Return `find_visible` as a tensor, for short sequences."""
        seen = self.find_visible()
        return seen.build() if isinstance(seen, CausalMask) else seen

    def needs_eager(self) -> bool:
        """Return whether the call needs eager attention: torch's fused attention supports neither softcap nor sinks."""
        reader = self.find_reader()
        if reader is not None and reader.eager is not None:
            return True
        return self.options.get("softcap") is not None or self.options.get("s_aux") is not None

    def is_plain_softmax(self) -> bool:
        """Return whether the weights are softmax(scale · q kᵀ) over all keys or those up to the query's own."""
        others = [name for name, x in self.options.items() if isinstance(x, Tensor) and name not in HARMLESS]
        return self.mask is None and not others and not self.needs_eager()

    def find_scale(self) -> float:
        """Return the factor of the logits."""
        scale = self.options.get("scaling")
        return self.query.shape[3] ** -0.5 if scale is None else float(scale)

    def find_reader(self) -> readers.Reader | None:
        """Return the reader that made the call, or None if the module itself did."""
        return readers.find_reader(self.module) if self.options.get("by_reader") else None

    def run_fused(self) -> Tensor:
        """Compute the context (b,i,h,d) with the model's sdpa. A mask must be bool."""
        if self.find_reader() is not None:
            return readers.attend_fused(self.module, self.query, self.key, self.value, self.mask, **self.options)
        for kind in type(self.module).__mro__:
            functions = getattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS", None)
            if functions is not None:
                return functions["sdpa"](self.module, self.query, self.key, self.value, self.mask, **self.options)[0]
        raise ValueError(f"{type(self.module).__name__} is not supported: its file has no ALL_ATTENTION_FUNCTIONS")

    def run_eager(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute context (b,i,h,d) and weights (b,h,i,j) with the eager function and an additive mask."""
        reader = self.find_reader()
        eager = find_eager(self.module) if reader is None else reader.eager or readers.attend_eagerly
        return eager(self.module, self.query, self.key, self.value, mask, **self.options)

    def attend_rows(self, seen: Tensor | CausalMask, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Compute context (b,stop−start,h,d) and weights (b,h,stop−start,j) of some queries with the eager function.

        seen is bool and broadcasts to (b,1,i,j). A query that sees no key gets whatever the eager function returns.
        """
        count = self.query.shape[2]
        options = {name: value for name, value in self.options.items() if name not in HARMLESS}
        if (bias := options.get("position_bias")) is not None and bias.shape[2] == count:
            options["position_bias"] = bias[:, :, start:stop]
        if "first" in options:
            options["first"] = start
        if isinstance(seen, CausalMask):
            part = to_additive(seen.rows(start, stop), self.query.dtype)
        else:
            part = to_additive(seen.expand(-1, -1, count, -1)[:, :, start:stop], self.query.dtype)
        return replace(self, query=self.query[:, :, start:stop], options=options).run_eager(part)

    def run_eager_in_chunks(self, seen: Tensor | CausalMask) -> Tensor:
        """Compute the context (b,i,h,d) with the eager function, in chunks of ROWS queries to save memory."""
        starts = range(0, self.query.shape[2], ROWS)
        return torch.cat([self.attend_rows(seen, start, start + ROWS)[0] for start in starts], dim=1)


def to_additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to the additive mask of eager functions: 0 where visible, the dtype's minimum elsewhere."""
    return torch.zeros((), dtype=dtype, device=seen.device).where(seen, torch.finfo(dtype).min)


def strip_module(module: nn.Module) -> nn.Module:
    """Return a copy of the attention module that has what its eager function reads: copied parameters, no submodules.

    The copy does not keep the model alive, and later training does not change it.
    """
    alone = copy.copy(module)
    alone._modules = {}
    if (reader := readers.find_reader(module)) is not None:
        vars(alone).pop(reader.method, None)  # it holds the module
    alone._parameters = {n: None if p is None else p.detach().clone() for n, p in module._parameters.items()}  # type: ignore
    alone.training = False
    return alone
