"""The hidden Markov model of word alignment (Vogel, Ney & Tillmann 1996), for many sentence pairs at once.

Every word y_t of a target is the translation of a word of its source or of NULL. a_t is the position of the last
source word that was linked, up to and including t; a_0 = 0 is the start of the sentence.

    p(y, a|x) = Π_t  p0 θ(y_t|NULL)                            y_t is linked to NULL and a_t = a_{t−1}
                     (1 − p0) θ(y_t|x_l) j(l − a_{t−1})        y_t is linked to l and a_t = l

The jump probabilities j(d) are shared by all sentences, |d| ≤ WIDEST; longer jumps share the outermost ones. Jumps that
leave the sentence are not excluded, so p sums to less than 1 over the targets (as in Östling & Tiedemann 2016).

The posterior p(y_t is linked to l | y, x) comes from the forward and backward recursions. The state is a_t alone, so
that a step of n sentences of one padded length is a matrix product (n, L+1) × (L+1, L+1).
"""

from dataclasses import dataclass

import numpy as np

WIDEST = 100
TINY = np.float32(1e-37)


@dataclass(frozen=True, eq=False)
class Posterior:
    """The result of an expectation step for n sentence pairs."""

    links: np.ndarray  # (T,n,L+1) p(y_t is linked to l); 0 at position 0, the start
    log_likelihood: float  # Σ log p(y|x)
    moves: np.ndarray | None = None  # (L+1,L+1) expected number of jumps from position to position

    def compute_null(self) -> np.ndarray:
        """Return the posterior of NULL, (T,n); at padding it has no meaning."""
        return np.clip(1.0 - self.links.sum(2), 0.0, 1.0)


def make_first_jumps() -> np.ndarray:
    """Return j before training: nine tenths fall off exponentially from the next word, one tenth is uniform."""
    near = np.exp(-np.abs(np.arange(-WIDEST, WIDEST + 1) - 1) / 2.0)
    return (0.9 * near / near.sum() + 0.1 / len(near)).astype(np.float32)


def index_jumps(positions: int) -> np.ndarray:
    """Return the index in j of the jump from each position to each other one, (positions, positions)."""
    places = np.arange(positions)
    return np.clip(places[None] - places[:, None], -WIDEST, WIDEST) + WIDEST


def build_moves(jumps: np.ndarray, positions: int, null: float) -> np.ndarray:
    """Return (1 − p0) j(l − l') from l' to l, (positions, positions). No word is emitted at position 0, the start."""
    return jumps[index_jumps(positions)] * np.float32(1.0 - null)


def run_chain(emission: np.ndarray, null: np.ndarray, moves: np.ndarray) -> Posterior:
    """Run the forward and backward recursions.

    emission   (T,n,L+1) θ(y_t|x_l); 0 at the start and at padding
    null       (T,n) p0 θ(y_t|NULL); 1 at padding, which therefore changes nothing
    moves      (L+1,L+1) of `build_moves`
    """
    steps, n, positions = emission.shape
    state = np.empty((steps + 1, n, positions), dtype=np.float32)  # p(a_t | y_1 … y_t)
    state[0], state[0, :, 0] = 0.0, 1.0
    links = np.empty_like(emission)
    scale = np.empty((steps, n, 1), dtype=np.float32)
    for t in range(steps):
        linked, after = links[t], state[t + 1]
        np.matmul(state[t], moves, out=linked)
        linked *= emission[t]
        np.multiply(state[t], null[t][:, None], out=after)
        after += linked
        scale[t] = 1.0 / (after.sum(1, keepdims=True) + TINY)
        after *= scale[t]
        linked *= scale[t]
    future, backwards = np.ones((n, positions), dtype=np.float32), np.ascontiguousarray(moves.T)
    arrivals = np.empty_like(emission)
    for t in range(steps - 1, -1, -1):
        links[t] *= future
        arrival = arrivals[t]
        np.multiply(emission[t], future, out=arrival)
        arrival *= scale[t]
        future = future * (null[t][:, None] * scale[t])
        future += arrival @ backwards
    expected = (state[:steps].reshape(-1, positions).T @ arrivals.reshape(-1, positions)) * moves
    return Posterior(links, float(-np.log(scale, dtype=np.float64).sum()), expected)


def run_ibm1(emission: np.ndarray, null: np.ndarray, source_lengths: np.ndarray, probability: float) -> Posterior:
    """Compute the posterior of IBM Model 1: every word of the source is equally likely, (1 − p0)/L."""
    links = emission * ((1.0 - probability) / source_lengths[None, :, None]).astype(np.float32)
    total = links.sum(2) + null + TINY
    links /= total[:, :, None]
    return Posterior(links, float(np.log(total, dtype=np.float64).sum()))
