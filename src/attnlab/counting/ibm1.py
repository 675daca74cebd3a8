"""IBM Model 1 (Brown et al. 1993), to convergence; optionally with a preference for the diagonal and a prior on θ.

Every word y_t of a target of T words is the translation of one of the L words of its source, or of NULL:

    p(y|x) = Π_t Σ_l δ(l|t) θ(y_t|x_l)          l = 1 … L, and NULL
    δ(NULL|t) = p0      δ(l|t) = (1 − p0) e^{λ h(l,t)} / Σ_l' e^{λ h(l',t)}      h(l,t) = −|t/T − l/L|

λ = 0 is Model 1 itself; the diagonal is that of Dyer et al. 2013. With p0 = "uniform" NULL is one word among the
others, δ = 1/(L+1), as in Brown et al.; with p0 = 0 there is none, and the first iteration from even θ gives Trans of
Snell et al. 2021 (eq. 17) exactly.

    E: expected links p(l|t) ∝ δ(l|t) θ(y_t|x_l)
    M: θ(o|i) = n_io / n_i      n_io = Σ p(l|t) over the links of i with o      λ = argmax Σ p(l|t) log δ(l|t)

This is maximum likelihood, under which a source word that occurs once is free to take links that other words explain.
A prior, θ_i ~ Dirichlet(a, …, a) over the O_i types that occur with i, says for a < 1 that a word has few translations.
By mean field (variational Bayes, as in Dyer et al.) q(θ_i) = Dirichlet(n_i + a), and what stands for θ in E, and is
kept, is its geometric mean: less than n_io / n_i where links are few, in rows that sum to ≤ 1.

    M: θ(o|i) = exp E_q[log θ(o|i)] = exp ψ(n_io + a) / exp ψ(n_i + a O_i)

Either way no iteration lowers one quantity, and its gain tells when to stop: the log-likelihood Σ log p(y|x), or with a
prior the lower bound Σ log p(y|x) − KL(q‖prior) of log ∫ p(y|x,θ) p(θ) dθ. There the first term alone may fall.

θ is held only for types that occur in a common pair. Memory: 4 bytes for each cell (a word of a source, or NULL, with a
word of its target) and about 50 for each two types that occur together, 60 with a prior.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import scipy.sparse as sparse
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from scipy.optimize import minimize_scalar
from scipy.special import digamma, gammaln

from attnlab.counting.cooccurrence import Cells, Ids, Pairs, WordPairs, alpha, beta, counts, trans

__all__ = ["Ibm1", "alpha", "beta", "counts", "fit", "trans"]

FORMAT = "attnlab-ibm1-1"
STEEPEST = 100.0  # the largest λ that is looked for
WEAKEST = 0.002  # the least prior: e^ψ(a) is about e^(−1/a), and with less it could vanish in float64
STRONGEST = 1e6  # the greatest: with more the bound is rounding

Null = float | Literal["uniform"]


@dataclass(frozen=True, eq=False)
class Ibm1:
    """A fitted model. Source words are ids 0 … I−1; row I of theta is NULL."""

    theta: sparse.csr_array  # θ(o|i), (I+1, O), float64; a row that occurred sums to 1, with a prior to ≤ 1
    null: Null  # p0
    diagonal: float  # λ
    log_likelihood: tuple[float, ...] = ()  # or the bound; nats a target word of the training pairs, by iteration
    converged: bool = False
    prior: float = 0.0  # a; where there is one, log_likelihood is from its second value on the bound

    def posterior(self, source: Ids, target: Ids) -> np.ndarray:
        """p(l|t) of one pair, (T, L+1), NULL last; even where no word of the source was ever seen with y_t."""
        words = np.append(np.asarray(source, dtype=np.int64), self.theta.shape[0] - 1)
        if (words[:-1] >= words[-1]).any():
            raise ValueError(f"the source has the id {words.max()}; the model has {words[-1]} types")
        prior = link_prior(len(words) - 1, len(target), self.null, self.diagonal).T
        return alpha(prior * beta(self.theta, words, target))

    def links(self, source: Ids, target: Ids) -> frozenset[tuple[int, int]]:
        """(source place, target place), from 0: the best word for each target word; none where that is NULL."""
        best = self.posterior(source, target).argmax(1)
        return frozenset((int(place), t) for t, place in enumerate(best) if place < len(source))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        path = Path(path)
        about = {"null": self.null, "diagonal": self.diagonal, "shape": list(self.theta.shape)}
        about |= {"log_likelihood": list(self.log_likelihood), "converged": self.converged, "prior": self.prior}
        named = {name: torch.from_numpy(np.array(getattr(self.theta, name))) for name in ("data", "indices", "indptr")}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(named, scratch, metadata={FORMAT: json.dumps(about)})
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "Ibm1":
        """Read what `save` wrote."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                parts = [file.get_tensor(name).numpy() for name in ("data", "indices", "indptr") if FORMAT in about]
        except FileNotFoundError:
            raise FileNotFoundError(f"no model at {path}") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from None
        if not parts:
            raise ValueError(f"{path} is a safetensors file but not a fitted IBM Model 1 ({FORMAT})")
        told = json.loads(about[FORMAT])
        theta = sparse.csr_array((parts[0], parts[1], parts[2]), shape=tuple(told.pop("shape")))
        return cls(theta, log_likelihood=tuple(told.pop("log_likelihood")), **told)


