"""Seeds of noise and dropout in training on a GPU: a pure function of (run, update, batch, place in the model).

    seed = H(seed of the run, update, batch) + place · C        H: BLAKE2b        place: of the module that draws

A run draws the same numbers alone, in a population with others, and after it was interrupted. torch's generator is not
used. Seeds are on the device, so CUDA graphs read those of the present batch.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NOISE, DROPOUT = 0, 1  # rows of the seeds that a module takes
STEP = np.uint64(0x9E3779B97F4A7C15)  # C


class Seeds:
    """The seeds of all modules of a model that draw: those with a method take_seeds, which gets seeds (2,s)."""

    def __init__(self, model: nn.Module, members: int, device: torch.device) -> None:
        places = list_drawing(model)
        self.table = torch.zeros(len(places), 2, members, dtype=torch.int64, device=device)
        self.offsets = np.arange(2 * len(places), dtype=np.uint64).reshape(-1, 2, 1) * STEP
        for module, seeds in zip(places, self.table, strict=True):
            module.take_seeds(seeds)  # type: ignore[operator]

    def set_batch(self, runs: Sequence[int], update: int, batch: int) -> None:
        """Set the seeds of a batch; runs: the seed of each member's run."""
        hashed = np.array([hash_seed(run, update, batch) for run in runs], dtype=np.uint64)
        seeds = (hashed + self.offsets) >> np.uint64(2)
        self.table.copy_(torch.from_numpy(seeds.view(np.int64)).pin_memory(), non_blocking=True)


def hash_seed(run: int, update: int, batch: int) -> int:
    """Return 64 bits that depend on all three numbers."""
    return int.from_bytes(blake2b(f"{run} {update} {batch}".encode(), digest_size=8).digest(), "little")


def list_drawing(model: nn.Module) -> list[nn.Module]:
    """Return the modules that take seeds, without those inside another one."""
    found, inside = [], tuple[str, ...]()
    for name, module in model.named_modules():
        if hasattr(module, "take_seeds") and not (inside and name.startswith(inside)):
            found.append(module)
            inside += (f"{name}.",)
    return found


def draw_seed(mechanism: Any, row: int, device: torch.device, number: int = 0) -> Tensor:
    """Return the seed of a call, () or one for each member (s,): the training's, or fresh ones of torch's generator.

    number   of the draw, where one call of the mechanism draws several times
    """
    if mechanism.seeds is not None:
        own: Tensor = mechanism.seeds[row]
        return shift_seed(own, number)
    return torch.randint(2**62, (mechanism.members,) if mechanism.members > 1 else (), device=device)


def shift_seed(seed: Tensor, number: int) -> Tensor:
    """Return another seed for each number; the same for 0."""
    return seed + number * 0x9E3779B9 if number else seed
