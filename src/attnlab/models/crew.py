"""The members of a stacked model: what each draws from, and the sizes of its present batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Size = tuple[int, int]  # examples, and tokens of the longest


class Crew:
    """The members of a stacked model: their generators, and the sizes of their present batches without padding."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self.sizes: dict[str, list[Size]] = {}  # of the members' batches, by stack: "encoder", "decoder"

    def __len__(self) -> int:
        return len(self.states)

    @contextmanager
    def be_member(self, number: int) -> Iterator[None]:
        """Let torch's generator on the CPU be that of a member."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[number])
        try:
            yield
        finally:
            self.states[number] = torch.get_rng_state()
            torch.set_rng_state(before)

    def split(self, x: Tensor | None) -> Sequence[Any]:
        """Split (s·b,…) into the parts of the members, (b,…) each."""
        return [None] * len(self) if x is None else x.unflatten(0, (len(self), -1)).unbind()
