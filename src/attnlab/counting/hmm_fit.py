"""Fit an aligner in both directions at once, so that they agree (Liang, Taskar & Klein 2006).

Each direction computes its own posterior of every link, γ→(l,t) and γ←(l,t). Both learn their lexicon from the product

    n_io = Σ γ→(l,t) γ←(l,t)        over the cells of i with o

so a link counts as far as both directions believe it. A rare word can then no longer collect words that others explain.
NULL, jumps and fertilities are counted from each direction's own posterior. With agree=False, n_io = Σ γ of the own
direction: expectation maximisation.

    stage       posterior of                                iterations of "hmm", "fertility"
    ibm1        IBM Model 1 with p0                         3, 3
    hmm         the hidden Markov model                     4, 2
    fertility   the same with fertilities                   0, 1

    θ(o|i) = (n_io + a)/(n_i + a O_i)      θ(o|NULL) ∝ n_o + 0.001      j(d) ∝ n_d + 50 j⁰(d)        j⁰: before training

Lexical values of the two directions are the real and imaginary parts of one complex array: both are read, and added to,
in one memory access. Memory: 8 bytes per word, and about 70 per pair of types that occur together while fitting.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from attnlab.counting.cooccurrence import WordPairs
from attnlab.counting.fertility import MOST, add_fertility, estimate_fertility, tabulate_weights
from attnlab.counting.hmm import WIDEST, Posterior, index_jumps, make_first_jumps, run_ibm1
from attnlab.counting.hmm_model import SMALLEST_COUNT, HmmModel, find_posterior, weigh_null
from attnlab.counting.padded_blocks import PADDING, BlockFile
from attnlab.counting.type_pairs import TypePairs

Kind = Literal["hmm", "fertility"]
Stage = Literal["ibm1", "hmm", "fertility"]
SCHEDULES: dict[str, dict[Stage, int]] = {
    "hmm": {"ibm1": 3, "hmm": 4},
    "fertility": {"ibm1": 3, "hmm": 2, "fertility": 1},
}


@dataclass(frozen=True, kw_only=True)
class HmmOptions:
    """Priors and the probability of NULL; the defaults suit 20,000 to 160,000 pairs of Europarl."""

    null: float = 0.1  # p0
    prior: float = 1e-4  # a
    null_prior: float = 1e-3
    jump_prior: float = 50.0
    fertility_prior: float = 5.0  # s
    agree: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.null < 1.0:
            raise ValueError(f"null, the probability of NULL, must be between 0 and 1, got {self.null}")
        for name in ("prior", "null_prior", "jump_prior", "fertility_prior"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")


@dataclass(eq=False)
class HmmFit:
    """The two fitted directions, and the log-likelihood of each before every iteration, in nats per target word."""

    ahead: HmmModel
    back: HmmModel
    log_likelihood: list[tuple[float, float]] = field(default_factory=list)
    too_long: int = 0  # number of pairs that were left out because they are too long


def fit_hmm(
    corpus: WordPairs,
    kind: Kind = "fertility",
    *,
    options: HmmOptions | None = None,
    schedule: dict[Stage, int] | None = None,
    sizes: tuple[int, int] | None = None,
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> HmmFit:
    """Fit both directions on sentence pairs. Raises ValueError if no pair has words on both sides.

    schedule   iterations of each stage; default: SCHEDULES[kind]
    tick       called with the number of finished and of all blocks
    """
    if kind not in SCHEDULES:
        raise ValueError(f"kind must be one of {', '.join(SCHEDULES)}, got {kind!r}")
    stages = [stage for stage, times in (schedule or SCHEDULES[kind]).items() for _ in range(times)]
    fitting = _Fitting(corpus, corpus.fit_sizes(sizes), options or HmmOptions(), with_fertility=kind == "fertility")
    history, words, passes = [], fitting.words, len(stages) * len(fitting.blocks)
    for number, stage in enumerate(stages):
        totals = fitting.expect(stage, number * len(fitting.blocks), lambda done: tick(done, passes))
        history.append((totals.log_likelihood[0] / words[0], totals.log_likelihood[1] / words[1]))
        fitting.maximise(totals, stage)
    ahead, back = fitting.extract_model(0), fitting.extract_model(1)
    return HmmFit(ahead, back, history, len(fitting.blocks.too_long))


@dataclass(eq=False)
class _Direction:
    """The parameters of one direction, except θ."""

    null_words: np.ndarray  # θ(o|NULL)
    rows: np.ndarray  # the source type of each pair of types
    types: np.ndarray  # O_i
    jumps: np.ndarray
    fertility: np.ndarray | None = None
    weights: np.ndarray | None = None
    totals: np.ndarray | None = None  # n_i + a O_i


class _Totals:
    """What an E step adds up, for the two directions."""

    def __init__(self, pairs: int, sizes: tuple[int, int]) -> None:
        self.links = np.zeros(pairs, dtype=np.complex64)
        self.null = [np.zeros(sizes[1]), np.zeros(sizes[0])]
        self.jumps = [np.zeros(2 * WIDEST + 1) for _ in sizes]
        self.fertility = [np.zeros((size, MOST + 1)) for size in sizes]
        self.log_likelihood = [0.0, 0.0]


class _Fitting:
    def __init__(self, corpus: WordPairs, sizes: tuple[int, int], options: HmmOptions, *, with_fertility: bool) -> None:
        self.options, self.sizes, self.with_fertility = options, sizes, with_fertility
        index = TypePairs(sizes[1])
        self.blocks = BlockFile(corpus, index.add, sizes[1])
        if not len(self.blocks):
            raise ValueError(f"1 or more pairs must have words on both sides, got 0 of {len(corpus):,} pairs")
        index.drop_slots()
        self.keys, self.pairs = index.keys, len(index)
        used = self.blocks.used
        self.words = int(corpus.target_lengths[used].sum()), int(corpus.source_lengths[used].sum())
        self.counts = np.zeros(0, dtype=np.complex64)
        self.theta = np.full(self.pairs, 1.0 / sizes[1] + 1j / sizes[0], dtype=np.complex64)
        self.theta[0] = 0.0
        rows = (self.keys // sizes[1]).astype(np.int32), (self.keys % sizes[1]).astype(np.int32)
        self.directions = [
            _Direction(
                null_words=np.full(sizes[1 - side], 1.0 / sizes[1 - side], dtype=np.float32),
                rows=np.where(self.keys < 0, 0, rows[side]),
                types=np.bincount(rows[side][1:], minlength=sizes[side]),
                jumps=make_first_jumps(),
            )
            for side in (0, 1)
        ]

    def expect(self, stage: Stage, done: int, tick: Callable[[int], None]) -> _Totals:
        """Compute the E step; report the number of blocks, counted from those `done` before."""
        totals = _Totals(self.pairs, self.sizes)
        for number, block in enumerate(self.blocks, start=done + 1):
            theta = self.theta.take(block.cells)  # (T,n,L+1)
            ahead = self._find_posterior(0, np.ascontiguousarray(theta.real), block.source, block.target, stage)
            back = self._find_posterior(1, _turn(theta.imag), block.target, block.source, stage)
            np.add.at(totals.links, block.cells.ravel(), self._join(ahead, back).ravel())
            self._add_own(totals, 0, ahead, block.source, block.target)
            self._add_own(totals, 1, back, block.target, block.source)
            tick(number)
        return totals

    def _find_posterior(
        self, side: int, emission: np.ndarray, source: np.ndarray, target: np.ndarray, stage: Stage
    ) -> Posterior:
        direction, p0 = self.directions[side], self.options.null
        null = weigh_null(direction.null_words, target, p0)
        if stage == "ibm1":
            return run_ibm1(emission, null, (source != PADDING).sum(1), p0)
        weights = direction.weights if stage == "fertility" else None
        return find_posterior(emission, null, direction.jumps, p0, weights, source)

    def _join(self, ahead: Posterior, back: Posterior) -> np.ndarray:
        """Return the links that each direction learns from, (T,n,L+1) complex."""
        links = np.zeros(ahead.links.shape, dtype=np.complex64)
        turned = back.links.transpose(2, 1, 0)[1:]  # (T,n,L)
        if self.options.agree:
            agreed = ahead.links[:, :, 1:] * turned
            links.real[:, :, 1:], links.imag[:, :, 1:] = agreed, agreed
        else:
            links.real[:, :, 1:], links.imag[:, :, 1:] = ahead.links[:, :, 1:], turned
        return links

    def _add_own(
        self, totals: _Totals, side: int, posterior: Posterior, source: np.ndarray, target: np.ndarray
    ) -> None:
        totals.log_likelihood[side] += posterior.log_likelihood
        inside = target != PADDING
        np.add.at(totals.null[side], target[inside], posterior.compute_null().T[inside].astype(np.float64))
        if posterior.moves is None:
            return
        jumps = index_jumps(len(posterior.moves)).ravel()
        totals.jumps[side] += np.bincount(jumps, posterior.moves.ravel(), minlength=2 * WIDEST + 1)
        if self.with_fertility:
            add_fertility(totals.fertility[side], posterior.links, source)

    def maximise(self, totals: _Totals, stage: Stage) -> None:
        options = self.options
        totals.links[0] = 0.0
        self.counts = totals.links
        for side, direction in enumerate(self.directions):
            counts = totals.links.real if side == 0 else totals.links.imag
            sums = np.bincount(direction.rows, counts, minlength=self.sizes[side])
            direction.totals = (sums + options.prior * direction.types).astype(np.float32)
            with np.errstate(divide="ignore"):
                theta = (counts + np.float32(options.prior)) * (1.0 / direction.totals)[direction.rows]
            theta[0] = 0.0
            if side == 0:
                self.theta.real = theta
            else:
                self.theta.imag = theta
            direction.null_words = _normalise(totals.null[side] + options.null_prior)
            if stage != "ibm1":
                direction.jumps = _normalise(totals.jumps[side] + options.jump_prior * make_first_jumps())
            if stage != "ibm1" and self.with_fertility:
                direction.fertility = estimate_fertility(totals.fertility[side], options.fertility_prior)
                direction.weights = tabulate_weights(direction.fertility)

    def extract_model(self, side: int) -> HmmModel:
        """Return one direction without the pairs of types that have almost no links."""
        direction, prior = self.directions[side], self.options.prior
        counts = self.counts.real if side == 0 else self.counts.imag
        kept = np.flatnonzero(counts >= SMALLEST_COUNT)
        rows, columns = self.keys[kept] // self.sizes[1], self.keys[kept] % self.sizes[1]
        keys = self.keys[kept] if side == 0 else columns * self.sizes[0] + rows
        assert direction.totals is not None
        totals = np.where(direction.types > 0, direction.totals, prior * self.sizes[1 - side]).astype(np.float32)
        fertility = direction.fertility
        if fertility is None:
            fertility = np.zeros((0, MOST + 1), dtype=np.float32)
        return HmmModel(
            keys=keys,
            counts=np.ascontiguousarray(counts[kept]),
            totals=totals,
            null_words=direction.null_words,
            jumps=direction.jumps,
            fertility=fertility,
            prior=prior,
            null=self.options.null,
        )


def _turn(emission: np.ndarray) -> np.ndarray:
    """Turn cells (T,n,L+1) into those of the other direction, (L,n,T+1)."""
    turned = np.zeros((emission.shape[2] - 1, emission.shape[1], emission.shape[0] + 1), dtype=np.float32)
    turned[:, :, 1:] = emission[:, :, 1:].transpose(2, 1, 0)
    return turned


def _normalise(counts: np.ndarray) -> np.ndarray:
    return (counts / counts.sum()).astype(np.float32)
