"""Former queries of a mechanism with lookback, kept by the model's own cache.

The layer of the cache keeps the last queries beside its keys and reorders them with beams. Before the first of all lie
zeros. Nothing here imports transformers.
"""

from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import ALL

_EXTENDED: dict[type, type] = {}  # classes of cache layers, with those that also keep queries


def look_back(layer: Any, size: int, queries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the queries and their side, (b,·,i,·) each, with the last `size` former ones before them, and keep these.

    layer   the layer of a cache. Nothing is before the first queries that it sees, as in a pass without a cache.
    """
    if not hasattr(layer, "former_queries"):
        kind = type(layer)
        if kind not in _EXTENDED:
            _EXTENDED[kind] = extend_layer(kind)
        layer.__class__ = _EXTENDED[kind]
        layer.former_queries = None
    former = layer.former_queries
    zeros = tuple(x.new_zeros(*x.shape[:2], 0 if size == ALL else size, x.shape[3]) for x in queries)
    longer = tuple(torch.cat(pair, dim=2) for pair in zip(former or zeros, queries, strict=True))
    layer.former_queries = tuple(x[:, :, max(0, x.shape[2] - size) :] for x in longer)
    return queries if former is None else longer


def extend_layer(kind: Any) -> type:
    """Return a class of cache layers that selects examples of its former queries as of its keys."""

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        kind.reorder_cache(self, beam_idx)
        _select(self, lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self: Any, repeats: int) -> None:
        kind.batch_repeat_interleave(self, repeats)
        _select(self, lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self: Any, indices: Tensor) -> None:
        kind.batch_select_indices(self, indices)
        _select(self, lambda x: x[indices, ...])

    def reset(self: Any) -> None:
        kind.reset(self)
        self.former_queries = None

    def crop(self: Any, *_: Any) -> None:
        raise ValueError("a cache with former queries cannot be cropped: do not use assisted decoding with lookback")

    methods = (reorder_cache, batch_repeat_interleave, batch_select_indices, reset, crop)
    own = {method.__name__: method for method in methods if hasattr(kind, method.__name__)}
    return type(kind.__name__, (kind,), {**own, "_layer_type": None})  # a type would register the class


def _select(layer: Any, choose: Any) -> None:
    if layer.former_queries is not None:
        layer.former_queries = tuple(choose(x) for x in layer.former_queries)


def extend_mask(mask: Tensor, at: Tensor, size: int, keys: int | None) -> Tensor:
    """Return the mask (b,1,size+i,j) with rows for `size` former queries: what the first query sees, up to their keys.

    keys   number of keys of self-attention; None in cross attention, where all queries see the same keys
    """
    mask = mask.expand(-1, -1, len(at), -1)
    rows = mask[:, :, :1].expand(-1, -1, size, -1)
    if keys is not None:
        former = at[0] + torch.arange(-size, 0, device=at.device)
        rows = rows & (torch.arange(keys, device=at.device) <= former[:, None])
    return torch.cat([rows, mask], dim=2)
