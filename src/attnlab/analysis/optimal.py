"""The optimal attention α^opt: the weights that make the right word most likely (Snell et al. 2021, A.1).

If the output is a softmax of summed logits, p = σ(Σ_l α_l γ_l + γ_s) (eq. 27), the loss of the target word y

    f(α) = −log p_y = log Σ_o exp(Σ_l α_l (γ_{l,o} − γ_{l,y}) + γ_{s,o} − γ_{s,y})            over the simplex

is convex (eq. 35–37). So its minimum can be found, with a proof: by convexity

    f(α) − f(α^opt) ≤ gap(α) = ⟨∇f(α), α⟩ − min_l ∂f/∂α_l,       ∂f/∂α_l = E_{o∼p} [γ_{l,o} − γ_{l,y}]

which is 0 exactly at a minimum (the Frank–Wolfe gap). `optimal_attention` returns it beside the weights.

The solver is a primal-dual interior-point method on all problems at once. With s the multipliers of α ≥ 0 and μ → 0, a
step dα solves (H + diag(s/α)) dα = μ/α − ∇f + λ and Σ dα = 0, with H the Hessian of f. A line search chooses the step
size so that the barrier function f − μ Σ log α decreases. A problem stops once its gap is small enough.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TOLERANCE = 1e-6  # nats
MAX_STEPS = 200
MAX_HALVINGS = 40
MAX_LOGITS = 2**23  # values of γ processed at a time


class Optimum(NamedTuple):
    """weights (…,l) on the simplex, and gap (…): an upper bound on how far their loss is above the minimum."""

    weights: Tensor
    gap: Tensor


def optimal_attention(gamma: Tensor, target: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Optimum:
    """Find α^opt of every problem, float64. Raises ArithmeticError if a gap stays above TOLERANCE.

    gamma   (…,l,o) the logits that each position alone gives
    target  (…) the index of the right word
    bias    (…,o) γ_s, logits that do not depend on the attention
    mask    (…,l) bool, True = a position of the problem; each problem needs at least one

    Leading axes broadcast: one sentence's gamma (1,l,o) serves all its targets (t,). If there are several optima, the
    result is one of them.
    """
    gamma, target = torch.as_tensor(gamma), torch.as_tensor(target)
    shape = _check_shapes(gamma, target, bias, mask)
    (length, words), count = gamma.shape[-2:], math.prod(shape)
    bias = gamma.new_zeros(words) if bias is None else bias
    mask = torch.ones(length, dtype=torch.bool, device=gamma.device) if mask is None else mask
    sides = (gamma, (length, words)), (target, ()), (bias, (words,)), (mask, (length,))
    whole = [side.detach().expand(*(shape or (1,)), *own) for side, own in sides]
    parts = []
    for some in torch.split(torch.arange(count, device=gamma.device), max(1, MAX_LOGITS // (length * words))):
        where = torch.unravel_index(some, shape or (1,))
        parts.append(_Problems.from_logits(*(side[where] for side in whole)).solve())
    weights, gap = (torch.cat(part) for part in zip(*parts, strict=True))
    if bad := int((gap > TOLERANCE).sum()):
        worst = f"the worst is {float(gap.max()):.1e}"
        raise ArithmeticError(f"{bad} of {count} gaps are above {TOLERANCE:g} after {MAX_STEPS} steps; {worst}")
    return Optimum(weights.reshape(*shape, length), gap.reshape(shape))


@dataclass(frozen=True)
class _Problems:
    """n problems: minimise f(α) = log Σ_o exp(α·d_o + c_o) over the weights of the unmasked positions."""

    d: Tensor  # (n,l,o)  γ_{l,o} − γ_{l,y}, 0 where masked
    c: Tensor  # (n,o)  γ_{s,o} − γ_{s,y}
    seen: Tensor  # (n,l)

    @classmethod
    def from_logits(cls, gamma: Tensor, target: Tensor, bias: Tensor, mask: Tensor) -> "_Problems":
        gamma, bias = gamma.double().masked_fill(~mask[..., None], 0.0), bias.double()
        if not bool(gamma.isfinite().all() & bias.isfinite().all()):
            raise ValueError("gamma or bias is not finite at an unmasked position")
        own = target.long()[:, None]
        right = gamma.gather(-1, own[:, None].expand(-1, gamma.shape[1], 1))  # (n,l,1)
        return cls(gamma - right, bias - bias.gather(-1, own), mask)

    def select(self, some: Tensor) -> "_Problems":
        return self if bool(some.all()) else _Problems(self.d[some], self.c[some], self.seen[some])

    def loss(self, alpha: Tensor) -> Tensor:
        return self._logits(alpha).logsumexp(-1)  # (n,)

    def slopes(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∂f/∂α (n,l), and the probabilities p (n,o) of its expectation."""
        p = self._logits(alpha).softmax(-1)
        return (self.d @ p[..., None])[..., 0], p

    def gap(self, alpha: Tensor, slopes: Tensor) -> Tensor:
        return (slopes * alpha).sum(-1) - slopes.masked_fill(~self.seen, torch.inf).amin(-1)  # (n,)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the best weights (n,l) and their gaps (n,)."""
        alpha = self.seen.double() / self.seen.sum(-1, keepdim=True)
        best, gaps = alpha.clone(), alpha.new_full((len(alpha),), torch.inf)
        left, problems = torch.arange(len(alpha), device=alpha.device), self
        mu, s = gaps.clone(), torch.ones_like(alpha)
        for _ in range(MAX_STEPS):
            slopes, p = problems.slopes(alpha)
            best[left], gaps[left] = alpha, problems.gap(alpha, slopes)
            going = gaps[left] > TOLERANCE / 2
            if not bool(going.any()):
                break
            problems = problems.select(going)
            left, alpha, mu, s, slopes, p = (x[going] for x in (left, alpha, mu, s, slopes, p))
            mu = torch.minimum(mu, 0.1 * gaps[left] / problems.seen.sum(-1))
            alpha, s = problems.step(alpha, s, mu, slopes, p)
        return self._drop_traces(best, gaps)

    def step(self, alpha: Tensor, s: Tensor, mu: Tensor, slopes: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step of the interior-point method. Returns the next α (n,l) and s (n,l)."""
        room = alpha.masked_fill(~self.seen, 1.0)
        centre = mu[:, None] / room
        s = s.clamp(1e-8 * centre, 1e8 * centre)
        moments = (self.d * p[:, None]) @ self.d.mT - slopes[:, :, None] * slopes[:, None, :]  # the Hessian (n,l,l)
        level = (slopes * alpha).sum(-1, keepdim=True)  # near λ; avoids cancellation between the two solutions below
        wanted = (centre - slopes + level).masked_fill(~self.seen, 0.0)
        freely, evenly = (
            torch.linalg.solve(moments + torch.diag_embed(s / room), torch.stack([wanted, self.seen.double()], -1))
            .masked_fill(~self.seen[..., None], 0.0)
            .unbind(-1)
        )  # (n,l) each
        change = freely - evenly * (freely.sum(-1) / evenly.sum(-1))[:, None]
        change_s = centre - s - s / room * change
        alpha = alpha + self._search_step(alpha, change, mu, slopes)[:, None] * change
        s = s + (0.99 * _distance_to_zero(s, change_s)).clamp_max(1.0)[:, None] * change_s
        return alpha / alpha.sum(-1, keepdim=True), s

    def _search_step(self, alpha: Tensor, change: Tensor, mu: Tensor, slopes: Tensor) -> Tensor:
        """Return the share of the change (n,) to take: halved until the barrier function decreases; α stays above 0."""

        def barrier(some: Tensor) -> Tensor:
            return self.loss(some) - mu * some.masked_fill(~self.seen, 1.0).log().sum(-1)

        now = barrier(alpha)
        fall = ((slopes - mu[:, None] / alpha.masked_fill(~self.seen, 1.0)) * change).sum(-1)
        noise = 1e-13 * (1.0 + now.abs())
        share = (0.99 * _distance_to_zero(alpha, change)).clamp_max(1.0)
        for _ in range(MAX_HALVINGS):
            enough = barrier(alpha + share[:, None] * change) <= now + 1e-4 * share * fall + noise
            if bool(enough.all()):
                break
            share = torch.where(enough, share, share / 2)
        return share

    def _drop_traces(self, alpha: Tensor, gaps: Tensor) -> tuple[Tensor, Tensor]:
        """Set the tiny weights that the barrier leaves to 0 if the gap stays small enough."""
        bare = alpha.masked_fill(alpha < 1e-6, 0.0)
        bare = bare / bare.sum(-1, keepdim=True)
        without = self.gap(bare, self.slopes(bare)[0])
        better = without <= gaps.clamp_min(TOLERANCE)
        return torch.where(better[:, None], bare, alpha), torch.where(better, without, gaps)

    def _logits(self, alpha: Tensor) -> Tensor:
        return (alpha[:, None] @ self.d)[:, 0] + self.c  # (n,o)


def _distance_to_zero(x: Tensor, change: Tensor) -> Tensor:
    """Return the share of the change (n,) at which the first x reaches 0."""
    return torch.where(change < 0, -x / change, torch.inf).amin(-1)


def _check_shapes(gamma: Tensor, target: Tensor, bias: Tensor | None, mask: Tensor | None) -> torch.Size:
    """Return the shape of the batch of problems. Raises if the arguments do not fit."""
    if gamma.dim() < 2 or 0 in gamma.shape[-2:]:
        raise ValueError(f"gamma must be (…, positions, words), at least 1 of each, got shape {tuple(gamma.shape)}")
    length, words = gamma.shape[-2:]
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"target must hold integer word indices, got {target.dtype}")
    if bias is not None and bias.shape[-1:] != (words,):
        raise ValueError(f"bias must be (…, {words}), one number for each word, got shape {tuple(bias.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape[-1:] != (length,)):
        raise ValueError(f"mask must be bool (…, {length}), True = a position, got {mask.dtype} {tuple(mask.shape)}")
    if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < words:
        raise ValueError(f"target must be between 0 and {words - 1}, got {target.min()} to {target.max()}")
    if mask is not None and not bool(mask.any(-1).all()):
        raise ValueError("every row of mask needs at least one True, but some row has none")
    given = [("gamma", gamma.shape[:-2]), ("target", target.shape)]
    given += [(name, x.shape[:-1]) for name, x in (("bias", bias), ("mask", mask)) if x is not None]
    try:
        return torch.Size(np.broadcast_shapes(*(shape for _, shape in given)))
    except ValueError:
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in given)
        raise ValueError(f"the leading axes do not broadcast: {shapes}") from None
