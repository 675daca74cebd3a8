"""Optimisers and learning-rate schedules, with fairseq's conventions, so that published recipes can be used unchanged.

inverse-sqrt   lr · √(warmup / step)                                                    after the warm-up
cosine         min + ½ (lr − min)(1 + cos(π t/T_i)), period T_i growing by `multiply` and lr shrinking by `shrink`
constant       lr
warm-up        linear from warmup_start to lr over `warmup` steps, in all three
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: a function of the number of updates."""

    kind: Literal["inverse-sqrt", "cosine", "constant"]
    lr: float
    warmup: int
    warmup_start: float
    period: int  # cosine: steps of the first period
    multiply: float
    shrink: float
    min_lr: float

    def __call__(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` updates."""
        if step < self.warmup:
            return self.warmup_start + (self.lr - self.warmup_start) * step / self.warmup
        if self.kind == "inverse-sqrt":
            return self.lr * math.sqrt(max(self.warmup, 1) / max(step, 1))
        if self.kind == "constant":
            return self.lr
        return self._cosine(step - self.warmup)

    def _cosine(self, step: int) -> float:
        if self.multiply == 1.0:
            number, into, period = step // self.period, float(step % self.period), float(self.period)
        else:
            number = math.floor(math.log(1 - step / self.period * (1 - self.multiply), self.multiply))
            period = self.multiply**number * self.period
            into = step - (1 - self.multiply**number) / (1 - self.multiply) * self.period
        factor = self.shrink**number
        low, high = self.min_lr * factor, self.lr * factor
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * into / period))


def build_optimiser(
    master: nn.Parameter,
    kind: Literal["adam", "adamw", "nag"],
    *,
    betas: tuple[float, float],
    eps: float,
    momentum: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Build a fused optimiser whose learning rate is a tensor on the device, so that captured steps can change it."""
    lr = torch.zeros((), device=master.device)
    if kind == "nag":
        how = {"momentum": momentum, "nesterov": True, "weight_decay": weight_decay, "fused": True}
        nag = torch.optim.SGD([master], lr=lr, **how)  # type: ignore[arg-type]
        nag.state[master]["momentum_buffer"] = torch.zeros_like(master)  # else a skipped first step leaves it undefined
        return nag
    adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    capturable = master.is_cuda
    return adam([master], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True, capturable=capturable)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def read_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state of the master: flat vectors and the number of steps."""
    (master,) = optimizer.param_groups[0]["params"]
    return {key: value for key, value in optimizer.state.get(master, {}).items() if isinstance(value, Tensor)}


def write_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    (master,) = optimizer.param_groups[0]["params"]
    for key, value in tensors.items():
        optimizer.state[master][key] = value.to(master.device)
