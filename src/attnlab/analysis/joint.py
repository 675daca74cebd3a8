"""Spearman's ρ of more pairs than fit into memory: from a table of counts, with a bound on its error.

Values are counted in increasing bins, a fixed number for each power of two. Values of one bin count as equal. With R
the true rank of x, R′ the mean rank of its bin and e = R − R′, and S, S′, d the same of y,

    cov(R, S) = cov(R′, S′) + cov(R′, d) + cov(e, S′) + cov(e, d)        var R = var R′ + var e

because the mean of e in each bin is 0. In a bin of m values var e ≤ (m² − 1)/12, so by Cauchy–Schwarz, bin by bin,

    |cov(R′, d)| ≤ Σ_s p_s sd(R′ | s) √((m_s² − 1)/12)        |cov(e, d)| ≤ sd(e) sd(d)

These bounds limit how far ρ can be from the table's value. Bins that hold a single value have e = 0.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MANTISSA, BIAS = 23, 127  # of a float32: 23 bits after the exponent, which has an offset of 127


@dataclass(frozen=True)
class Octaves:
    """Bins from 2^low to 2^high, 2^bits for each octave. Values outside count in the first or last bin."""

    low: int
    high: int
    bits: int

    @property
    def size(self) -> int:
        return (self.high - self.low) << self.bits

    def find_bins(self, x: Tensor) -> Tensor:
        """Return the bin of each x ≥ 0, int32. It uses that the leading bits of a float32 increase with x."""
        leading = x.float().contiguous().view(torch.int32) >> (MANTISSA - self.bits)
        return leading.sub_((self.low + BIAS) << self.bits).clamp_(0, self.size - 1)


WEIGHTS = Octaves(low=-23, high=1, bits=5)
NORMS = Octaves(low=-10, high=10, bits=7)


@dataclass(frozen=True)
class Correlation:
    """ρ of the binned values. The exact ρ differs from it by at most `bound`. nan = undefined."""

    spearman: float
    bound: float
    count: int


def correlation(counts: Tensor, single: Tensor | None = None) -> Correlation:
    """Compute Spearman's ρ of a table (x bins, y bins) of counts; `single` marks the bins of x with one value."""
    table = counts.cpu().numpy()
    rows, columns = table.sum(1), table.sum(0)
    table = table[rows > 0][:, columns > 0].astype(np.float64)
    kept = np.zeros(len(rows), dtype=bool) if single is None else single.cpu().numpy()
    kept, rows, columns = kept[rows > 0], rows[rows > 0].astype(np.float64), columns[columns > 0].astype(np.float64)
    total = rows.sum()
    if not total or (len(rows) == 1 and kept.all()):
        return Correlation(math.nan, math.nan, int(total))
    x, y = _ranks(rows), _ranks(columns)
    hidden_x, hidden_y = np.where(kept, 0.0, (rows**2 - 1) / 12), (columns**2 - 1) / 12  # the largest var e of each bin
    covariance, error = float(x @ table @ y) / total, _hidden_covariance(table, x, y, hidden_x, hidden_y)
    low = float(rows @ x**2) / total, float(columns @ y**2) / total
    high = low[0] + float(rows @ hidden_x) / total, low[1] + float(columns @ hidden_y) / total
    if low[0] * low[1] == 0.0:
        return Correlation(math.nan, math.nan, int(total))
    rho = covariance / math.sqrt(low[0] * low[1])
    ends = [
        min(1.0, max(-1.0, (covariance + sign * error) / math.sqrt(spread[0] * spread[1])))
        for sign in (-1, 1)
        for spread in (low, high)
    ]
    return Correlation(rho, max(abs(end - rho) for end in ends), int(total))


def _ranks(sizes: np.ndarray) -> np.ndarray:
    """Return the mean rank of each bin, minus the mean of all ranks."""
    ranks: np.ndarray = np.cumsum(sizes) - sizes / 2 - sizes.sum() / 2
    return ranks


def _hidden_covariance(table: np.ndarray, x: np.ndarray, y: np.ndarray, in_x: np.ndarray, in_y: np.ndarray) -> float:
    """Bound the covariance that ranks within bins add; in_x and in_y are the largest variances of each bin."""
    total = float(table.sum())

    def one_side(table: np.ndarray, ranks: np.ndarray, inside: np.ndarray) -> float:
        sizes = table.sum(0)
        spread = ranks**2 @ table / sizes - (ranks @ table / sizes) ** 2  # var(R′ | s)
        return float(sizes @ np.sqrt(np.maximum(spread, 0.0) * inside)) / total

    both = math.sqrt(float(table.sum(1) @ in_x) / total * float(table.sum(0) @ in_y) / total)
    return one_side(table, x, in_y) + one_side(table.T, y, in_x) + both
