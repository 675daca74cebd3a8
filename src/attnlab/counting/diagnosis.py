"""Can attention be learnt from a corpus? An answer from counts, without training (after Snell et al. 2021, §3–4).

If attention mixes single words, p(y_t|x) = Σ_l α_l β_l with β_l = Trans(y_t|x_l), the gradient at uniform attention

    ∂ log p / ∂ a_l = α_l (β_l / Σ α β − 1) = α^IBM_l − 1/L                    a the attention logits, α_l = 1/L

moves attention towards words whose β exceeds the sentence's mean. It is 0 if all β are equal. β in turn is learnt from
the count table (eq. 15). So for each output word, with l* the position with the largest β,

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

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.sparse as sparse
from scipy.special import stdtrit

from attnlab.counting.cooccurrence import Cells, Pairs, WordPairs

LIKELY, UNLIKELY = 0.05, -0.3  # scores; in small copy models half of the seeds learn at 0, see docs/diagnose.md
NOISE = 0.05  # largest share of output words that count as learnable in pure noise
LEAST = 0.01  # nats: a word with a smaller gain cannot be learnt from counts
CONFIDENCE = 0.95  # of the one-sided interval of a word's gain
TOP = 20  # the top 1/20 of the positions agree (eq. 10)
TIED = 1e-9  # relative difference below which two β are equal

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
    table: sparse.csr_array  # C

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


def diagnose(pairs: Pairs, *, sizes: tuple[int, int] | None = None) -> Diagnosis:
    """Judge a corpus, as the module's docstring defines.

    pairs   (source ids, target ids); a label is a target of one id
    sizes   numbers of source and target types; default: up to the largest id

    Raises ValueError if fewer than two pairs have words on both sides.
    """
    corpus = WordPairs.gather_full(pairs, minimum=2)
    sizes = corpus.fit_sizes(sizes)
    halves = [corpus.select(assign_halves(len(corpus)) == half) for half in (0, 1)]
    tables = [half.count_cells(sizes) for half in halves]
    table = sparse.csr_array(tables[0] + tables[1])
    table.sort_indices()
    cells = Cells(table)
    betas = [_beta(table, cells, counted) for counted in tables]
    judged = [
        _judge_block(*block, betas[half], betas[1 - half])
        for half in (0, 1)
        for block in _iterate_blocks(halves[half], cells, np.asarray(tables[1 - half].sum(0)))
    ]
    rows = np.concatenate(judged) if judged else np.zeros(0, dtype=JUDGED)
    gain, common, agreement, chance = (float(rows[name].mean()) if len(rows) else 0.0 for name in MEASURES)
    means, words = (gain - common, gain, common, agreement, chance), _summarise_words(rows)
    return Diagnosis(*means, len(corpus), len(rows), _is_uniform(corpus), words, table)


def assign_halves(number: int) -> np.ndarray:
    """Return the half, 0 or 1, of each of `number` pairs, (number,); at random, because files may be sorted."""
    return np.random.default_rng(0).permutation(number) % 2


MEASURES = ("gain", "common", "agreement", "chance")
JUDGED = np.dtype([("o", "i8"), ("i", "i8"), *((name, "f8") for name in MEASURES)])


def _beta(table: sparse.csr_array, cells: Cells, half: sparse.csr_array) -> np.ndarray:
    """Return β of one half of the corpus for every cell of the whole table, in the order of its data."""
    data = np.zeros(table.nnz)
    rows = np.repeat(np.arange(half.shape[0], dtype=np.int64), np.diff(half.indptr))
    data[np.searchsorted(cells.keys, rows * cells.columns + half.indices)] = half.data
    words = np.asarray(half.sum(0))
    totals = np.repeat(np.asarray(half.sum(1)), np.diff(table.indptr))
    return (data + (words / words.sum())[table.indices]) / (totals + 1.0)


def _iterate_blocks(
    corpus: WordPairs, cells: Cells, other: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield pairs of one shape with a choice: x (n,L), y (n,T), their cells (n,L,T), and p(y_t) in the other half."""
    share = other / other.sum()
    for _, x, y in corpus.iterate_shapes():
        choice = (x != x[:, :1]).any(1)
        if choice.any():
            yield x[choice], y[choice], cells.locate(x[choice], y[choice]), share[y[choice]]


