"""Can attention be learnt from a corpus? From co-occurrence alone, without training (after Snell et al. 2021, §3–4).

Why. If attention mixes single words, p(y_t|x) = Σ_l α_l β_l with β_l = Trans(y_t|x_l), then even attention is pushed by

    ∂ log p / ∂ a_l = α_l (β_l / Σ α β − 1) = α^IBM_l − 1/L                    a the attention logits, α_l = 1/L

towards words whose β stands out from the sentence's mean, and nowhere if all β are equal. β in turn is learnt from the
count table (eq. 15). So for each output word, with l* the position that the counts point at (the largest β),

    gain   = log β_{l*} − log mean β of the sentence's other words             what points to l* within the sentence
    common = log mean β of the other words − log p(y_t)                        what any word of the sentence says alike
    score  = gain − common                                                     nats, the mean over output words

Permutations of one set of words have gain 0: every sentence holds all of them. A mixture of two such sets has gain 0 as
well, and common = ln 2: its table only tells which set it is. That is learnt first, and it is the same at every
position, so it makes the positions more alike; hence it is subtracted. k of n types have gain = log (n−1)/(k−1).

The largest of many noisy counts always stands out, so the corpus is cut in random halves, always the same: the half a
sentence is in chooses l*, the other half judges it. What is only noise then gains nothing, or less. Likewise, with ties
counted by their share (eq. 10 lets them all agree),

    agreement = how often l* is among the top 5 % of the other half's β        as A(u, v) of eq. 10
    chance    = ⌈5 % L⌉ / L

β of a half is (C(i,o) + p(o)) / (C(i,·) + 1): one word's worth of evidence for nothing. A word that the other half
never saw has gain, common = 0 and agreement = chance. Sentences of one word, or of one word repeated, leave attention
no choice and are not judged.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.sparse as sparse
from scipy.special import stdtrit

from attnlab.counting.cooccurrence import Cells, Pairs, WordPairs

LIKELY, UNLIKELY = 0.05, -0.3  # scores; from small copy models: at 0 half of the seeds learn, see docs/diagnose.md
NOISE = 0.05  # of the output words, at most, are called learnable where there is nothing to learn
LEAST = 0.01  # nats: a word that gains less cannot be learnt from counts
SURELY = 0.95  # of a one-sided interval of a word's gain
TOP = 20  # the best 1/20 of the positions agree (eq. 10)
TIED = 1e-9  # relative difference of two β that are the same

VERDICTS = {
    "likely": "attention is likely to be learnt: the counts point at single words of the sentence. Not so if the "
    "corpus is of two kinds of text with no words in common: then diagnose each by itself",
    "too little": "too little text to tell: the counts seem to point at single words, but no further than those of "
    "noise may; give more pairs",
    "uncertain": "attention may or may not be learnt, by chance of the seed, if there is anything to learn: the counts "
    "hardly tell the words of a sentence apart, as in noise",
    "unlikely": "attention is unlikely to be learnt soon: the counts tell the same of every word of a sentence",
    "no choice": "there is nothing to attend to: no sentence has two different words to choose from",
    "all alike": "there is nothing to learn: every pair is the same",
}


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What the count table of a corpus tells.

    words    one row an output word: id, count, gain, at_least (the lower end of the gain's one-sided 95 % interval, see
             `_error`), common, score (nats), agreement, chance, from_id (the source word it is most often led to),
             share (how often it is), learnable (it occurs twice, and at_least is above 0.01: noise hardly ever is)
    """

    score: float
    gain: float
    common: float
    agreement: float
    chance: float
    pairs: int  # with words on both sides
    judged: int  # output words
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
        """The share of output words, by their frequency, that the counts can teach: their own gain is surely above
        LEAST."""
        return float(self.words["count"][self.words["learnable"]].sum() / max(self.judged, 1))


def diagnose(pairs: Pairs, *, sizes: tuple[int, int] | None = None) -> Diagnosis:
    """Judge a corpus of (source ids, target ids); a label is a target of one id. See the module's head.

    sizes: how many types there are, where not only those up to the largest id.
    """
    whole = WordPairs.of(pairs)
    corpus = whole.only((whole.source_lengths > 0) & (whole.target_lengths > 0))
    if len(corpus) < 2:
        raise ValueError(
            f"{len(corpus)} of the {len(whole)} pairs have words on both sides; two are the fewest that can be judged"
        )
    sizes = corpus.sizes if sizes is None else sizes
    halves = [corpus.only(half_of(len(corpus)) == half) for half in (0, 1)]
    tables = [half.counts(sizes) for half in halves]
    table = sparse.csr_array(tables[0] + tables[1])
    table.sort_indices()
    cells = Cells(table)
    betas = [_beta(table, cells, counted) for counted in tables]
    judged = [
        _judged(*block, betas[half], betas[1 - half])
        for half in (0, 1)
        for block in _blocks(halves[half], cells, np.asarray(tables[1 - half].sum(0)))
    ]
    rows = np.concatenate(judged) if judged else np.zeros(0, dtype=JUDGED)
    gain, common, agreement, chance = (
        float(rows[name].mean()) if len(rows) else 0.0 for name in ("gain", "common", "agreement", "chance")
    )
    size = {"pairs": len(corpus), "judged": len(rows)}
    return Diagnosis(
        gain - common, gain, common, agreement, chance, **size, alike=_alike(corpus), words=_words(rows), table=table
    )


