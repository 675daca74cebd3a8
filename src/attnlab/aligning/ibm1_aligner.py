"""Word alignment by IBM Model 1, trained on the text to align or on another, and saved with its vocabularies.

    FOLDER/ibm1.safetensors, source.txt, target.txt        written by `save`, read by `load`

By default it is Model 1 of Brown et al. 1993, fitted by maximum likelihood. With the diagonal it is fast_align's model
(Dyer et al. 2013), with fast_align's defaults for the initial λ, p(NULL) and the prior on θ. None of them was tuned on
gold links.

A target word is linked to the source word with the highest posterior. It gets no link if that is NULL, or if no source
word of the sentence occurred with it in training.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.aligning.extraction import Sentences
from attnlab.aligning.text_ids import build_vocabulary, describe_long_pairs, empty_long_pairs, encode_pairs
from attnlab.analysis.alignment import CorpusAlignment
from attnlab.counting.cooccurrence import Cells
from attnlab.counting.ibm1 import Ibm1, fit_ibm1, link_prior
from attnlab.tasks.numbered_text import number_words
from attnlab.tasks.vocabulary import Words

FILE = "ibm1.safetensors"
FAST_ALIGN: dict[str, Any] = {"null": 0.08, "diagonal": 4.0, "learn_diagonal": True, "prior": 0.01}  # its -d -o -v


@dataclass(frozen=True, eq=False)
class WordModel:
    """IBM Model 1 with the vocabularies of its two sides."""

    model: Ibm1
    source: Words
    target: Words

    @classmethod
    def train(
        cls, source: Sentences, target: Sentences, *, diagonal: bool = False, prior: float | None = None
    ) -> "WordModel":
        """Train on sentence pairs until convergence.

        diagonal   use fast_align's model: a learnt preference for the diagonal, and a prior on θ
        prior      prior on θ, 0 for maximum likelihood; by default fast_align's with the diagonal, else 0
        """
        text = number_words(source), number_words(target)
        vocabularies = [build_vocabulary(side) for side in text]
        sizes = len(vocabularies[0]), len(vocabularies[1])
        fit = fit_ibm1(empty_long_pairs(encode_pairs(vocabularies, text)), sizes=sizes, **_fit_options(diagonal, prior))
        return cls(fit, *vocabularies)

    def align(self, source: Sentences, target: Sentences) -> tuple[CorpusAlignment, list[str]]:
        """Return the links of sentence pairs with their posteriors, and a note on long pairs."""
        corpus = encode_pairs([self.source, self.target], (source, target))
        theta, null = self.model.theta, self.model.theta.shape[0] - 1
        cells, aligned = Cells(theta), CorpusAlignment.empty(corpus.target_lengths)  # type: ignore[arg-type]
        for numbers, x, y in empty_long_pairs(corpus).iterate_shapes():
            words = np.concatenate([x, np.full((len(x), 1), null)], axis=1)  # (n,L+1)
            joint = _look_up_theta(theta.data, cells, words, y)
            joint *= link_prior(x.shape[1], y.shape[1], self.model.null, self.model.diagonal)
            total, best = joint.sum(1), joint.argmax(1)  # (n,T)
            linked = (best < x.shape[1]) & (total > 0)
            posterior = np.divide(joint.max(1), total, out=np.zeros_like(total), where=linked)
            for k, number in enumerate(numbers):
                aligned.set_links(int(number), np.where(linked[k], best[k], -1), posterior[k])
        return aligned, describe_long_pairs(corpus)

    def save(self, folder: Path) -> None:
        """Save the vocabularies and then the model, so that a folder with a model is complete."""
        self.source.save(folder / "source.txt")
        self.target.save(folder / "target.txt")
        self.model.save(folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "WordModel":
        return cls(Ibm1.load(folder / FILE), Words.load(folder / "source.txt"), Words.load(folder / "target.txt"))


def name_folder(source: Sentences, target: Sentences, *, diagonal: bool, prior: float | None = None) -> str:
    """Return a folder name that depends on the text and on all options, defaults included."""
    text = hashlib.sha256(json.dumps(_fit_options(diagonal, prior), sort_keys=True).encode())
    for side in (source, target):
        for words in side:
            text.update(" ".join(words).encode(errors="surrogatepass") + b"\n")
        text.update(b"\n\n")
    return f"ibm1-{text.hexdigest()[:12]}"


def _fit_options(diagonal: bool, prior: float | None) -> dict[str, Any]:
    """Return the options of `fit_ibm1`."""
    options = dict(FAST_ALIGN) if diagonal else {"prior": 0.0}
    return options if prior is None else options | {"prior": float(prior)}


def _look_up_theta(theta: np.ndarray, cells: Cells, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return θ(y_t|x_l) of n pairs of one shape, (n,L,T); 0 for words that never occurred together."""
    places = np.minimum(cells.locate(x, y), len(theta) - 1)
    return np.where(cells.keys[places] == x[:, :, None] * cells.columns + y[:, None, :], theta[places], 0.0)
