"""Agreement of two scores of the same positions: do they single out the same one? (Snell et al. 2021, §3.1)

For u, v ∈ ℝ^L, such as attention weights and a lexical probe of one output word,

    A(u, v) = 1[ |{j : v_j > v_{argmax u}}| < top · L ]                     eq. 10, top = 5 %
    Â       = E ⌈top · L⌉ / L                                               u and v unrelated, v without ties
    τ_b     = Σ_{i<j} sgn(u_i − u_j) sgn(v_i − v_j) / √(n_u n_v)            n_x: pairs i < j that differ in x
    ξ(u, v) = p̂(inf {τ : A(α, α̂(τ)) > A(u, v)})                            eq. 11

The comparison in A is strict, so ties agree. argmax is the first maximum. A is not symmetric: u chooses the position,
v judges it. L counts the unmasked positions of a row; values at masked positions are never read.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

PAIRS_AT_ONCE = 2**24  # pairs of positions that kendall compares in one step


def agreement(u: Tensor, v: Tensor, top: float = 0.05, mask: Tensor | None = None) -> Tensor:
    """Compute A(u, v) for every row, bool (…). A row without positions gives False.

    u, v   (…,l), broadcastable to each other
    mask   (…,l) bool, True = a position of the row; default: every position
    """
    share = _share(top)
    u, v, seen = _rows(u, v, mask)
    chosen = u.masked_fill(~seen, -torch.inf)
    first = (seen & (chosen == chosen.amax(-1, keepdim=True))).int().argmax(-1, keepdim=True)  # (…,1)
    above = (seen & (v > v.gather(-1, first))).sum(-1)
    return above * share.denominator < share.numerator * seen.sum(-1)


def kendall(u: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute Kendall's τ_b for every row, float64 (…). NaN if u or v is constant or has fewer than 2 positions.

    Each row takes L² comparisons, at most PAIRS_AT_ONCE at a time.
    """
    u, v, seen = _rows(u, v, mask)
    shape, length = u.shape[:-1], u.shape[-1]
    rows = max(1, PAIRS_AT_ONCE // length**2)
    parts = zip(*(torch.split(x.reshape(-1, length), rows) for x in (u, v, seen)), strict=True)
    return torch.cat([_tau(*part) for part in parts]).reshape(shape)


def random_baseline(lengths: Tensor | Sequence[int], top: float = 0.05) -> Tensor:
    """Compute Â: the mean of ⌈top·L⌉ / L over rows of these lengths, the agreement expected by chance."""
    share, lengths = _share(top), torch.as_tensor(lengths)
    if lengths.is_floating_point() or not lengths.numel() or bool((lengths < 1).any()):
        raise ValueError("lengths must be a non-empty list of integers, each at least 1")
    places = (share.numerator * lengths.long() + share.denominator - 1) // share.denominator
    return (places.double() / lengths).mean()


def shuffled_baseline(
    u: Tensor, v: Tensor, top: float = 0.05, mask: Tensor | None = None, *, seed: int = 0, repeats: int = 1
) -> Tensor:
    """Estimate Â as the authors do: the mean of A(u, v′) over rows and repeats, with each row of v shuffled to v′."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    u, v, seen = _rows(u, v, mask)
    if not bool(seen.any()):
        raise ValueError("the mask hides every position, so there is nothing to shuffle")
    kept = seen.any(-1)
    draws = [agreement(u, shuffle_rows(v, seen, seed=seed + k), top, seen)[kept] for k in range(repeats)]
    return torch.stack(draws).double().mean()


def shuffle_rows(v: Tensor, mask: Tensor | None = None, *, seed: int = 0) -> Tensor:
    """Shuffle the values of each row of v. Masked positions stay in place. The order is the same on every device."""
    mask = torch.ones_like(v, dtype=torch.bool) if mask is None else mask.expand(v.shape)
    draw = torch.rand(v.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(v.device)
    place = torch.arange(v.shape[-1], device=v.device).expand(v.shape)
    taken = torch.where(mask, draw, 2.0).argsort(stable=True)  # unmasked positions first, in random order
    placed = torch.where(mask, 0, 1).argsort(stable=True)  # unmasked positions first, in their original order
    return v.gather(-1, place.scatter(-1, placed, taken))


def contextualise_agreement(
    curve: Tensor | Sequence[float], performance: Tensor | Sequence[float], value: float
) -> float | None:
    """Compute ξ: the performance p̂(τ) at the first τ where the curve A(α, α̂(τ)) exceeds the value, or None.

    curve, performance   (τ,), at the same checkpoints in the order of training
    """
    reached, performances = (torch.as_tensor(x, dtype=torch.float64) for x in (curve, performance))
    if reached.dim() != 1 or reached.shape != performances.shape:
        shapes = f"{tuple(reached.shape)} and {tuple(performances.shape)}"
        raise ValueError(f"curve and performance must have one value for each checkpoint, got shapes {shapes}")
    if bool(reached.isnan().any() | performances.isnan().any()) or math.isnan(value):
        raise ValueError("curve, performance or value contains NaN; leave out checkpoints without a measurement")
    exceeding = (reached > value).nonzero()
    return float(performances[exceeding[0, 0]]) if len(exceeding) else None


def _tau(u: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Compute τ_b of rows (r,l), float64. The sums run over ordered pairs: each i < j counts twice, which cancels."""
    both, in_u, in_v = (torch.zeros(len(u), dtype=torch.int64, device=u.device) for _ in range(3))
    block = max(1, PAIRS_AT_ONCE // max(1, u.numel()))
    for start in range(0, u.shape[-1], block):
        some = slice(start, start + block)
        pair = seen[:, some, None] & seen[:, None, :]  # (r, block, l)
        signs_u, signs_v = (_signs(x[:, some, None], x[:, None, :]).masked_fill(~pair, 0) for x in (u, v))
        both += (signs_u * signs_v).sum((1, 2))
        in_u += signs_u.abs().sum((1, 2))
        in_v += signs_v.abs().sum((1, 2))
    return both / (in_u.double() * in_v).sqrt()  # 0/0 is NaN: a constant row


def _signs(x: Tensor, y: Tensor) -> Tensor:
    """Return sgn(x − y) as int8. Equal infinities give 0."""
    return (x > y).to(torch.int8) - (x < y).to(torch.int8)


def _rows(u: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Expand u, v and the mask to one shape, with 0 where masked. Raises on shapes that do not fit and on NaN."""
    u, v = torch.as_tensor(u), torch.as_tensor(v)
    if u.dim() == 0 or v.dim() == 0:
        raise ValueError("u and v must have an axis of positions; at least one of them is a scalar")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool (True = a position of the row), got {mask.dtype}")
    seen = torch.ones((), dtype=torch.bool, device=u.device) if mask is None else mask
    shapes = [tuple(x.shape) for x in (u, v, seen)]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"u {shapes[0]}, v {shapes[1]} and mask {shapes[2]} do not broadcast") from None
    if u.shape[-1] != v.shape[-1] or u.shape[-1] == 0 or shape[-1] != u.shape[-1]:
        given = f"u {shapes[0]}, v {shapes[1]} and mask {shapes[2]}"
        raise ValueError(f"{given} must have the same number of positions, at least 1")
    seen = seen.expand(shape)
    u, v = ((x if x.is_floating_point() else x.double()).detach().expand(shape).masked_fill(~seen, 0) for x in (u, v))
    for name, x in (("u", u), ("v", v)):
        if bool(x.isnan().any()):
            raise ValueError(f"{name} is NaN at an unmasked position")
    return u, v, seen


def _share(top: float) -> Fraction:
    """Return top as a fraction (0.05 as 1/20), so that ⌈top·L⌉ is exact."""
    if not 1e-6 <= top <= 1.0:
        raise ValueError(f"top must be a share of the positions between 1e-6 and 1, got {top}")
    return Fraction(top).limit_denominator(10**6)