def fit(
    pairs: Pairs,
    *,
    null: Null = "uniform",
    diagonal: float = 0.0,
    learn_diagonal: bool = False,
    prior: float = 0.0,
    iterations: int = 100,
    tolerance: float = 1e-3,
    sizes: tuple[int, int] | None = None,
) -> Ibm1:
    """Expectation maximisation from even θ, until an iteration gains less than tolerance nats a target word.

    With a prior the gain is that of the bound. Even θ has none: its log-likelihood is kept, and not compared.

    pairs     (source ids, target ids); one with an empty side says nothing and is left out. For the other
              direction exchange the two
    null      p0, or "uniform"              diagonal   λ, where it starts if it is learnt
    prior     a, or 0 for maximum likelihood
    sizes     how many types there are, where not only those up to the largest id
    """
    _check(null, diagonal, prior, iterations, tolerance)
    corpus = _gathered(pairs)
    blocks = _Blocks(corpus, sizes, null)
    theta = np.full(blocks.pattern.nnz, 1.0 / blocks.pattern.shape[1])
    history: list[float] = []
    divergence, converged = 0.0, False
    for _ in range(iterations):
        expected = blocks.expect(theta, null, diagonal, drawn=learn_diagonal)
        history.append((expected.log_likelihood - divergence) / blocks.words)
        if converged := len(history) > 1 + bool(prior) and history[-1] - history[-2] < tolerance:
            break
        theta, divergence = best_theta(blocks.table(expected.links), prior)
        if learn_diagonal:
            diagonal = expected.best_diagonal(diagonal)
    return Ibm1(blocks.table(theta), null, diagonal, tuple(history), converged, prior)


def best_theta(links: sparse.csr_array, prior: float) -> tuple[np.ndarray, float]:
    """The M step: θ in the cells of a table of expected links, and KL(q‖prior), which is 0 where there is no prior.

    KL = Σ_i log Γ(n_i + a O_i)/Γ(a O_i) − Σ_io log Γ(n_io + a)/Γ(a) + Σ_io n_io log θ(o|i)
    """
    if not prior:
        return trans(links).data, 0.0
    types = np.diff(links.indptr)  # O_i
    total = links.sum(axis=1) + prior * types
    log_theta = digamma(links.data + prior)
    log_theta -= np.repeat(digamma(total), types)
    some = types > 0
    divergence = (gammaln(total[some]) - gammaln(prior * types[some])).sum() + links.data @ log_theta
    divergence -= (gammaln(links.data + prior) - gammaln(prior)).sum()
    return np.exp(log_theta), float(divergence)


def link_prior(length: int, words: int, null: Null, diagonal: float) -> np.ndarray:
    """δ(l|t) of a source of so many words and a target of so many, (L+1, T), NULL last."""
    if null == "uniform":
        null = 1.0 / (length + 1)
    near = np.exp(diagonal * nearness(length, words))  # (L,T)
    own = (1.0 - null) * near / np.maximum(near.sum(0), np.finfo(float).tiny)
    return np.concatenate([own, np.full((1, words), null)])


def nearness(length: int, words: int) -> np.ndarray:
    """h(l,t) = −|t/T − l/L|, (L,T)."""
    down, across = (np.arange(1, n + 1) / max(n, 1) for n in (length, words))
    return -np.abs(across[None] - down[:, None])


