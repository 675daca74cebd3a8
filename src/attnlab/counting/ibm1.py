"""IBM Model 1 (Brown et al. 1993), to convergence; optionally with a preference for the diagonal and a prior on θ.

Every word y_t of a target of T words is the translation of one of the L words of its source, or of NULL:

    p(y|x) = Π_t Σ_l δ(l|t) θ(y_t|x_l)          l = 1 … L, and NULL
    δ(NULL|t) = p0      δ(l|t) = (1 − p0) e^{λ h(l,t)} / Σ_l' e^{λ h(l',t)}      h(l,t) = −|t/T − l/L|

λ = 0 is Model 1 itself; the diagonal is that of Dyer et al. 2013. With p0 = "uniform" NULL is one more word of the
source, δ = 1/(L+1), as in Brown et al. With p0 = 0 there is no NULL, and the first iteration from uniform θ gives Trans
of Snell et al. 2021 (eq. 17) exactly.

    E: expected links p(l|t) ∝ δ(l|t) θ(y_t|x_l)
    M: θ(o|i) = n_io / n_i      n_io = Σ p(l|t) over the links of i with o      λ = argmax Σ p(l|t) log δ(l|t)

This is maximum likelihood. Under it, a source word that occurs once can take links that other words explain. A prior
θ_i ~ Dirichlet(a, …, a) over the O_i types that occur with i expresses, for a < 1, that a word has few translations. By
mean field (variational Bayes, as in Dyer et al.) q(θ_i) = Dirichlet(n_i + a). Its geometric mean replaces θ in E and is
stored: it is smaller than n_io / n_i where links are few, and its rows sum to ≤ 1.

    M: θ(o|i) = exp E_q[log θ(o|i)] = exp ψ(n_io + a) / exp ψ(n_i + a O_i)

No iteration lowers the log-likelihood Σ log p(y|x) or, with a prior, the lower bound Σ log p(y|x) − KL(q‖prior) of
log ∫ p(y|x,θ) p(θ) dθ. Its gain decides when to stop. With a prior, the first term alone may decrease.

θ is stored only for types that occur together in a pair. Memory: 4 bytes a word, and about 45 for each pair of types
that occur together, more with a prior. A temporary file has 4 bytes for each cell (a word of a source, or NULL, with a
word of its target).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import scipy.sparse as sparse
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from scipy.optimize import minimize_scalar
from scipy.special import digamma, gammaln

from attnlab.counting.cooccurrence import Cells, Ids, Pairs, WordPairs, alpha, beta, count_cooccurrences, trans
from attnlab.files import write_bytes
from attnlab.files.array_file import ArrayFile
from attnlab.files.user_files import parse_json

__all__ = ["Ibm1", "alpha", "beta", "count_cooccurrences", "fit_ibm1", "trans"]

FORMAT = "attnlab-ibm1-1"
STEEPEST = 100.0  # the largest λ
WEAKEST = 0.002  # the smallest prior: e^ψ(a) is about e^(−1/a), and below this it could underflow in float64
STRONGEST = 1e6  # the largest prior: above it, rounding dominates the bound

Null = float | Literal["uniform"]


@dataclass(frozen=True, eq=False)
class Ibm1:
    """A fitted model. Source words are ids 0 … I−1; row I of theta is NULL."""

    theta: sparse.csr_array  # θ(o|i), (I+1, O), float64; the row of a seen word sums to 1, with a prior to ≤ 1
    null: Null  # p0
    diagonal: float  # λ
    log_likelihood: tuple[float, ...] = ()  # or the bound, by iteration; nats per target word of the training pairs
    converged: bool = False
    prior: float = 0.0  # a; if it is not 0, log_likelihood holds the bound from its second value on

    def posterior(self, source: Ids, target: Ids) -> np.ndarray:
        """Return p(l|t) of one pair, (T, L+1), NULL last; uniform if no word of the source was seen with y_t."""
        words = np.append(np.asarray(source, dtype=np.int64), self.theta.shape[0] - 1)
        if (words[:-1] >= words[-1]).any():
            raise ValueError(f"source ids must be below {words[-1]}, the model's number of types, got {words.max()}")
        prior = link_prior(len(words) - 1, len(target), self.null, self.diagonal).T
        return alpha(prior * beta(self.theta, words, target))

    def links(self, source: Ids, target: Ids) -> frozenset[tuple[int, int]]:
        """Return (source position, target position), from 0: the best word of each target word, except NULL."""
        best = self.posterior(source, target).argmax(1)
        return frozenset((int(position), t) for t, position in enumerate(best) if position < len(source))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically."""
        about = {"null": self.null, "diagonal": self.diagonal, "shape": list(self.theta.shape)}
        about |= {"log_likelihood": list(self.log_likelihood), "converged": self.converged, "prior": self.prior}
        named = {name: torch.from_numpy(np.array(getattr(self.theta, name))) for name in ("data", "indices", "indptr")}
        write_bytes(Path(path), save(named, metadata={FORMAT: json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path) -> "Ibm1":
        """Read a file of `save`. Raises FileNotFoundError or, for another or damaged file, ValueError."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                parts = [file.get_tensor(name).numpy() for name in ("data", "indices", "indptr") if FORMAT in about]
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} does not exist") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a safetensors file or is damaged: {error}") from None
        if not parts:
            raise ValueError(f"{path} is a safetensors file, but not a fitted IBM Model 1 ({FORMAT})")
        values = parse_json(about[FORMAT], f"the metadata of {path}")
        try:
            theta = sparse.csr_array((parts[0], parts[1], parts[2]), shape=tuple(values.pop("shape")))
            theta.check_format()
            return cls(theta, log_likelihood=tuple(values.pop("log_likelihood")), **values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged IBM Model 1 ({error}); delete it to fit it again") from None


def fit_ibm1(
    pairs: Pairs | WordPairs,
    *,
    null: Null = "uniform",
    diagonal: float = 0.0,
    learn_diagonal: bool = False,
    prior: float = 0.0,
    iterations: int = 100,
    tolerance: float = 1e-3,
    sizes: tuple[int, int] | None = None,
) -> Ibm1:
    """Fit by expectation maximisation from uniform θ, until an iteration gains less than `tolerance`.

    The gain is in nats per target word, of the log-likelihood or, with a prior, of the bound. Uniform θ has no bound:
    its log-likelihood is stored but not compared.

    pairs            (source ids, target ids); pairs with an empty side are left out. Swap the two sides for the other
                     direction
    null             p0, or "uniform"
    diagonal         λ; its first value if learn_diagonal=True
    prior            a, or 0 for maximum likelihood
    sizes            numbers of source and target types; default: up to the largest id

    Raises ValueError for values out of range and if no pair has words on both sides.
    """
    _check(null, diagonal, prior, iterations, tolerance)
    blocks = _Blocks(WordPairs.gather_full(pairs, minimum=1), sizes, null)
    theta = np.full(blocks.pattern.nnz, 1.0 / blocks.pattern.shape[1])
    history: list[float] = []
    divergence, converged = 0.0, False
    for _ in range(iterations):
        expected = blocks.expect(theta, null, diagonal, by_position=learn_diagonal)
        history.append((expected.log_likelihood - divergence) / blocks.words)
        if converged := len(history) > 1 + bool(prior) and history[-1] - history[-2] < tolerance:
            break
        theta, divergence = maximise_theta(blocks.table(expected.links), prior)
        if learn_diagonal:
            diagonal = expected.best_diagonal(diagonal)
    return Ibm1(blocks.table(theta), null, diagonal, tuple(history), converged, prior)


def maximise_theta(links: sparse.csr_array, prior: float) -> tuple[np.ndarray, float]:
    """Compute the M step: θ in the cells of a table of expected links, and KL(q‖prior), 0 without a prior.

    KL = Σ_i log Γ(n_i + a O_i)/Γ(a O_i) − Σ_io log Γ(n_io + a)/Γ(a) + Σ_io n_io log θ(o|i)
    """
    if not prior:
        return trans(links).data, 0.0
    types = np.diff(links.indptr)  # O_i
    total = links.sum(axis=1) + prior * types
    log_theta = digamma(links.data + prior)
    log_theta -= np.repeat(digamma(total), types)
    used = types > 0
    divergence = (gammaln(total[used]) - gammaln(prior * types[used])).sum() + links.data @ log_theta
    divergence -= (gammaln(links.data + prior) - gammaln(prior)).sum()
    return np.exp(log_theta), float(divergence)


def link_prior(length: int, words: int, null: Null, diagonal: float) -> np.ndarray:
    """Return δ(l|t) of a source of L = `length` and a target of T = `words` words, (L+1, T), NULL last."""
    if null == "uniform":
        null = 1.0 / (length + 1)
    near = np.exp(diagonal * nearness(length, words))  # (L,T)
    own = (1.0 - null) * near / np.maximum(near.sum(0), np.finfo(float).tiny)
    return np.concatenate([own, np.full((1, words), null)])


def nearness(length: int, words: int) -> np.ndarray:
    """Return h(l,t) = −|t/T − l/L|, (L,T)."""
    down, across = (np.arange(1, n + 1) / max(n, 1) for n in (length, words))
    return -np.abs(across[None] - down[:, None])


@dataclass
class _Expectation:
    """The result of an E step: Σ log p(y_t|x) and the expected links, by cell and by position."""

    log_likelihood: float
    links: np.ndarray
    by_position: dict[tuple[int, int], np.ndarray]  # for each shape (L,T): expected links of l with t, (L,T)

    def best_diagonal(self, before: float) -> float:
        """Return the λ that maximises the likelihood of these links, or the one before if that is no worse."""

        def cost_of(slope: float) -> float:
            cost = 0.0
            for (length, words), links in self.by_position.items():
                log_prior = slope * nearness(length, words)
                log_prior -= np.log(np.exp(log_prior).sum(0))
                cost -= float((links * log_prior).sum())
            return cost

        best = float(minimize_scalar(cost_of, bounds=(0.0, STEEPEST), method="bounded", options={"xatol": 1e-3}).x)
        return best if cost_of(best) < cost_of(before) else before


class _Blocks:
    """The pairs by shape, as indices of their cells in the table of θ: (n, L+1, T), or (n, L, T) without NULL.

    A temporary file holds them.
    """

    def __init__(self, corpus: WordPairs, sizes: tuple[int, int] | None, null: Null) -> None:
        self.pattern = _build_pattern(corpus, sizes, null)
        self.words = int(corpus.target_lengths.sum())
        self._file = ArrayFile()
        self._shapes: list[tuple[int, ...]] = []
        cells, last = Cells(self.pattern), self.pattern.shape[0] - 1
        for numbers, x, y in corpus.iterate_shapes():
            with_null = x if null == 0 else np.concatenate([x, np.full((len(numbers), 1), last)], axis=1)
            block = cells.locate(with_null, y).astype(np.int32)
            self._shapes.append(block.shape)
            self._file.write(block)

    def iterate_cells(self) -> Iterator[np.ndarray]:
        self._file.seek(0)
        for shape in self._shapes:
            yield self._file.read(np.int32, *shape)

    def table(self, values: np.ndarray) -> sparse.csr_array:
        return sparse.csr_array((values, self.pattern.indices, self.pattern.indptr), shape=self.pattern.shape)

    def expect(self, theta: np.ndarray, null: Null, diagonal: float, *, by_position: bool) -> _Expectation:
        """Compute the E step; by_position: also sum the expected links by their positions in the sentences."""
        result = _Expectation(0.0, np.zeros_like(theta), {})
        for cells in self.iterate_cells():
            length, words = cells.shape[1] - (null != 0), cells.shape[2]
            joint = theta[cells] * link_prior(length, words, null, diagonal)[: cells.shape[1]]
            total = joint.sum(1, keepdims=True)  # (n,1,T)
            result.log_likelihood += float(np.log(total).sum())
            joint /= total
            np.add.at(result.links, cells.ravel(), joint.ravel())
            if by_position:
                shape = (length, words)
                result.by_position[shape] = result.by_position.get(shape, 0.0) + joint[:, :length].sum(0)
        return result


def _build_pattern(corpus: WordPairs, sizes: tuple[int, int] | None, null: Null) -> sparse.csr_array:
    """Return a table of the types that occur together. The last row is NULL, a word of every source."""
    sizes = corpus.fit_sizes(sizes)
    table = corpus.count_cells(sizes)
    occurring = np.unique(corpus.target) if null != 0 else np.zeros(0, dtype=np.int64)
    indices = np.concatenate([table.indices, occurring.astype(table.indices.dtype)])
    indptr = np.append(table.indptr, len(indices)).astype(table.indptr.dtype)
    return sparse.csr_array((np.ones(len(indices), dtype=bool), indices, indptr), shape=(sizes[0] + 1, sizes[1]))


def _check(null: Null, diagonal: float, prior: float, iterations: int, tolerance: float) -> None:
    if isinstance(null, str) and null != "uniform":
        raise ValueError(f'null must be a probability or "uniform", got {null!r}')
    if not isinstance(null, str) and not 0.0 <= null < 1.0:
        raise ValueError(f"null, the probability of NULL, must be in [0, 1), got {null}")
    if not (math.isfinite(diagonal) and 0.0 <= diagonal <= STEEPEST):
        raise ValueError(f"diagonal must be from 0 to {STEEPEST:g}, got {diagonal}")
    if isinstance(prior, str) or (prior != 0 and not WEAKEST <= prior <= STRONGEST):
        raise ValueError(f"prior must be 0, or from {WEAKEST:g} to {STRONGEST:g}, got {prior!r}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if not tolerance >= 0.0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
