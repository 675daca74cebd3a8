"""Perplexity and accuracy of a model on its targets.

    perplexity = exp(nats / targets)            bits per character = nats / (characters · ln 2)
    perplexity per byte = exp(nats / bytes)     bits per byte = nats / (bytes · ln 2), comparable between vocabularies

A mechanism with noise can be scored by its expectation (Zheng et al. 2021, §3): n full passes, each with its own noise
z_s, and for each target y, given what precedes it,

    nll     −log (1/n) Σ_s p(y | z_s)           the probabilities averaged, then the logarithm
    bound   −(1/n) Σ_s log p(y | z_s)           of eq. 3; by Jensen's inequality never below nll

Without samples there is one pass with the mean logits, as in the authors' code, and bound = nll.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Mechanism
from attnlab.mechanisms.noise import seed_noise
from attnlab.models.model import Model

ROWS = 256  # targets whose full distributions are in memory at once


@dataclass(frozen=True)
class Scored:
    """Sums over scored targets. The score of two batches is the sum of their scores."""

    nll_sum: float = 0.0  # nats
    bound_sum: float = 0.0  # nats
    count: int = 0  # targets
    correct: int = 0  # targets that are the model's first choice

    def __add__(self, other: "Scored") -> "Scored":
        mine, theirs = vars(self).values(), vars(other).values()
        return Scored(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll_sum, self.count)

    @property
    def bound_perplexity(self) -> float:
        return perplexity(self.bound_sum, self.count)

    @property
    def accuracy(self) -> float:
        return self.correct / _check_count(self.count, "targets")


def perplexity(nats: float, count: int) -> float:
    """Return exp(nats / count), or ∞ if it overflows."""
    each = nats / _check_count(count, "targets")
    return math.exp(each) if each < 709 else math.inf


def bits_per_character(nats: float, characters: int) -> float:
    return nats / (_check_count(characters, "characters") * math.log(2))


def bits_per_byte(nats: float, count: int) -> float:
    return nats / (_check_count(count, "bytes") * math.log(2))


@torch.no_grad()
def score_batches(
    model: nn.Module,
    batches: Iterable[tuple[Tensor | Sequence[Tensor], Tensor]],
    *,
    padding: int | None = 0,
    samples: int = 0,
    seed: int = 0,
) -> Scored:
    """Score the targets of batches (inputs, targets) under softmax(model(*inputs)).

    targets   token ids (b,n), of which padding is not scored; or classes (b,) with padding=None, all scored
    samples   0: one pass without noise; n: n passes with the noise of seeds seed, seed + 1, …, others in each batch
    """
    if model.training:
        raise ValueError("the model is in training mode, with dropout and noise; call model.eval() first")
    if samples < 0:
        raise ValueError(f"samples must be at least 0, got {samples}")
    if samples and not any(isinstance(m, Mechanism) and m.stochastic for m in model.modules()):
        raise ValueError(
            f"no attention of this model has noise, got {samples} samples; leave out eval_samples= (samples= in Python)"
        )
    sums: Tensor | float = 0.0
    for number, (inputs, targets) in enumerate(batches):
        first = seed + number * samples
        seeds = range(first, first + samples) if samples else [None]
        scored = torch.ones_like(targets, dtype=torch.bool) if padding is None else targets != padding
        arguments = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        passes = [_pass(model, arguments, scored, one) for one in seeds]
        sums = sums + _sums(model, passes, targets[scored])
    if not isinstance(sums, Tensor):
        raise ValueError("no batches to score: the iterable is empty")
    nll, bound, count, correct = sums.tolist()
    return Scored(nll, bound, int(count), int(correct))


def _pass(model: nn.Module, inputs: tuple[Tensor, ...], scored: Tensor, seed: int | None) -> Tensor:
    """Return at the scored positions the input of the readout (m,e) of our models, or the logits (m,v) of others."""
    with nullcontext() if seed is None else seed_noise(model, seed):
        outputs = model.hidden(*inputs) if isinstance(model, Model) else model(*inputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"{type(model).__name__} returned a {type(outputs).__name__}, not logits")
    if outputs.shape[:-1] != scored.shape:
        raise ValueError(f"targets {tuple(scored.shape)} do not fit the predictions {tuple(outputs.shape[:-1])}")
    return outputs[scored]


def _sums(model: nn.Module, passes: list[Tensor], targets: Tensor) -> Tensor:
    """Return (nll, bound, count, correct) summed over the targets (m,), computed ROWS at a time: (4,)."""
    sums = torch.zeros(4, dtype=torch.float64, device=targets.device)
    for rows in torch.arange(len(targets), device=targets.device).split(ROWS):
        right = targets[rows].unsqueeze(1)
        mixture = _log_prob(model, passes[0][rows])  # log Σ_s p(· | z_s), (rows,v)
        total = mixture.gather(1, right).double()  # Σ_s log p(y | z_s)
        for outputs in passes[1:]:
            log_prob = _log_prob(model, outputs[rows])
            mixture, total = torch.logaddexp(mixture, log_prob), total + log_prob.gather(1, right)
        nll = math.log(len(passes)) - mixture.gather(1, right).double()
        correct = mixture.argmax(1, keepdim=True) == right
        sums += torch.cat([nll, -total / len(passes), torch.ones_like(nll), correct], dim=1).sum(0)
    return sums


def _log_prob(model: nn.Module, outputs: Tensor) -> Tensor:
    if isinstance(model, Model):
        return model.readout.log_prob(outputs)
    return outputs.log_softmax(-1, dtype=torch.promote_types(outputs.dtype, torch.float32))


def _check_count(count: int, what: str) -> int:
    if count < 1:
        raise ValueError(f"the number of {what} must be at least 1, got {count}")
    return count
