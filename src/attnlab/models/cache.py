"""Keys and values kept between the steps of incremental decoding.

A `Growing` cache concatenates: queries are the last keys, as in the full pass. A `Static` one is allocated once and
written in place at the positions `at`; what is not yet written lies in the future, so causal attention hides it. `Kept`
holds what a cross attention computed once. Only keys and values are kept: a carry belongs to one step.
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


class Static(Cache):
    def __init__(self, limit: int, kept: KeysValues | None = None) -> None:
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


class Kept(Cache):
    def __init__(self, kept: KeysValues) -> None:
        self.kept = kept

    def extend(self, project: Project, at: Tensor | None) -> KeysValues:
        return self.kept

    def select(self, examples: Tensor) -> "Kept":
        return Kept((self.kept[0].index_select(0, examples), self.kept[1].index_select(0, examples)))


@dataclass
class Decoding:
    """Where an incremental decoding stands; a model's start() makes it and each step() moves it on."""

    caches: list[tuple[Cache, Cache | None]]  # of each block: self and cross attention
    memory_mask: Tensor | None = None  # (b,1,1,j) which tokens of the source are real
    limit: int | None = None  # how many tokens static caches hold; None: they grow
    length: int = 0  # tokens seen

    def place(self, new: int, device: torch.device) -> Tensor | None:
        """The key index of each new token, (n,); None where caches grow and the new tokens are the last keys."""
        if self.limit is None:
            return None
        if self.length + new > self.limit:
            raise ValueError(f"the static cache holds {self.limit} tokens; {new} more after {self.length} do not fit")
        return torch.arange(self.length, self.length + new, device=device)

    def select(self, examples: Tensor) -> "Decoding":
        """The state of these examples, (m,) indices into the batch: what beam search reorders, repeats and drops by."""
        caches = [
            (own.select(examples), None if cross is None else cross.select(examples)) for own, cross in self.caches
        ]
        mask = None if self.memory_mask is None else self.memory_mask.index_select(0, examples)
        return Decoding(caches, mask, self.limit, self.length)


def _selected(kept: KeysValues | None, examples: Tensor) -> KeysValues | None:
    return None if kept is None else (kept[0].index_select(0, examples), kept[1].index_select(0, examples))


def _check_batch(kept: KeysValues, new: KeysValues) -> None:
    if len(kept[0]) != len(new[0]):
        sizes = f"the decoding holds {len(kept[0])} examples but the step has {len(new[0])}"
        raise ValueError(f"{sizes}; change the batch by state.select(…)")
