"""Optimisers and learning-rate schedules, with fairseq's conventions, so that published recipes can be used unchanged.

inverse-sqrt   lr · √(warmup / step)                                                    after the warm-up
cosine         min + ½ (lr − min)(1 + cos(π t/T_i)), period T_i growing by period_multiply, lr and min shrinking by
               period_shrink
wsd            lr; min_lr + (lr − min_lr) n / (decay + 1) with n = decay, …, 1 in the last `decay` updates, so that one
               more update would be at min_lr                                 warm-up, stable, decay (Hu et al. 2024)
constant       lr
warm-up        linear from warmup_start to lr over `warmup` steps, in all of them

optimiser=muon trains matrices by Muon (muon.py), at muon_lr times the same share of its peak as lr has.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlab.training.muon import Muon
from attnlab.training.plain_optimisers import SGD, Adam, AdamW
from attnlab.training.step import Flat

if TYPE_CHECKING:
    from attnlab.training.loop import TrainConfig


def compute_learning_rate(config: "TrainConfig", step: int) -> float:
    """Return the learning rate of the update that follows `step` updates."""
    warmup, multiply = config.warmup_steps, config.period_multiply
    if step < warmup:
        return config.warmup_start + (config.lr - config.warmup_start) * step / warmup
    if config.schedule == "inverse-sqrt":
        return config.lr * math.sqrt(max(warmup, 1) / max(step, 1))
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        left = min(1.0, (config.steps - step) / (config.decay_steps + 1))
        return config.min_lr + (config.lr - config.min_lr) * max(left, 0.0)
    step, first = step - warmup, config.period or max(1, config.steps - warmup)
    if multiply == 1.0:
        number, into, period = step // first, float(step % first), float(first)
    else:
        number = math.floor(math.log(1 - step / first * (1 - multiply), multiply))
        period = multiply**number * first
        into = step - (1 - multiply**number) / (1 - multiply) * first
    factor = config.period_shrink**number
    low, high = config.min_lr * factor, config.lr * factor
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * into / period))


def build_optimiser(flat: Flat, config: "TrainConfig", matrices: Sequence[str] = ()) -> torch.optim.Optimizer:
    """Build a fused optimiser whose learning rate is a tensor on the device, so that captured steps can change it.

    matrices   names of the parameters that Muon trains, which begin the flat vector
    """
    if config.optimiser == "muon":
        return Muon(flat, matrices, config)
    master = flat.master
    lr, decay = torch.zeros((), device=master.device), config.weight_decay
    if config.optimiser == "nag":
        nag = SGD([master], lr=lr, momentum=config.momentum, nesterov=True, weight_decay=decay, fused=True)
        nag.state[master]["momentum_buffer"] = torch.zeros_like(master)  # else a skipped first step leaves it undefined
        return nag
    adam = Adam if config.optimiser == "adam" else AdamW
    how = {"betas": config.betas, "eps": config.eps, "weight_decay": decay}
    return adam([master], lr=lr, fused=True, capturable=master.is_cuda, **how)  # type: ignore[arg-type]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, muon_rate: float = 0.0) -> None:
    """Set the learning rate on the device; muon_rate is that of the matrices, if the optimiser is Muon."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)
    if isinstance(optimizer, Muon):
        optimizer.muon_lr.fill_(muon_rate)


def read_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state of the master: flat vectors and the number of steps."""
    (master,) = optimizer.param_groups[0]["params"]
    return {key: value for key, value in optimizer.state.get(master, {}).items() if isinstance(value, Tensor)}


def write_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    (master,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[master]
    for key, value in tensors.items():
        if key in state:
            state[key].copy_(value)  # in place: Muon holds views of it
        else:
            state[key] = value.to(master.device)
