"""Fertility: how many target words a source word is linked to.

    p(y, a|x) = Π_l F(φ_l|x_l) · the hidden Markov model        φ_l = number of target words linked to l
    F_i ~ Dirichlet(s F̄)                                         F̄: the mean over all source words, s = `strength`

(The model of Östling & Tiedemann 2016 without their sampler.) φ_l depends on all links at once, so that the recursions
do not apply. Given expected links γ, one more link of t to l changes the number of the others, μ = Σ_{t'≠t} γ(l,t'), to
μ + 1. With F interpolated linearly between whole numbers, that multiplies the probability of the link by

    w(l,t) = F(μ + 1|x_l) / F(μ|x_l)

The chain runs without w for a first γ, then with w. In the M step F̂(k|i) counts how often φ is k, where an expected
number between k and k + 1 counts for both in proportion.
"""

import numpy as np

from attnlab.counting.padded_blocks import PADDING

MOST = 8  # the largest fertility; more counts as MOST
PARTS = 4  # w is tabulated at μ = 0, 1/PARTS, … MOST − 1
COLUMNS = PARTS * (MOST - 1) + 1


def estimate_fertility(counts: np.ndarray, strength: float) -> np.ndarray:
    """Return F from the expected numbers of source words with each fertility, (types, MOST+1) both."""
    mean = (counts.sum(0) + 1e-6) / (counts.sum() + 1e-6 * (MOST + 1))
    return ((counts + strength * mean) / (counts.sum(1, keepdims=True) + strength)).astype(np.float32)


def tabulate_weights(fertility: np.ndarray) -> np.ndarray:
    """Return w of each type at each tabulated μ, (types, COLUMNS)."""
    grid = np.arange(COLUMNS) / PARTS
    return np.ascontiguousarray(_interpolate(fertility, grid + 1) / _interpolate(fertility, grid))


def weigh_links(weights: np.ndarray, links: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return w(l,t) from expected links (T,n,L+1) and the types of the source (n,L), (T,n,L+1)."""
    places = links.sum(0)[None] - links
    places *= np.float32(PARTS)
    places += np.float32(0.5)
    indices = np.clip(places, 0, COLUMNS - 1).astype(np.int32)
    indices[:, :, 1:] += np.where(source == PADDING, 0, source) * COLUMNS
    return weights.ravel().take(indices)


def add_fertility(counts: np.ndarray, links: np.ndarray, source: np.ndarray) -> None:
    """Add to counts (types, MOST+1) how many words of each type are expected to have each fertility."""
    inside = source != PADDING
    expected = np.minimum(links.sum(0)[:, 1:][inside].astype(np.float64), MOST)
    below = np.minimum(np.floor(expected).astype(np.int64), MOST - 1)
    share, types = expected - below, source[inside]
    np.add.at(counts, (types, below), 1.0 - share)
    np.add.at(counts, (types, below + 1), share)


def _interpolate(fertility: np.ndarray, at: np.ndarray) -> np.ndarray:
    below = np.minimum(np.floor(at).astype(np.int64), MOST - 1)
    share = (at - below).astype(np.float32)
    return fertility[:, below] * (1 - share) + fertility[:, below + 1] * share
