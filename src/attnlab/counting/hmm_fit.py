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

Directions that agree share one table of n_io, and θ is computed from it cell by cell. Memory, for each pair of types
that occur together: up to 28 bytes while they are numbered, then 16 (a key, n_io, and n_io of the next iteration).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from attnlab.counting.cooccurrence import WordPairs
from attnlab.counting.fertility import MOST, add_fertility, estimate_fertility, tabulate_weights
from attnlab.counting.hmm import WIDEST, Posterior, index_jumps, make_first_jumps, run_ibm1
from attnlab.counting.hmm_model import SMALLEST_COUNT, HmmModel, find_posterior, weigh_null
from attnlab.counting.padded_blocks import PADDING, BlockFile, PaddedBlock
from attnlab.counting.type_pairs import PROBED, TypePairs

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
    del corpus  # its words are in the blocks
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
    types: np.ndarray  # O_i
    jumps: np.ndarray
    fertility: np.ndarray | None = None
    weights: np.ndarray | None = None
    totals: np.ndarray | None = None  # n_i + a O_i
    scale: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.float32))  # 1/totals, and 0 for PADDING


class _Totals:
    """What an E step adds up, for the two directions."""

    def __init__(self, pairs: int, sizes: tuple[int, int], tables: int) -> None:
        self.links = [np.zeros(pairs, dtype=np.float32) for _ in range(tables)]  # n_io
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
        self.keys = index.keys
        used = self.blocks.used
        self.words = int(corpus.target_lengths[used].sum()), int(corpus.source_lengths[used].sum())
        self.counts: list[np.ndarray] = []  # n_io of each direction; one table if they agree; −a in place of number 0
        types = self._sum_by_type([np.ones(len(self.keys), dtype=np.float32)])
        self.directions = [
            _Direction(
                null_words=np.full(sizes[1 - side], 1.0 / sizes[1 - side], dtype=np.float32),
                types=types[side],
                jumps=make_first_jumps(),
            )
            for side in (0, 1)
        ]

    def expect(self, stage: Stage, done: int, tick: Callable[[int], None]) -> _Totals:
        """Compute the E step; report the number of blocks, counted from those `done` before."""
        totals = _Totals(len(self.keys), self.sizes, tables=1 if self.options.agree else 2)
        for number, block in enumerate(self.blocks, start=done + 1):
            emissions = self._emit(block)
            ahead = self._find_posterior(0, emissions[0], block.source, block.target, stage)
            back = self._find_posterior(1, emissions[1], block.target, block.source, stage)
            for table, links in zip(totals.links, self._join(ahead, back), strict=True):
                np.add.at(table, block.cells.ravel(), links.ravel())
            self._add_own(totals, 0, ahead, block.source, block.target)
            self._add_own(totals, 1, back, block.target, block.source)
            tick(number)
        return totals

    def _emit(self, block: PaddedBlock) -> list[np.ndarray]:
        """Return θ of the cells for each direction, (T,n,L+1) and (L,n,T+1); 0 at the start and at padding."""
        if not self.counts:
            inside = (block.cells > 0).astype(np.float32)
            return [inside * np.float32(1.0 / self.sizes[1]), _turn(inside) * np.float32(1.0 / self.sizes[0])]
        smoothed = [table.take(block.cells) + np.float32(self.options.prior) for table in self.counts]
        back, ahead = _turn(smoothed[-1]), smoothed[0]
        for theta, direction, source in zip((ahead, back), self.directions, (block.source, block.target), strict=True):
            theta[:, :, 1:] *= direction.scale[source]
        return [ahead, back]

    def _find_posterior(
        self, side: int, emission: np.ndarray, source: np.ndarray, target: np.ndarray, stage: Stage
    ) -> Posterior:
        direction, p0 = self.directions[side], self.options.null
        null = weigh_null(direction.null_words, target, p0)
        if stage == "ibm1":
            return run_ibm1(emission, null, (source != PADDING).sum(1), p0)
        weights = direction.weights if stage == "fertility" else None
        return find_posterior(emission, null, direction.jumps, p0, weights, source)

    def _join(self, ahead: Posterior, back: Posterior) -> list[np.ndarray]:
        """Return the links that each direction learns from, (T,n,L+1); the same for both if they agree."""
        turned = back.links.transpose(2, 1, 0)[1:]  # (T,n,L)
        own = [ahead.links[:, :, 1:] * turned] if self.options.agree else [ahead.links[:, :, 1:], turned]
        joined = []
        for each in own:
            links = np.zeros(ahead.links.shape, dtype=np.float32)
            links[:, :, 1:] = each
            joined.append(links)
        return joined

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
        for table in totals.links:
            table[0] = -options.prior  # so that θ of padding is 0
        self.counts = totals.links
        sums = self._sum_by_type(self.counts)
        for side, direction in enumerate(self.directions):
            direction.totals = (sums[side] + options.prior * direction.types).astype(np.float32)
            direction.scale = np.zeros(self.sizes[side] + 1, dtype=np.float32)
            np.divide(1.0, direction.totals, out=direction.scale[:-1], where=direction.types > 0)
            direction.null_words = _normalise(totals.null[side] + options.null_prior)
            if stage != "ibm1":
                direction.jumps = _normalise(totals.jumps[side] + options.jump_prior * make_first_jumps())
            if stage != "ibm1" and self.with_fertility:
                direction.fertility = estimate_fertility(totals.fertility[side], options.fertility_prior)
                direction.weights = tabulate_weights(direction.fertility)

    def _sum_by_type(self, tables: list[np.ndarray]) -> list[np.ndarray]:
        """Sum values of the pairs of types, one table or one for each direction, over the source types of each."""
        sums = [np.zeros(size) for size in self.sizes]
        for start in range(1, len(self.keys), PROBED):
            here = slice(start, start + PROBED)
            for side, rows in enumerate(np.divmod(self.keys[here], self.sizes[1])):
                np.add.at(sums[side], rows, tables[side % len(tables)][here].astype(np.float64))
        return sums

    def extract_model(self, side: int) -> HmmModel:
        """Return one direction without the pairs of types that have almost no links."""
        direction, prior = self.directions[side], self.options.prior
        counts = self.counts[side % len(self.counts)]
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
            counts=counts[kept],
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
