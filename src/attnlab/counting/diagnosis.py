"""Can attention be learnt from a corpus? An answer from counts, without training (after Snell et al. 2021, §3–4).

If attention mixes single words, p(y_t|x) = Σ_l α_l β_l with β_l = Trans(y_t|x_l), the gradient at uniform attention

    ∂ log p / ∂ a_l = α_l (β_l / Σ α β − 1) = α^IBM_l − 1/L                    a the attention logits, α_l = 1/L

moves attention towards words whose β exceeds the sentence's mean. It is 0 if all β are equal. β in turn is learnt from
the count table (eq. 15). So for each output word, with l* the position with the largest β, the first of equal ones,

    gain   = log β_{l*} − log mean β of the sentence's other words             evidence for l* within the sentence
    common = log mean β of the other words − log p(y_t)                        evidence that all words share
    score  = gain − common                                                     nats, the mean over output words

Permutations of one set of words have gain 0, because every sentence contains all of them. A mixture of two such sets
also has gain 0, and common = ln 2: its table only tells which set it is. A model learns that first. It is the same at
every position and makes the positions more alike, so common is subtracted. k of n types have gain = log (n−1)/(k−1).

The largest of many noisy counts always stands out. So the corpus is split into random halves, always the same: the half
of a sentence chooses l*, and the other half judges it. Pure noise then has a gain of 0 or less. In the same way, with
ties counted by their share (in eq. 10 all ties agree),

    agreement = how often l* is among the top 5 % of the other half's β        as A(u, v) of eq. 10
    chance    = ⌈5 % L⌉ / L

β of a half is (C(i,o) + p(o)) / (C(i,·) + 1): a prior that counts as one word. A word that does not occur in the other
half has gain = common = 0 and agreement = chance. Sentences with only one distinct word give attention no choice and
are not judged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from attnlab.counting.cooccurrence import Pairs, WordPairs
from attnlab.counting.packed_pairs import PackedPairs

LIKELY, UNLIKELY = 0.05, -0.3  # scores; in small copy models half of the seeds learn at 0, see docs/diagnose.md
NOISE = 0.05  # largest share of output words that count as learnable in pure noise
LEAST = 0.01  # nats: a word with a smaller gain is not shown to be learnable
CONFIDENCE = 0.95  # of the one-sided interval of a word's gain
TOP = 20  # the top 1/20 of the positions agree (eq. 10)
TIED = 1e-9  # relative difference below which two β are equal
MOST_CELLS = 2**22  # cells of the table in memory; each takes 28 bytes
BLOCK = 2**20  # number of pairs that are halved together

VERDICTS = {
    "likely": "attention is likely to be learnt: the counts point at single words of the sentence. This does not hold "
    "if the corpus mixes two kinds of text with no words in common; then diagnose each kind separately",
    "too little": "too little text to tell: the counts seem to point at single words, but noise can look the same; "
    "give more pairs",
    "uncertain": "attention may or may not be learnt, depending on the seed: the counts hardly distinguish the words "
    "of a sentence, and noise looks the same",
    "unlikely": "attention is unlikely to be learnt soon: the counts are the same for every word of a sentence",
    "no choice": "there is nothing to attend to: no sentence has two different words to choose from",
    "all alike": "there is nothing to learn: every pair is the same",
}


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The diagnosis of a corpus by its count table.

    words    one row for each output word: id, count, gain, at_least (the lower end of the gain's one-sided 95 %
             interval, see `_bound_error`), common, score (nats), agreement, chance, from_id (its most frequent source
             word l*), share (how often that is l*), learnable (it occurs twice, and at_least is above 0.01, which is
             rare in noise)
    """

    score: float
    gain: float
    common: float
    agreement: float
    chance: float
    pairs: int  # number of pairs with words on both sides
    judged: int  # number of output words that were judged
    alike: bool  # every pair is the same
    words: pd.DataFrame

    @property
    def verdict(self) -> str:
        """A key of VERDICTS."""
        if self.alike or not self.judged:
            return "all alike" if self.alike else "no choice"
        if self.score >= LIKELY:
            return "likely" if self.learnable > NOISE else "too little"
        return "unlikely" if self.score < UNLIKELY else "uncertain"

    @property
    def learnable(self) -> float:
        """Share of output words, weighted by frequency, that can be learnt from the counts (see `words`)."""
        return float(self.words["count"][self.words["learnable"]].sum() / max(self.judged, 1))