@dataclass
class _Expected:
    """What an E step found: Σ log p(y_t|x), the expected links of every cell, and where they lie."""

    log_likelihood: float
    links: np.ndarray
    drawn: dict[tuple[int, int], np.ndarray]  # for each shape (L,T): expected links of l with t, (L,T)

    def best_diagonal(self, before: float) -> float:
        """The λ under which these links are likeliest, unless it is no better than the one before."""

        def lost(slope: float) -> float:
            cost = 0.0
            for (length, words), links in self.drawn.items():
                log_prior = slope * nearness(length, words)
                log_prior -= np.log(np.exp(log_prior).sum(0))
                cost -= float((links * log_prior).sum())
            return cost

        found = float(minimize_scalar(lost, bounds=(0.0, STEEPEST), method="bounded", options={"xatol": 1e-3}).x)
        return found if lost(found) < lost(before) else before


class _Blocks:
    """The pairs by shape, and for every cell its place in the table of θ: (n, L+1, T), or (n, L, T) without NULL."""

    def __init__(self, corpus: WordPairs, sizes: tuple[int, int] | None, null: Null) -> None:
        self.pattern = _pattern(corpus, sizes, null)
        self.words = int(corpus.target_lengths.sum())
        cells, last = Cells(self.pattern), self.pattern.shape[0] - 1
        self.blocks = []
        for numbers, x, y in corpus.shapes():
            with_null = x if null == 0 else np.concatenate([x, np.full((len(numbers), 1), last)], axis=1)
            self.blocks.append(cells.of(with_null, y).astype(np.int32))

    def table(self, values: np.ndarray) -> sparse.csr_array:
        return sparse.csr_array((values, self.pattern.indices, self.pattern.indptr), shape=self.pattern.shape)

    def expect(self, theta: np.ndarray, null: Null, diagonal: float, *, drawn: bool) -> _Expected:
        """The E step; drawn: also keep where in its sentence each expected link lies."""
        found = _Expected(0.0, np.zeros_like(theta), {})
        for places in self.blocks:
            length, words = places.shape[1] - (null != 0), places.shape[2]
            joint = theta[places] * link_prior(length, words, null, diagonal)[: places.shape[1]]
            total = joint.sum(1, keepdims=True)  # (n,1,T)
            found.log_likelihood += float(np.log(total).sum())
            joint /= total
            np.add.at(found.links, places.ravel(), joint.ravel())
            if drawn:
                shape = (length, words)
                found.drawn[shape] = found.drawn.get(shape, 0.0) + joint[:, :length].sum(0)
        return found


def _pattern(corpus: WordPairs, sizes: tuple[int, int] | None, null: Null) -> sparse.csr_array:
    """Which types occur together, with NULL, which stands in every source, as the last row."""
    sizes = corpus.sizes if sizes is None else sizes
    if any(have > most for have, most in zip(corpus.sizes, sizes, strict=True)):
        raise ValueError(f"ids up to {corpus.sizes} do not fit {sizes=}")
    occurring = np.zeros((1, sizes[1]))
    if null != 0:
        occurring[0, corpus.target] = 1.0
    stacked = sparse.vstack([corpus.counts(sizes), sparse.csr_array(occurring)], format="csr")
    stacked.sort_indices()
    return stacked


def _gathered(pairs: Pairs) -> WordPairs:
    corpus = WordPairs.of(pairs)
    full = corpus.only((corpus.source_lengths > 0) & (corpus.target_lengths > 0))
    if not len(full):
        raise ValueError(f"none of the {len(corpus)} pairs has words on both sides: there is nothing to learn from")
    return full


def _check(null: Null, diagonal: float, prior: float, iterations: int, tolerance: float) -> None:
    if isinstance(null, str) and null != "uniform":
        raise ValueError(f'null is a probability or "uniform", not {null!r}')
    if not isinstance(null, str) and not 0.0 <= null < 1.0:
        raise ValueError(f"null, the probability of NULL, must be in [0, 1), not {null}")
    if not (math.isfinite(diagonal) and 0.0 <= diagonal <= STEEPEST):
        raise ValueError(f"diagonal must be a number from 0 to {STEEPEST:g}, not {diagonal}")
    if isinstance(prior, str) or (prior != 0 and not WEAKEST <= prior <= STRONGEST):
        most = f"{WEAKEST:g} to {STRONGEST:g}"
        raise ValueError(f"prior must be 0, for maximum likelihood, or a number from {most}, not {prior!r}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations}")
    if not tolerance >= 0.0:
        raise ValueError(f"tolerance must be a number from 0, not {tolerance}")
