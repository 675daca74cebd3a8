"""Caches of keys and values for incremental decoding, and of what a mechanism derives from each key's input.

A `GrowingCache` appends: the queries are the last keys, as in the full pass. A `StaticCache` is allocated once and
written in place at the positions `at`. Entries that are not written yet lie in the future, so causal attention hides
them. A `CrossCache` holds the keys and values of the memory, which a cross attention computes once. No cache holds a
carry, because a carry belongs to one step. A mechanism with lookback also reads the last queries, which a cache keeps;
one that reads all former queries has them cached like keys.

`Decoding` is the state of one hypothesis for each example. `BeamDecoding` holds the k hypotheses of each example in one
cache. Slot s writes its key of time t at t·k + s, and a mask says which keys are of the ancestors of each hypothesis.
So reordering hypotheses moves that mask and no key, and the keys of the memory exist once for all k.

A pinned state keeps its position on the device and changes only in place. So one step captured as a CUDA graph serves
every position (`decode.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]  # keys, values and, where there is one, the key side: (b,·,n,·) each
Project = Callable[[], Tensors]  # computes these of the new tokens


class Cache(ABC):
    """What one attention keeps of former tokens."""

    def __init__(self, tensors: Tensors | None = None, former: Tensors = ()) -> None:
        self.tensors, self.former = tensors, former  # of the keys, and of the last queries

    @abstractmethod
    def extend(self, project: Project, at: Tensor | None) -> Tensors:
        """Return all keys and values (b,g,j,d), new tokens included; at (n,) holds the positions of the new tokens."""

    def look_back(self, queries: Tensors, size: int) -> Tensors:
        """Return the queries (b,·,n,·) with the last `size` former ones before them, zeros before the first of all."""
        former = self.former or tuple(x.new_zeros(*x.shape[:2], size, x.shape[3]) for x in queries)
        check_batch(former[0], queries[0])
        longer = tuple(torch.cat(pair, dim=2) for pair in zip(former, queries, strict=True))
        last = tuple(x[:, :, x.shape[2] - size :] for x in longer)
        if self.former:
            _copy(self.former, last)  # in place: a captured step reads the same memory again
        else:
            self.former = tuple(x.clone() for x in last)
        return longer

    def select(self, examples: Tensor) -> Self:
        """Return a new cache of these examples of the batch, in this order; an example may occur several times."""
        other = copy(self)
        if self.tensors is not None:
            other.tensors = tuple(x.index_select(0, examples) for x in self.tensors)
        other.former = tuple(x.index_select(0, examples) for x in self.former)
        return other

    def reorder_(self, examples: Tensor) -> None:
        """Select in place; the batch size stays, and each example replaces one with the same source."""
        _copy(self.former, tuple(x.index_select(0, examples) for x in self.former))


class GrowingCache(Cache):
    """A cache that grows: it appends new keys and values, into memory that doubles when it is full."""

    def __init__(self, tensors: Tensors | None = None, former: Tensors = ()) -> None:
        super().__init__(tensors, former)
        self._room: Tensors = ()  # what `tensors` are the first part of

    def extend(self, project: Project, at: Tensor | None) -> Tensors:
        new = project()
        if self.tensors is None:
            self.tensors = new
            return new
        check_batch(self.tensors[0], new[0])
        length = self.tensors[0].shape[2]
        whole = length + new[0].shape[2]
        if not self._room or whole > self._room[0].shape[2]:
            self._room = tuple(x.new_empty(*x.shape[:2], 2 * whole, x.shape[3]) for x in self.tensors)
            _copy(tuple(x[:, :, :length] for x in self._room), self.tensors)
        self.tensors = tuple(x[:, :, :whole] for x in self._room)
        _copy(tuple(x[:, :, length:] for x in self.tensors), new)
        return self.tensors

    def select(self, examples: Tensor) -> Self:
        other = super().select(examples)
        other._room = ()
        return other

    def reorder_(self, examples: Tensor) -> None:
        super().reorder_(examples)
        selected = self.select(examples)
        self.tensors, self._room = selected.tensors, ()


class StaticCache(Cache):
    """A cache of `limit` positions that is allocated once and written in place."""

    def __init__(self, limit: int, tensors: Tensors | None = None, former: Tensors = ()) -> None:
        if limit < 1:
            raise ValueError(f"start(static=LENGTH) must allocate at least 1 token, got {limit}")
        super().__init__(tensors, former)
        self.limit = limit

    def extend(self, project: Project, at: Tensor | None) -> Tensors:
        if at is None:
            raise ValueError("a static cache needs at, the position of each new token")
        new = project()
        if self.tensors is None:
            self.tensors = tuple(x.new_zeros(*x.shape[:2], self.limit, x.shape[3]) for x in new)
        check_batch(self.tensors[0], new[0])
        for x, part in zip(self.tensors, new, strict=True):
            x.index_copy_(2, at, part)
        return self.tensors

    def reorder_(self, examples: Tensor) -> None:
        super().reorder_(examples)
        _copy(self.tensors or (), tuple(x.index_select(0, examples) for x in self.tensors or ()))

    def share_prefix(self, limit: int) -> "StaticCache":
        """Return a cache of the first `limit` positions that shares the memory of this one."""
        if self.tensors is None or limit > self.limit:
            raise ValueError(f"cannot share {limit} positions: the cache has {self.limit}, allocated in the first step")
        return StaticCache(limit, tuple(x[:, :, :limit] for x in self.tensors), self.former)

    def clear_(self) -> None:
        for x in (*(self.tensors or ()), *self.former):
            x.zero_()


def make_empty_cache(limit: int | None) -> Cache:
    """Make a static cache of `limit` keys, or one that grows."""
    return GrowingCache() if limit is None else StaticCache(limit)


class CrossCache(Cache):
    """The fixed keys and values of a cross attention."""

    tensors: Tensors

    def extend(self, project: Project, at: Tensor | None) -> Tensors:
        return self.tensors

    def restart_(self, other: "CrossCache") -> None:
        """Take over, in the same memory, the keys and values of another memory, before its first query."""
        _copy(self.tensors, other.tensors)
        for x in self.former:
            x.zero_()


@dataclass
class Decoding:
    """The state of an incremental decoding; a model's start() creates it and each step() advances it."""

    caches: list[tuple[Cache, Cache | None]]  # self-attention and cross attention of each block
    memory_mask: Tensor | None = None  # (b,1,1,j), False at padding of the source
    limit: int | None = None  # capacity of static caches in tokens; None: caches grow
    length: int | Tensor = 0  # number of tokens seen; a tensor on the device if pinned
    can_share: bool = False  # whether the hypotheses of an example can share its caches

    def positions(self, new: int, device: torch.device) -> Tensor:
        """Return the position of each new token in its sequence, (n,); in a static cache it is the index of its key."""
        self._check_room(new)
        return self.length + torch.arange(new, device=device)

    def advance(self, new: int) -> None:
        if isinstance(self.length, Tensor):
            self.length.add_(new)
        else:
            self.length += new

    def select(self, examples: Tensor) -> Self:
        """Return the state of these examples, (m,) indices into the batch, as beam search needs it."""
        caches = [
            (own.select(examples), None if cross is None else cross.select(examples)) for own, cross in self.caches
        ]
        mask = None if self.memory_mask is None else self.memory_mask.index_select(0, examples)
        length = self.length.clone() if isinstance(self.length, Tensor) else self.length
        return replace(self, caches=caches, memory_mask=mask, length=length)

    def repeat(self, times: int, batch: int, device: torch.device) -> "Decoding":
        """Return the state of `times` hypotheses for each of `batch` examples, as consecutive rows."""
        if self.can_share and times > 1 and not isinstance(self.length, Tensor) and self.length == 0:
            limit = None if self.limit is None else self.limit * times
            caches = [(make_empty_cache(limit), cross) for _, cross in self.caches]
            return BeamDecoding(caches, self.memory_mask, self.limit, beams=times)
        return self.select(torch.arange(batch * times, device=device) // times)

    def reorder_(self, examples: Tensor) -> None:
        """Select in place; each example must continue one with the same source, as beams of one sentence do."""
        for own, cross in self.caches:
            own.reorder_(examples)
            if cross is not None:
                cross.reorder_(examples)  # its keys are those of the same source

    def pin(self, device: torch.device) -> None:
        """Move the position to the device. After this, nothing checks whether the static caches are full."""
        if self.limit is None:
            raise ValueError("only static caches can be pinned; create them with start(static=LENGTH)")
        self.length = torch.as_tensor(self.length, device=device)

    def share_prefix(self, limit: int) -> Self:
        """Return this pinned state with the first `limit` positions of its static caches, in the same memory."""
        caches = [(_require_static(own).share_prefix(limit), cross) for own, cross in self.caches]
        return replace(self, caches=[*caches], limit=limit)

    def restart_(self, fresh: "Decoding") -> None:
        """Become, in the same memory, a state of the same shape that has seen no token yet."""
        if not isinstance(self.length, Tensor) or fresh.length != 0:
            raise ValueError("restart_ needs a pinned state, and a fresh one that has seen no token")
        for (own, cross), (_, other) in zip(self.caches, fresh.caches, strict=True):
            _require_static(own).clear_()
            if isinstance(cross, CrossCache) and isinstance(other, CrossCache):
                cross.restart_(other)
        if self.memory_mask is not None and fresh.memory_mask is not None:
            self.memory_mask.copy_(fresh.memory_mask)
        self.length.zero_()

    def _check_room(self, new: int) -> None:
        if self.limit is not None and not isinstance(self.length, Tensor) and self.length + new > self.limit:
            raise ValueError(f"the static cache holds {self.limit} tokens: {new} more after {self.length} do not fit")


@dataclass
class BeamDecoding(Decoding):
    """The state of k hypotheses for each of b examples; a step takes one token for each of the b·k rows."""

    beams: int = 1  # k
    seen: Tensor | None = None  # (b,k,keys), True at the keys of a hypothesis's own tokens; created in the first step

    def positions(self, new: int, device: torch.device) -> Tensor:
        """Return the index of each slot's new key, (k,)."""
        if new != 1:
            raise ValueError(f"hypotheses that share caches take one token at a time, got {new}")
        self._check_room(new)
        return self.length * self.beams + torch.arange(self.beams, device=device)

    def fold(self, x: Tensor) -> Tensor:
        """Make the rows (b·k,1,e) queries of their examples: (b,k,e)."""
        return x.view(-1, self.beams, x.shape[2])

    def extend_mask(self, at: Tensor, rows: int) -> Tensor:
        """Let each of b·k rows see its new key, whose index `at` holds for each slot; return the mask (b,1,k,keys)."""
        own = torch.eye(self.beams, dtype=torch.bool, device=at.device).repeat(rows // self.beams, 1, 1)
        if self.limit is None:
            self.seen = own if self.seen is None else torch.cat([self.seen, own], dim=2)
            return self.seen.unsqueeze(1)
        if self.seen is None:
            self.seen = own.new_zeros(*own.shape[:2], self.limit * self.beams)
        return self.seen.index_copy_(2, at, own).unsqueeze(1)

    def select(self, examples: Tensor) -> Self:
        """Return the state of these rows; each k consecutive ones are hypotheses of the same example."""
        state = super().select(examples[:: self.beams] // self.beams)
        seen = None if self.seen is None else self.seen.flatten(0, 1).index_select(0, examples)
        return replace(state, seen=None if seen is None else seen.unflatten(0, (-1, self.beams)))

    def reorder_(self, examples: Tensor) -> None:
        if self.seen is not None:
            rows = self.seen.flatten(0, 1)
            rows.copy_(rows.index_select(0, examples))

    def share_prefix(self, limit: int) -> Self:
        if self.seen is None:
            raise ValueError(f"cannot share {limit} positions before the first step allocates the caches")
        state = super().share_prefix(limit * self.beams)
        return replace(state, limit=limit, seen=self.seen[:, :, : limit * self.beams])

    def restart_(self, fresh: Decoding) -> None:
        super().restart_(fresh)
        if self.seen is not None:
            self.seen.zero_()


def _copy(tensors: Tensors, new: Tensors) -> None:
    for x, part in zip(tensors, new, strict=True):
        x.copy_(part)


def _require_static(cache: Cache) -> StaticCache:
    if not isinstance(cache, StaticCache):
        raise ValueError("this needs static caches; create them with start(static=LENGTH)")
    return cache


def check_batch(stored: Tensor, new: Tensor) -> None:
    if len(stored) != len(new):
        sizes = f"the state holds {len(stored)} examples but the step has {len(new)}"
        raise ValueError(f"{sizes}; change the batch with state.select(…)")