def diagnose(
    pairs: Pairs | PackedPairs,
    *,
    sizes: tuple[int, int] | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """Judge a corpus, as the module's docstring defines.

    pairs   (source ids, target ids); a label is a target of one id
    sizes   numbers of source and target types; default: up to the largest id
    tick    called after each part of the table, with the number of parts done and of all parts

    Memory holds a part of the table for some target types at a time, and one chunk of pairs.
    Raises ValueError if fewer than two pairs have words on both sides.
    """
    corpus = pairs if isinstance(pairs, PackedPairs) else PackedPairs(pairs)
    contents = _survey_corpus(corpus, sizes)
    width = max(1, MOST_CELLS // max(contents.sizes[0], 1))
    starts = range(0, contents.sizes[1], width)
    parts = []
    for start in starts:
        parts.append(_judge_part(corpus, contents, start, min(start + width, contents.sizes[1])))
        tick(len(parts), len(starts))
    words = pd.concat(parts).sort_values(["count", "id"], ascending=[False, True], ignore_index=True)
    judged = int(words["count"].sum())
    gain, common, agreement, chance = (
        float((words[name] * words["count"]).sum() / judged) if judged else 0.0 for name in MEASURES
    )
    return Diagnosis(gain - common, gain, common, agreement, chance, contents.pairs, judged, contents.alike, words)


class HalfDraw:
    """The half, 0 or 1, of each of `number` pairs, in order; at random, because files may be sorted.

    A corpus of more than BLOCK pairs is halved block by block.
    """

    def __init__(self, number: int) -> None:
        self.remaining, self.random = number, np.random.default_rng(0)
        self.drawn = np.zeros(0, dtype=np.int8)

    def take(self, number: int) -> np.ndarray:
        """Return the halves of the next `number` pairs, (number,)."""
        while len(self.drawn) < number and self.remaining:
            block = min(BLOCK, self.remaining)
            self.remaining -= block
            self.drawn = np.concatenate([self.drawn, (self.random.permutation(block) % 2).astype(np.int8)])
        taken, self.drawn = self.drawn[:number], self.drawn[number:]
        return taken


@dataclass(frozen=True, eq=False)
class _Contents:
    """What a pass over the corpus finds: its size, and the totals of the tables of both halves."""

    pairs: int  # with words on both sides
    sizes: tuple[int, int]
    alike: bool
    rows: np.ndarray  # C(i,·) of each half, (2, source types)
    shares: np.ndarray  # p(o) of each half, (2, target types)


def _survey_corpus(corpus: PackedPairs, sizes: tuple[int, int] | None) -> _Contents:
    pairs, alike, needed, first = 0, True, (0, 0), None
    for chunk in corpus.full_chunks():
        pairs += len(chunk)
        own = chunk.fit_sizes(sizes)
        needed = (max(needed[0], own[0]), max(needed[1], own[1]))
        first = first or (chunk.select(np.arange(len(chunk)) == 0) if len(chunk) else None)
        alike = alike and (first is None or _is_repeated(chunk, first))
    if pairs < 2:
        raise ValueError(f"2 or more pairs must have words on both sides, got {pairs} of {len(corpus)} pairs")
    rows, counts, halves = np.zeros((2, needed[0])), np.zeros((2, needed[1])), HalfDraw(pairs)
    for chunk in corpus.full_chunks():
        half = halves.take(len(chunk))
        ratio = chunk.target_lengths / chunk.source_lengths
        for h in (0, 1):
            part = chunk.select(half == h)
            rows[h] += np.bincount(part.source, np.repeat(ratio[half == h], part.source_lengths), minlength=needed[0])
            counts[h] += np.bincount(part.target, minlength=needed[1])
    return _Contents(pairs, needed, alike, rows, counts / counts.sum(1, keepdims=True))


def _is_repeated(chunk: WordPairs, first: WordPairs) -> bool:
    """Return whether every pair of a chunk is this one."""
    return all(
        bool((lengths == len(ids)).all()) and bool((side.reshape(-1, len(ids)) == ids).all())
        for side, lengths, ids in (
            (chunk.source, chunk.source_lengths, first.source),
            (chunk.target, chunk.target_lengths, first.target),
        )
    )


MEASURES = ("gain", "common", "agreement", "chance")


def _judge_part(corpus: PackedPairs, contents: _Contents, start: int, stop: int) -> pd.DataFrame:
    """Return the rows of the output words start … stop−1, those that occur."""
    width, types = stop - start, contents.sizes[0]
    betas = np.zeros((2, types * width))  # C of each half, then β; cell (i,o) is at i·width + o
    for half, part in _iterate_halves(corpus, contents, start, stop):
        cells = part.count_cells((types, width)).tocoo()
        betas[half][cells.row * np.int64(width) + cells.col] += cells.data
    for half, table in enumerate(betas.reshape(2, types, width)):
        table += contents.shares[half, start:stop]
        table /= contents.rows[half][:, None] + 1.0
    times, gains = np.zeros(types * width, dtype=np.int32), np.zeros(types * width)  # of each l* and output word
    sums = np.zeros((len(MEASURES), width))
    for half, part in _iterate_halves(corpus, contents, start, stop):
        share = contents.shares[1 - half, start:stop]
        for x, y in part.iterate_words():
            choice = (x != x[:, :1]).any(1)
            cell, *measures = _judge_words(x[choice], y[choice], share, betas[half], betas[1 - half])
            np.add.at(times, cell, 1)
            np.add.at(gains, cell, measures[0])
            sums += [np.bincount(y[choice], values, minlength=width) for values in measures]
    means = dict(zip(MEASURES, sums, strict=True))
    return _summarise_words(times.reshape(types, width), gains.reshape(types, width), means, start)


def _iterate_halves(corpus: PackedPairs, contents: _Contents, start: int, stop: int) -> Iterator[tuple[int, WordPairs]]:
    """Yield the pairs in chunks of one half, with only the target words start … stop−1."""
    halves = HalfDraw(contents.pairs)
    for chunk in corpus.full_chunks():
        half = halves.take(len(chunk))
        restricted = chunk.restrict_target(start, stop)
        for h in (0, 1):
            yield h, restricted.select((half == h) & (restricted.target_lengths > 0))


def _judge_words(
    x: np.ndarray, y: np.ndarray, share: np.ndarray, own: np.ndarray, other: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the cell of l* and the measures of each output word; own β choose l*, β of the other half judge it."""
    length, rows = x.shape[1], np.arange(len(x))
    places = x * len(share) + y[:, None]  # (n,L)
    mine = own[places]
    best = (mine >= mine.max(1, keepdims=True) * (1 - TIED)).argmax(1)  # the first of equal ones
    beta = other[places]  # (n,L)
    chosen = beta[rows, best]
    same = x == x[rows, best][:, None]
    rest = beta.sum(1, where=~same) / (length - same.sum(1))
    p, seen = share[y], share[y] > 0
    gain = np.log(np.divide(chosen, rest, out=np.ones_like(rest), where=seen))
    common = np.log(np.divide(rest, p, out=np.ones_like(rest), where=seen))
    agreeing = -(-length // TOP)  # number of positions
    above = (beta > chosen[:, None] * (1 + TIED)).sum(1)
    tied = (beta >= chosen[:, None] * (1 - TIED)).sum(1) - above
    chance = np.full(len(x), agreeing / length)
    agreement = np.where(seen, np.clip((agreeing - above) / tied, 0.0, 1.0), chance)
    return places[rows, best], gain, common, agreement, chance


def _summarise_words(times: np.ndarray, gains: np.ndarray, sums: dict[str, np.ndarray], start: int) -> pd.DataFrame:
    """Return the means by output word, of the words that occur.

    times, gains   how often a source word is l* of an output word, and the sum of its gains, (source types, words)
    """
    number = times.sum(0, dtype=np.int64)
    mean = {name: total / np.maximum(number, 1) for name, total in sums.items()}
    lower = mean["gain"] - _bound_error(times, gains, mean["gain"], number)
    columns = {"id": start + np.arange(len(number)), "count": number, "gain": mean["gain"], "at_least": lower}
    columns |= {"common": mean["common"], "score": mean["gain"] - mean["common"], "agreement": mean["agreement"]}
    columns |= {"chance": mean["chance"], "from_id": times.argmax(0), "share": times.max(0) / np.maximum(number, 1)}
    columns |= {"learnable": (number > 1) & (lower > LEAST)}
    return pd.DataFrame(columns)[number > 0]


def _bound_error(times: np.ndarray, gains: np.ndarray, mean: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return an upper bound of the error of each output word's mean gain: the larger of two one-sided t-intervals.

    The first is over the source words l*, not over single occurrences: occurrences with the same source word are judged
    by one cell of the table and share its error. The second uses the error 1/√n of the logarithm of n counts. A word
    with only one source word has only the second.
    """
    source_count = (times > 0).sum(0)
    apart = times * mean
    np.subtract(gains, apart, out=apart)
    spread = np.square(apart, out=apart).sum(0)
    others, number = np.maximum(source_count - 1, 1), np.maximum(number, 1)
    width = stdtrit(others, CONFIDENCE) * np.sqrt(spread * source_count / others) / number
    between = np.where(source_count > 1, width, 0.0)
    return np.maximum(between, stdtrit(np.maximum(number - 1, 1), CONFIDENCE) / np.sqrt(number))
