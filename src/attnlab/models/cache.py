"""Caches of keys and values for incremental decoding.

A `GrowingCache` concatenates: the queries are the last keys, as in the full pass. A `StaticCache` is allocated once and
written in place at the positions `at`. Entries that are not written yet lie in the future, so causal attention hides
them. A `CrossCache` holds the keys and values of the memory, which a cross attention computes once. No cache holds a
carry, because a carry belongs to one step.

A pinned state keeps its position on the device and changes only in place. So one step captured as a CUDA graph serves
every position (`decode.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]  # (b,g,n,d) each
Project = Callable[[], KeysValues]  # computes keys and values of the new tokens


class Cache(ABC):
    """The keys and values of one attention."""

    def __init__(self, tensors: KeysValues | None = None) -> None:
        self.tensors = tensors

    @abstractmethod
    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        """Return all keys and values (b,g,j,d), new tokens included; at (n,) holds the positions of the new tokens."""

    def select(self, examples: Tensor) -> Self:
        """Return a new cache of these examples of the batch, in this order; an example may occur several times."""
        other = copy(self)
        if self.tensors is not None:
            other.tensors = self.tensors[0].index_select(0, examples), self.tensors[1].index_select(0, examples)
        return other

    @abstractmethod
    def reorder_(self, examples: Tensor) -> None:
        """Select in place; the batch size stays, and each example replaces one with the same source."""


class GrowingCache(Cache):
    """A cache that concatenates the keys and values of each step."""

    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        new = project()
        if self.tensors is not None:
            check_batch(self.tensors[0], new[0])
            new = torch.cat([self.tensors[0], new[0]], dim=2), torch.cat([self.tensors[1], new[1]], dim=2)
        self.tensors = new
        return new

    def reorder_(self, examples: Tensor) -> None:
        self.tensors = self.select(examples).tensors


class StaticCache(Cache):
    """A cache of `limit` positions that is allocated once and written in place."""

    def __init__(self, limit: int, tensors: KeysValues | None = None) -> None:
        if limit < 1:
            raise ValueError(f"start(static=LENGTH) must allocate at least 1 token, got {limit}")
        super().__init__(tensors)
        self.limit = limit

    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        if at is None:
            raise ValueError("a static cache needs at, the position of each new token")
        k, v = project()
        if self.tensors is None:
            b, g, _, d = k.shape
            self.tensors = k.new_zeros(b, g, self.limit, d), v.new_zeros(b, g, self.limit, d)
        check_batch(self.tensors[0], k)
        self.tensors[0].index_copy_(2, at, k)
        self.tensors[1].index_copy_(2, at, v)
        return self.tensors

    def reorder_(self, examples: Tensor) -> None:
        for x in self.tensors or ():
            x.copy_(x.index_select(0, examples))

    def share_prefix(self, limit: int) -> "StaticCache":
        """Return a cache of the first `limit` positions that shares the memory of this one."""
        if self.tensors is None or limit > self.limit:
            raise ValueError(f"cannot share {limit} positions: the cache has {self.limit}, allocated in the first step")
        return StaticCache(limit, (self.tensors[0][:, :, :limit], self.tensors[1][:, :, :limit]))

    def clear_(self) -> None:
        for x in self.tensors or ():
            x.zero_()


class CrossCache(Cache):
    """The fixed keys and values of a cross attention."""

    tensors: KeysValues

    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        return self.tensors

    def reorder_(self, examples: Tensor) -> None:
        pass  # the source is the same

    def copy_(self, other: "CrossCache") -> None:
        for x, new in zip(self.tensors, other.tensors, strict=True):
            x.copy_(new)


@dataclass
class Decoding:
    """The state of an incremental decoding; a model's start() creates it and each step() advances it."""

    caches: list[tuple[Cache, Cache | None]]  # self-attention and cross attention of each block
    memory_mask: Tensor | None = None  # (b,1,1,j), False at padding of the source
    limit: int | None = None  # capacity of static caches in tokens; None: caches grow
    length: int | Tensor = 0  # number of tokens seen; a tensor on the device if pinned

    def positions(self, new: int, device: torch.device) -> Tensor:
        """Return the position of each new token in its sequence, (n,); in a static cache it is the index of its key."""
        if isinstance(self.length, Tensor):
            return self.length + torch.arange(new, device=device)
        if self.limit is not None and self.length + new > self.limit:
            raise ValueError(f"the static cache holds {self.limit} tokens: {new} more after {self.length} do not fit")
        return torch.arange(self.length, self.length + new, device=device)

    def advance(self, new: int) -> None:
        if isinstance(self.length, Tensor):
            self.length.add_(new)
        else:
            self.length += new

    def select(self, examples: Tensor) -> "Decoding":
        """Return the state of these examples, (m,) indices into the batch, as beam search needs it."""
        caches = [
            (own.select(examples), None if cross is None else cross.select(examples)) for own, cross in self.caches
        ]
        mask = None if self.memory_mask is None else self.memory_mask.index_select(0, examples)
        length = self.length.clone() if isinstance(self.length, Tensor) else self.length
        return Decoding(caches, mask, self.limit, length)

    def reorder_(self, examples: Tensor) -> None:
        """Select in place; each example must continue one with the same source, as beams of one sentence do."""
        for own, _ in self.caches:
            own.reorder_(examples)

    def pin(self, device: torch.device) -> None:
        """Move the position to the device. After this, nothing checks whether the static caches are full."""
        if self.limit is None:
            raise ValueError("only static caches can be pinned; create them with start(static=LENGTH)")
        self.length = torch.as_tensor(self.length, device=device)

    def share_prefix(self, limit: int) -> "Decoding":
        """Return this pinned state with the first `limit` positions of its static caches, in the same memory."""
        caches = [(_require_static(own).share_prefix(limit), cross) for own, cross in self.caches]
        return Decoding([*caches], self.memory_mask, limit, self.length)

    def restart_(self, fresh: "Decoding") -> None:
        """Become, in the same memory, a state of the same shape that has seen no token yet."""
        if not isinstance(self.length, Tensor) or fresh.length != 0:
            raise ValueError("restart_ needs a pinned state, and a fresh one that has seen no token")
        for (own, cross), (_, other) in zip(self.caches, fresh.caches, strict=True):
            _require_static(own).clear_()
            if isinstance(cross, CrossCache) and isinstance(other, CrossCache):
                cross.copy_(other)
        if self.memory_mask is not None and fresh.memory_mask is not None:
            self.memory_mask.copy_(fresh.memory_mask)
        self.length.zero_()


def _require_static(cache: Cache) -> StaticCache:
    if not isinstance(cache, StaticCache):
        raise ValueError("this needs static caches; create them with start(static=LENGTH)")
    return cache


def check_batch(stored: Tensor, new: Tensor) -> None:
    if len(stored) != len(new):
        sizes = f"the state holds {len(stored)} examples but the step has {len(new)}"
        raise ValueError(f"{sizes}; change the batch with state.select(…)")
