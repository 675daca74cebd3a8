"""What a mechanism reads beside q, k and v in a Hugging Face model: the input x of its layer, and former queries.

A pre-hook on the attention module notes x. In self-attention, the key side of former tokens travels in the model's own
cache: while the module runs, the cache's `update` also stores it, as further heads of keys and values. So it grows,
slides and is reordered with them, in every kind of cache. Cross attention computes it from the encoder's states again.
Former queries are kept by the layer of the cache (query_history.py). Nothing here imports transformers.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.huggingface.running import Running
from attnlab.mechanisms import Mechanism
from attnlab.mechanisms.mechanism import Sides

OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")  # arguments of an attention module that make it cross


@dataclass(eq=False)
class LayerInputs:
    """The inputs of an attention module that is running."""

    module: nn.Module
    mechanism: Mechanism
    x: Tensor  # (b,i,e), of the queries
    source: Tensor | None  # (b,j,e), of the keys of a cross attention
    cache: Any  # the model's cache, or None
    key_side: Tensor | None = None  # of all keys in the cache, (b,·,j,·)
    queries: list[Tensor] = field(default_factory=list)  # of further groups of heads, (b,h,i,d) each
    group: int | None = None  # the group whose queries are computed now

    @property
    def own_cache(self) -> Any:
        """The cache of this attention: of an encoder-decoder cache, the part for self-attention or cross attention."""
        part = "self_attention_cache" if self.source is None else "cross_attention_cache"
        return getattr(self.cache, part, self.cache)

    def keep_key_side(self) -> None:
        """Let the cache store the key side beside the keys, until `release_cache`."""
        cache = self.own_cache
        if cache is None or self.source is not None or type(self.mechanism).key_side is Mechanism.key_side:
            return

        def update(
            key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **named: Any
        ) -> tuple[Tensor, Tensor]:
            heads, side = key_states.shape[1], self.mechanism.key_side(self.x)
            if side is None:
                return type(cache).update(cache, key_states, value_states, layer_idx, *rest, **named)
            keys, values = join_heads(key_states, value_states, side)
            stored = cache.layers[layer_idx].keys if layer_idx < len(cache.layers) else None
            if stored is not None and stored.dim() == 4 and stored.shape[1] != keys.shape[1]:
                needs = f"{type(self.mechanism).__name__} also keeps what it reads of each key"
                raise ValueError(f"{needs}: pass a cache that no other model has filled or allocated")
            keys, values = type(cache).update(cache, keys, values, layer_idx, *rest, **named)
            keys, values, self.key_side = separate_side(keys, values, heads, side)
            return keys, values

        cache.update = update

    def find_cache_layer(self) -> Any:
        """Return the layer of the cache that belongs to this module, or None without a cache."""
        return None if self.own_cache is None else self.own_cache.layers[find_index(self.module)]

    def find_own_positions(self) -> Tensor:
        """Return the position of each query in its own sequence, (i,), in a cross attention with a cache."""
        new = self.x.shape[1]
        length = self.cache.get_seq_length() if hasattr(self.cache, "self_attention_cache") else new
        return torch.arange(-new, 0, device=self.x.device) + length

    def release_cache(self) -> None:
        if self.own_cache is not None:
            vars(self.own_cache).pop("update", None)

    def read_sides(self, keys: int) -> Sides:
        """Return what the mechanism reads of each query and of each key. Raises ValueError if not of all keys."""
        side = self.key_side
        if side is None:
            side = self.mechanism.key_side(self.x if self.source is None else self.source)
        if side is not None and side.shape[2] != keys:
            what = f"{type(self.mechanism).__name__} reads the input of all {keys} keys"
            raise ValueError(f"{what}, but this model keeps it of {side.shape[2]} of them: pass use_cache=False")
        return self.mechanism.query_side(self.x), side


def find_index(module: Any) -> int:
    """Return the index of an attention module's layer in the model's cache."""
    return module.layer_idx if hasattr(module, "layer_idx") else module.layer_id  # GPT-Neo


class CapturedQueryError(Exception):
    """Ends a pass through an attention module that only computes queries."""


_INPUTS = Running[LayerInputs]()


def begin_inputs(module: nn.Module, mechanism: Mechanism, args: tuple, named: dict[str, Any]) -> LayerInputs:
    """Note the arguments of an attention module that begins to run."""
    arguments = bind_arguments(module, args, named)
    inputs = LayerInputs(module, mechanism, find_states(arguments), find_source(arguments), find_cache(arguments))
    _INPUTS.keep(inputs)
    return inputs


def end_inputs(_module: nn.Module, _args: Any = None, _output: Any = None) -> None:
    """Forget the inputs when the attention module has returned or failed (a forward hook)."""
    if (inputs := _INPUTS.get()) is not None:
        inputs.release_cache()
        _INPUTS.keep(None)


def get_inputs(module: nn.Module, name: str) -> LayerInputs:
    """Return the inputs of an attention module that is running."""
    inputs = _INPUTS.get()
    if inputs is None or inputs.module is not module:
        raise RuntimeError(f"{name} runs without its hooks, so its mechanism gets no inputs; call the module itself")
    return inputs


def find_running_inputs() -> LayerInputs | None:
    """Return the inputs of the attention module that is running, if its mechanism reads any."""
    return _INPUTS.get()


def capture_query(query: Tensor) -> None:
    """Note the queries and end the pass through an attention module if only they are wanted."""
    if (inputs := _INPUTS.get()) is not None and inputs.group is not None:
        inputs.queries.append(query)
        raise CapturedQueryError


def bind_arguments(module: nn.Module, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by name."""
    bound = inspect.signature(module.forward).bind(*args, **named)
    rest = [p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    return {**bound.arguments, **(bound.arguments.get(rest[0], {}) if rest else {})}


def find_states(arguments: dict[str, Any]) -> Tensor:
    """Return the states that the queries are computed from, (b,i,e)."""
    return arguments.get("hidden_states", next(iter(arguments.values())))


def find_source(arguments: dict[str, Any]) -> Tensor | None:
    """Return the states of another sequence that keys and values are computed from, (b,j,e); None in self-attention."""
    return next((arguments[name] for name in OTHER_SEQUENCE if arguments.get(name) is not None), None)


def find_cache(arguments: dict[str, Any]) -> Any:
    """Return the model's cache among the arguments of an attention module, or None."""
    return next((x for x in arguments.values() if hasattr(x, "update") and hasattr(x, "get_seq_length")), None)


def join_heads(keys: Tensor, values: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """Append a side (b,s,n,c) to keys (b,g,n,d) and values (b,g,n,f), as heads filled up with zeros."""
    b, _, n, _ = side.shape
    flat = side.to(values.dtype).transpose(1, 2).flatten(2)  # (b,n,s·c)
    d, f = keys.shape[-1], values.shape[-1]
    more = -(-flat.shape[-1] // (d + f))
    full = F.pad(flat, (0, more * (d + f) - flat.shape[-1])).view(b, n, more, d + f).transpose(1, 2)  # (b,more,n,d+f)
    first, second = full.split((d, f), dim=-1)
    return torch.cat([keys, first.to(keys.dtype)], dim=1), torch.cat([values, second], dim=1)


def separate_side(keys: Tensor, values: Tensor, groups: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `join_heads`: return keys and values of `groups` heads, and the side (b,s,j,c), shaped as `like`."""
    _, s, _, c = like.shape
    flat = torch.cat([keys[:, groups:], values[:, groups:]], dim=-1).transpose(1, 2).flatten(2)  # (b,j,more·(d+f))
    side = flat[..., : s * c].unflatten(-1, (s, c)).transpose(1, 2)
    return keys[:, :groups], values[:, :groups], side.to(like.dtype)
