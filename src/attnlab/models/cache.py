"""Keys and values kept between the steps of incremental decoding.

A `Growing` cache concatenates: queries are the last keys, as in the full pass. A `Static` one is allocated once and
written in place at the positions `at`; what is not yet written lies in the future, so causal attention hides it. `Kept`
holds what a cross attention computed once. Only keys and values are kept: a carry belongs to one step.

A pinned state has its position on the device and changes only in place, so one step captured as a CUDA graph serves
every position (`decode.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]  # (b,g,n,d) each
Project = Callable[[], KeysValues]  # makes those of the new tokens


class Cache(ABC):
    """The keys and values of one attention."""

    @abstractmethod
    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        """All keys and values (b,g,j,d), those of the new tokens included; at (n,) says where these are written."""

    @abstractmethod
    def select(self, examples: Tensor) -> "Cache":
        """A new cache of these examples of the batch, in this order, some perhaps several times."""

    @abstractmethod
    def reorder_(self, examples: Tensor) -> None:
        """The same in place, as many examples as before, each from one with the same source."""


class Growing(Cache):
    def __init__(self, kept: KeysValues | None = None) -> None:
        self.kept = kept

    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        new = project()
        if self.kept is not None:
            _check_batch(self.kept, new)
            new = torch.cat([self.kept[0], new[0]], dim=2), torch.cat([self.kept[1], new[1]], dim=2)
        self.kept = new
        return new

    def select(self, examples: Tensor) -> "Growing":
        return Growing(_selected(self.kept, examples))

    def reorder_(self, examples: Tensor) -> None:
        self.kept = _selected(self.kept, examples)


class Static(Cache):
    def __init__(self, limit: int, kept: KeysValues | None = None) -> None:
        if limit < 1:
            raise ValueError(f"a static cache holds at least 1 token, not {limit}; start(static=LENGTH) says how many")
        self.limit, self.kept = limit, kept

    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        if at is None:
            raise ValueError("a static cache needs at, the position of each new token")
        k, v = project()
        if self.kept is None:
            b, g, _, d = k.shape
            self.kept = k.new_zeros(b, g, self.limit, d), v.new_zeros(b, g, self.limit, d)
        _check_batch(self.kept, (k, v))
        self.kept[0].index_copy_(2, at, k)
        self.kept[1].index_copy_(2, at, v)
        return self.kept

    def select(self, examples: Tensor) -> "Static":
        return Static(self.limit, _selected(self.kept, examples))

    def reorder_(self, examples: Tensor) -> None:
        for kept in self.kept or ():
            kept.copy_(kept.index_select(0, examples))

    def within(self, limit: int) -> "Static":
        """The first places of this cache, in the same memory."""
        if self.kept is None or limit > self.limit:
            raise ValueError(f"no {limit} places to share: the cache has {self.limit}, allocated by the first step")
        return Static(limit, (self.kept[0][:, :, :limit], self.kept[1][:, :, :limit]))

    def clear_(self) -> None:
        for kept in self.kept or ():
            kept.zero_()


class Kept(Cache):
    def __init__(self, kept: KeysValues) -> None:
        self.kept = kept

    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        return self.kept

    def select(self, examples: Tensor) -> "Kept":
        return Kept((self.kept[0].index_select(0, examples), self.kept[1].index_select(0, examples)))

    def reorder_(self, examples: Tensor) -> None:
        pass  # what comes from the source is the same

    def copy_(self, other: "Kept") -> None:
        for kept, new in zip(self.kept, other.kept, strict=True):
            kept.copy_(new)


@dataclass
class Decoding:
    """Where an incremental decoding stands; a model's start() makes it and each step() moves it on."""

    caches: list[tuple[Cache, Cache | None]]  # of each block: self and cross attention
    memory_mask: Tensor | None = None  # (b,1,1,j) which tokens of the source are real
    limit: int | None = None  # how many tokens static caches hold; None: they grow
    length: int | Tensor = 0  # tokens seen; a number on the device once pinned

    def places(self, new: int, device: torch.device) -> Tensor:
        """Where each new token stands in its sequence, (n,): in a static cache, the index of its key."""
        if isinstance(self.length, Tensor):
            return self.length + torch.arange(new, device=device)
        if self.limit is not None and self.length + new > self.limit:
            raise ValueError(f"the static cache holds {self.limit} tokens; {new} more after {self.length} do not fit")
        return torch.arange(self.length, self.length + new, device=device)

    def advance(self, new: int) -> None:
        if isinstance(self.length, Tensor):
            self.length.add_(new)
        else:
            self.length += new

    def select(self, examples: Tensor) -> "Decoding":
        """The state of these examples, (m,) indices into the batch: what beam search reorders, repeats and drops by."""
        caches = [
            (own.select(examples), None if cross is None else cross.select(examples)) for own, cross in self.caches
        ]
        mask = None if self.memory_mask is None else self.memory_mask.index_select(0, examples)
        length = self.length.clone() if isinstance(self.length, Tensor) else self.length
        return Decoding(caches, mask, self.limit, length)

    def reorder_(self, examples: Tensor) -> None:
        """As select, in place, where each example continues one with the same source: beams of one sentence."""
        for own, _ in self.caches:
            own.reorder_(examples)

    def pin(self, device: torch.device) -> None:
        """Count on the device from here on; nobody then checks that the static caches are not yet full."""
        if self.limit is None:
            raise ValueError("only static caches can be pinned; start(static=LENGTH) makes them")
        self.length = torch.as_tensor(self.length, device=device)

    def within(self, limit: int) -> "Decoding":
        """This pinned state with no more than so many places in its static caches, in the same memory."""
        caches: list[tuple[Cache, Cache | None]] = [(_static(own).within(limit), cross) for own, cross in self.caches]
        return Decoding(caches, self.memory_mask, limit, self.length)

    def restart_(self, fresh: "Decoding") -> None:
        """Become, in the same memory, a state of the same shape that has seen no token."""
        if not isinstance(self.length, Tensor) or fresh.length != 0:
            raise ValueError("restart_ takes a state that has seen no token into a pinned one")
        for (own, cross), (_, other) in zip(self.caches, fresh.caches, strict=True):
            _static(own).clear_()
            if isinstance(cross, Kept) and isinstance(other, Kept):
                cross.copy_(other)
        if self.memory_mask is not None and fresh.memory_mask is not None:
            self.memory_mask.copy_(fresh.memory_mask)
        self.length.zero_()


def _static(cache: Cache) -> Static:
    if not isinstance(cache, Static):
        raise ValueError("only static caches stay in their place; start(static=LENGTH) makes them")
    return cache


def _selected(kept: KeysValues | None, examples: Tensor) -> KeysValues | None:
    return None if kept is None else (kept[0].index_select(0, examples), kept[1].index_select(0, examples))


def _check_batch(kept: KeysValues, new: KeysValues) -> None:
    if len(kept[0]) != len(new[0]):
        sizes = f"the decoding holds {len(kept[0])} examples but the step has {len(new[0])}"
        raise ValueError(f"{sizes}; change the batch by state.select(…)")
