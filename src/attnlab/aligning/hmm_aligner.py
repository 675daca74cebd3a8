"""Word alignment by hidden Markov models with or without fertilities, trained in both directions so that they agree.

    FOLDER/hmm.safetensors, source.txt, target.txt        one direction, written by `save`, read by `load`

Training fits both directions (`attnlab.counting.hmm_fit`). A target word is linked to the source word with the
highest posterior. It gets no link if NULL has a higher one.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np

from attnlab.aligning.extraction import Sentences, Tick
from attnlab.aligning.text_ids import build_vocabulary, describe_long_pairs, encode_pairs
from attnlab.analysis.alignment import NOWHERE, CorpusAlignment
from attnlab.counting.cooccurrence import WordPairs
from attnlab.counting.hmm_fit import SCHEDULES, HmmOptions, Kind, fit_hmm
from attnlab.counting.hmm_model import HmmModel
from attnlab.counting.padded_blocks import PADDING, find_used
from attnlab.tasks.numbered_text import number_words
from attnlab.tasks.task import UNK
from attnlab.tasks.vocabulary import Words

FILE = "hmm.safetensors"
WARNING_SHARE = 0.5  # larger shares of unknown words get a note
KINDS: tuple[str, ...] = get_args(Kind)

Pairs = tuple[Sentences, Sentences]


@dataclass(frozen=True, eq=False)
class HmmAligner:
    """One direction of a trained aligner with the vocabularies of its two sides."""

    model: HmmModel
    source: Words
    target: Words

    @classmethod
    def train(cls, pairs: Pairs, kind: str, *, tick: Tick = lambda done, of: None) -> tuple["HmmAligner", "HmmAligner"]:
        """Train both directions; return that of source to target, and that of target to source."""
        text = number_words(pairs[0]), number_words(pairs[1])
        source, target = (build_vocabulary(side) for side in text)
        sizes = len(source), len(target)
        fit = fit_hmm(encode_pairs([source, target], text), cast(Kind, kind), sizes=sizes, tick=tick)
        return cls(fit.ahead, source, target), cls(fit.back, target, source)

    def align(self, pairs: Pairs, tick: Tick = lambda done, of: None) -> tuple[CorpusAlignment, list[str]]:
        """Return the links of sentence pairs with their posteriors, and notes on long pairs and unknown words."""
        corpus = encode_pairs([self.source, self.target], pairs)
        aligned = CorpusAlignment.empty(corpus.target_lengths)  # type: ignore[arg-type]
        done, used = 0, len(find_used(corpus)[0])
        for block, posterior in self.model.iterate_posteriors(corpus):
            best = posterior.links.argmax(2).T  # (n,T)
            value = posterior.links.max(2).T
            linked = (value > posterior.compute_null().T) & (best > 0)
            inside = block.target != PADDING
            places = (aligned.starts[block.pairs][:, None] + np.arange(best.shape[1]))[inside]
            aligned.choice[places] = np.where(linked, best - 1, NOWHERE)[inside]
            aligned.value[places] = np.where(linked, value, 0.0)[inside]
            done += len(block.pairs)
            tick(done, used)
        return aligned, [*describe_long_pairs(corpus), *_describe_unknown(corpus)]

    def save(self, folder: Path) -> None:
        """Save the vocabularies and then the model, so that a folder with a model is complete."""
        self.source.save(folder / "source.txt")
        self.target.save(folder / "target.txt")
        self.model.save(folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "HmmAligner":
        source, target = (Words.load(folder / f"{side}.txt") for side in ("source", "target"))
        model = HmmModel.load(folder / FILE)
        if (len(model.totals), len(model.null_words)) != (len(source), len(target)):
            raise ValueError(f"{folder}: the vocabularies do not fit {FILE}; delete the folder to train it again")
        return cls(model, source, target)


def name_folder(text: Pairs, kind: str) -> str:
    """Return a folder name that depends on the text, its direction and all options."""
    digest = hashlib.sha256(repr((kind, SCHEDULES[kind], asdict(HmmOptions()))).encode())
    for side in text:
        for words in side:
            digest.update(" ".join(words).encode(errors="surrogatepass") + b"\n")
        digest.update(b"\n\n")
    return f"{kind}-{digest.hexdigest()[:12]}"


def _describe_unknown(corpus: WordPairs) -> list[str]:
    """Return a note if most words of a side are unknown: the text may be of the other direction."""
    sides = {"source": corpus.source, "target": corpus.target}
    shares = {side: float((words == UNK).mean()) for side, words in sides.items() if len(words)}
    worst = max(shares, key=lambda side: shares[side], default="")
    if not worst or shares[worst] <= WARNING_SHARE:
        return []
    reason = "check the order of the files, their language and tokens, and the direction of the model"
    return [f"{100 * shares[worst]:.0f} % of the {worst} words were never seen in training: {reason}"]