def _judge_block(
    x: np.ndarray, y: np.ndarray, places: np.ndarray, share: np.ndarray, own: np.ndarray, other: np.ndarray
) -> np.ndarray:
    """Return a row of JUDGED for each output word: l* by the β of its own half, judged by the β of the other."""
    length = x.shape[1]
    best = own[places].argmax(1)[:, None]  # (n,1,T)
    beta = other[places]  # (n,L,T)
    chosen = np.take_along_axis(beta, best, 1)  # (n,1,T)
    word = np.take_along_axis(x, best[:, 0], 1)  # (n,T)
    same = x[:, :, None] == word[:, None]
    rest = beta.sum(1, where=~same) / (length - same.sum(1))  # (n,T)
    seen = share > 0
    rows = np.zeros(y.shape, dtype=JUDGED)
    rows["o"], rows["i"] = y, word
    np.log(np.divide(chosen[:, 0], rest, out=np.ones_like(rest), where=seen), out=rows["gain"])
    np.log(np.divide(rest, share, out=np.ones_like(rest), where=seen), out=rows["common"])
    agreeing = -(-length // TOP)  # number of positions
    above = (beta > chosen * (1 + TIED)).sum(1)
    tied = (beta >= chosen * (1 - TIED)).sum(1) - above
    rows["chance"] = agreeing / length
    rows["agreement"] = np.where(seen, np.clip((agreeing - above) / tied, 0.0, 1.0), rows["chance"])
    return rows.ravel()


def _is_uniform(corpus: WordPairs) -> bool:
    same_shape = all((lengths == lengths[0]).all() for lengths in (corpus.source_lengths, corpus.target_lengths))
    return same_shape and all(bool((x == x[0]).all() and (y == y[0]).all()) for _, x, y in corpus.iterate_shapes())


def _summarise_words(rows: np.ndarray) -> pd.DataFrame:
    """Return the means of the judged rows by output word, most frequent words first."""
    ids, which, number = np.unique(rows["o"], return_inverse=True, return_counts=True)
    mean = {name: np.bincount(which, rows[name], minlength=len(ids)) / number for name in MEASURES}
    lower = mean["gain"] - _bound_error(which, rows["i"], rows["gain"] - mean["gain"][which], number)
    source, share = _find_top_source(which, rows["i"], number)
    columns = {"id": ids, "count": number, "gain": mean["gain"], "at_least": lower, "common": mean["common"]}
    columns |= {"score": mean["gain"] - mean["common"], "agreement": mean["agreement"], "chance": mean["chance"]}
    columns |= {"from_id": source, "share": share, "learnable": (number > 1) & (lower > LEAST)}
    return pd.DataFrame(columns).sort_values(["count", "id"], ascending=[False, True], ignore_index=True)


def _bound_error(which: np.ndarray, sources: np.ndarray, apart: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return an upper bound of the error of each output word's mean gain: the larger of two one-sided t-intervals.

    The first is over the source words l*, not over single occurrences: occurrences with the same source word are judged
    by one cell of the table and share its error. The second uses the error 1/√n of the logarithm of n counts. A word
    with only one source word has only the second.
    """
    types = int(sources.max(initial=0)) + 1
    pairs, pair = np.unique(which * types + sources, return_inverse=True)
    word = pairs // types
    source_count = np.bincount(word, minlength=len(number))
    spread = np.bincount(word, np.bincount(pair, apart) ** 2, minlength=len(number))
    others = np.maximum(source_count - 1, 1)
    width = stdtrit(others, CONFIDENCE) * np.sqrt(spread * source_count / others) / number
    between = np.where(source_count > 1, width, 0.0)
    return np.maximum(between, stdtrit(np.maximum(number - 1, 1), CONFIDENCE) / np.sqrt(number))


def _find_top_source(which: np.ndarray, sources: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each output word, its most frequent source word l* (the lower id of two) and that word's share."""
    types = int(sources.max(initial=0)) + 1
    keys, times = np.unique(which * types + sources, return_counts=True)
    order = np.lexsort([keys, -times, keys // types])
    first = np.unique(keys[order] // types, return_index=True)[1]
    return keys[order][first] % types, times[order][first] / number