def half_of(number: int) -> np.ndarray:
    """The half, 0 or 1, that each of so many pairs is in, (number,); at random, as files may be sorted."""
    return np.random.default_rng(0).permutation(number) % 2


JUDGED = np.dtype([("o", "i8"), ("i", "i8"), ("gain", "f8"), ("common", "f8"), ("agreement", "f8"), ("chance", "f8")])


def _beta(table: sparse.csr_array, cells: Cells, half: sparse.csr_array) -> np.ndarray:
    """β of one half of the corpus for every cell of the whole table, in the order of its data."""
    data = np.zeros(table.nnz)
    rows = np.repeat(np.arange(half.shape[0], dtype=np.int64), np.diff(half.indptr))
    data[np.searchsorted(cells.keys, rows * cells.columns + half.indices)] = half.data
    words = np.asarray(half.sum(0))
    totals = np.repeat(np.asarray(half.sum(1)), np.diff(table.indptr))
    return (data + (words / words.sum())[table.indices]) / (totals + 1.0)


def _blocks(
    corpus: WordPairs, cells: Cells, other: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Pairs of one shape that leave a choice: x (n,L), y (n,T), their cells (n,L,T), and p(y_t) in the other half."""
    share = other / other.sum()
    for _, x, y in corpus.shapes():
        choice = (x != x[:, :1]).any(1)
        if choice.any():
            yield x[choice], y[choice], cells.of(x[choice], y[choice]), share[y[choice]]


def _judged(
    x: np.ndarray, y: np.ndarray, places: np.ndarray, share: np.ndarray, own: np.ndarray, other: np.ndarray
) -> np.ndarray:
    """One row of JUDGED for each output word: l* by the β of its own half, judged by the β of the other."""
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
    places_that_agree = -(-length // TOP)
    above = (beta > chosen * (1 + TIED)).sum(1)
    tied = (beta >= chosen * (1 - TIED)).sum(1) - above
    rows["chance"] = places_that_agree / length
    rows["agreement"] = np.where(seen, np.clip((places_that_agree - above) / tied, 0.0, 1.0), rows["chance"])
    return rows.ravel()


def _alike(corpus: WordPairs) -> bool:
    same_shape = all((lengths == lengths[0]).all() for lengths in (corpus.source_lengths, corpus.target_lengths))
    return same_shape and all(bool((x == x[0]).all() and (y == y[0]).all()) for _, x, y in corpus.shapes())


def _words(rows: np.ndarray) -> pd.DataFrame:
    """The mean of what was judged, by output word; more frequent ones first."""
    ids, which, number = np.unique(rows["o"], return_inverse=True, return_counts=True)
    mean = {
        name: np.bincount(which, rows[name], minlength=len(ids)) / number
        for name in ("gain", "common", "agreement", "chance")
    }
    surely = mean["gain"] - _error(which, rows["i"], rows["gain"] - mean["gain"][which], number)
    source, share = _leads(which, rows["i"], number)
    score = mean["gain"] - mean["common"]
    told = {
        "id": ids,
        "count": number,
        "gain": mean["gain"],
        "at_least": surely,
        "common": mean["common"],
        "score": score,
    }
    told |= {"agreement": mean["agreement"], "chance": mean["chance"], "from_id": source, "share": share}
    frame = pd.DataFrame(told | {"learnable": (number > 1) & (surely > LEAST)})
    return frame.sort_values(["count", "id"], ascending=[False, True], ignore_index=True)


def _error(which: np.ndarray, sources: np.ndarray, apart: np.ndarray, number: np.ndarray) -> np.ndarray:
    """How far the mean gain of each output word may be above the true one: the larger of two t-intervals' halves.

    One is over the source words it was led to, not over single occurrences: those with one source word are all judged
    by one cell of the table, and share its error. The other is that of the logarithm of so many counts, 1/√n: a word
    that is always led to the same one has no other.
    """
    types = int(sources.max(initial=0)) + 1
    pairs, pair = np.unique(which * types + sources, return_inverse=True)
    word = pairs // types
    led_to = np.bincount(word, minlength=len(number))
    spread = np.bincount(word, np.bincount(pair, apart) ** 2, minlength=len(number))
    others = np.maximum(led_to - 1, 1)
    between = np.where(led_to > 1, stdtrit(others, SURELY) * np.sqrt(spread * led_to / others) / number, 0.0)
    return np.maximum(between, stdtrit(np.maximum(number - 1, 1), SURELY) / np.sqrt(number))


def _leads(which: np.ndarray, sources: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each output word the source word it is led to most often (the lower id of two), and how often."""
    types = int(sources.max(initial=0)) + 1
    keys, times = np.unique(which * types + sources, return_counts=True)
    order = np.lexsort([keys, -times, keys // types])
    first = np.unique(keys[order] // types, return_index=True)[1]
    return keys[order][first] % types, times[order][first] / number
