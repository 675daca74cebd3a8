"""The data sets of Tables 2–8 and 10, and how models are trained on them at each scale (A.5, A.8, the authors' code).

Of every set and seed several models are trained, each by its role:

    A           its attention α, at its best checkpoint, is the one that others are compared with
    B … F       the same from other random starts: α̂(τ), whose agreement with α puts the numbers into context (eq. 11)
    uniform     attention frozen to be uniform: its probe is β^uf(τ)
    frozen      all but the attention frozen at random: its attention is α^fr(τ) (A.6)
    additive    the translator of eq. 32 (A.1)

In translation the paper compares with B alone. Training stops at the last checkpoint that is evaluated. Where a set
is not at hand another stands in for it, under a row of its own with the tag "other data".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnlab.experiments.study import Scale
from attnlab.models.presets import PRESETS
from attnlab.tasks.classification import ClassificationConfig
from attnlab.tasks.translation import TranslationConfig
from attnlab.training.recipe import TRAINING, Recipe

ROLES = {"A": 20, "B": 13, "C": 14, "D": 15, "E": 16, "F": 17, "uniform": 12, "frozen": 18, "additive": 19}
SEEDS_APART = 100  # role r of seed s starts from 100 s + ROLES[r]; of seed 0, A to F and uniform as the authors' runs

EARLY = (0, 50, 100, 500, 1000, 1500, 2000, 4000, 6000, 8000)
MIDDLE = (*EARLY, *range(10_000, 40_001, 6000))
MULTI30K = (*EARLY, *range(10_000, 20_001, 2000), *range(24_000, 36_001, 4000))
IWSLT14 = (*MIDDLE, 60_000, 80_000, *range(100_000, 300_001, 50_000))
EN_NL = (*MIDDLE, *range(50_000, 100_001, 10_000), 130_000)
EN_PT = (*MIDDLE, *range(50_000, 90_001, 10_000))
IT_PT = (*MIDDLE, 50_000, 52_000)
CLASSIFIED = (0, 10, 50, 100, 150, 200, *range(250, 4001, 250))


@dataclass(frozen=True, kw_only=True)
class ScaleSize:
    """How much of an experiment a scale has; None: as much as the paper."""

    train: int | None = None  # training examples
    measured: int | None = None  # examples of each part that are measured
    longest: int | None = None  # tokens of a text, the rest cut off; of a sentence, longer ones left out
    subwords: int = 8000
    width: int | None = None
    rate: float | None = None  # of learning
    measured_at: tuple[int, ...] | None = None  # updates
    comparisons: str = "BCDEF"  # of a classifier; a translator has B
    proxy_epochs: int | None = None
    output: int = 100  # tokens of a translation, at most


CLASSIFYING: Mapping[Scale, ScaleSize] = {
    "smoke": ScaleSize(
        train=3500, measured=300, longest=20, width=32, rate=1e-2, measured_at=(0, 60, 120), comparisons="B",
        proxy_epochs=4,
    ),
    "small": ScaleSize(
        measured=300, longest=80, width=64, rate=3e-3, measured_at=(0, 10, 50, 100, 150, 200, 250, 300, 400),
        comparisons="B", proxy_epochs=10,
    ),
    "full": ScaleSize(),
}  # fmt: skip
TRANSLATING: Mapping[Scale, ScaleSize] = {
    "smoke": ScaleSize(
        train=4000, measured=24, longest=12, subwords=500, width=32, rate=1e-2, measured_at=(0, 30, 60),
        proxy_epochs=2, output=12,
    ),
    "small": ScaleSize(
        train=8000, measured=100, subwords=2000, width=96, rate=3e-3, measured_at=(0, 50, 100, 200, 400, 700),
        proxy_epochs=5, output=40,
    ),
    "full": ScaleSize(),
}  # fmt: skip


@dataclass(frozen=True)
class LstmCorpus:
    name: str
    row: str  # as our tables call it
    published: str  # as the paper's do
    data: ClassificationConfig | TranslationConfig
    measured_at: tuple[int, ...] = CLASSIFIED  # updates after which the authors evaluated
    from_scale: Scale = "full"  # the smallest at which it is run
    tags: tuple[str, ...] = ()
    proxy: tuple[float, int] = (1.5e-4, 60)  # learning rate and epochs of β^px

    @property
    def translates(self) -> bool:
        return isinstance(self.data, TranslationConfig)

    def size(self, scale: Scale) -> ScaleSize:
        size = (TRANSLATING if self.translates else CLASSIFYING)[scale]
        return replace(
            size,
            measured_at=size.measured_at or self.measured_at,
            comparisons="B" if self.translates else size.comparisons,
            proxy_epochs=size.proxy_epochs or self.proxy[1],
        )

    def recipe(self, scale: Scale, role: str, seed: int) -> Recipe:
        """What a role of a seed is trained by."""
        size, preset = self.size(scale), "lstm" if self.translates else "lstm-classifier"
        assert size.measured_at is not None
        model: dict[str, Any] = {"attention": "uniform"} if role == "uniform" else {}
        if size.width is not None:
            model |= {"width": size.width, "embedding_width": size.width}
        if role == "frozen":
            model["trained"] = "attention"
        if role == "additive":
            model["combine"] = "add"
        training, decoding = TRAINING[preset]
        steps = size.measured_at[-1]
        training = replace(
            training,
            lr=size.rate or training.lr,
            steps=steps,
            seed=SEEDS_APART * seed + ROLES[role],
            evaluate_every=steps,
            evaluate_at=tuple(step for step in size.measured_at if step),
            checkpoint_every=min(steps, 2000),
            compile="no",  # many models in one process, and little to gain
            rungs=16,  # texts of 20 words and of 10,000
        )
        task = "translation" if self.translates else "classification"
        return Recipe(task, self._cut(size), replace(PRESETS[preset], **model), training, decoding)

    def _cut(self, size: ScaleSize) -> ClassificationConfig | TranslationConfig:
        limits = [most for most in (size.train, self.data.most_train) if most is not None]
        data = replace(self.data, most_train=min(limits, default=None))
        if isinstance(data, TranslationConfig):
            data = replace(data, vocabulary=size.subwords)
        if size.longest is None:
            return data
        return replace(data, max_length=size.longest, too_long="skip" if self.translates else "truncate")


def _words(data: str) -> ClassificationConfig:
    return ClassificationConfig(data=data)


def _subwords(data: str, pair: str, most: int | None = None) -> TranslationConfig:
    return TranslationConfig(data=data, pair=pair, most_train=most, source_begin=True)


OTHER = ("other data",)
SLOW, PAIRS = (5e-5, 60), (1e-3, 30)

SST = LstmCorpus("sst", "SST, official parts", "SST", _words("sst"), from_scale="smoke", tags=OTHER)
MULTI = LstmCorpus("multi30k", "Multi30k", "Multi30k", _subwords("multi30k", "de-en"), MULTI30K, "smoke", proxy=PAIRS)
SMS = LstmCorpus("sms-spam", "SMS", "SMS", replace(_words("sms-spam"), held_out=1 - 3500 / 5574), from_scale="smoke")
CORPORA = (
    LstmCorpus("imdb", "IMDB", "IMDB", _words("imdb"), proxy=SLOW),
    LstmCorpus("yelp", "Yelp, a sample", "Yelp", _words("yelp"), tags=OTHER, proxy=SLOW),
    LstmCorpus("ag-news-sample", "AG News, a sample", "AG News", _words("ag-news-sample"), tags=OTHER),
    LstmCorpus("20newsgroups", "20 Newsgroups", "20 NG", _words("20newsgroups"), from_scale="small"),
    SST,
    LstmCorpus("amazon", "Amazon, labelled part", "Amzn", _words("amazon"), tags=OTHER, proxy=SLOW),
    MULTI,
    LstmCorpus("europarl-de-en", "IWSLT14, Europarl de-en", "IWSLT14", _subwords("europarl", "de-en", 160_000), IWSLT14,
           tags=OTHER, proxy=PAIRS),
    LstmCorpus("europarl-it-pt", "News it-pt, Europarl", "News It-Pt", _subwords("europarl", "it-pt", 21_572), IT_PT,
           tags=OTHER, proxy=PAIRS),
    LstmCorpus("europarl-en-nl", "News en-nl, Europarl", "News En-Nl", _subwords("europarl", "en-nl", 52_070), EN_NL,
           tags=OTHER, proxy=PAIRS),
    LstmCorpus("europarl-en-pt", "News en-pt, Europarl", "News En-Pt", _subwords("europarl", "en-pt", 48_538), EN_PT,
           tags=OTHER, proxy=PAIRS),
)  # fmt: skip
