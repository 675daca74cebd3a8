"""The data sets of Tables 2–8 and 10, and how models are trained on them at each scale (A.5, A.8, the authors' code).

Several models are trained for every set and seed, each with its role:

    A           its attention α, at its best checkpoint, is compared with that of the others
    B … F       other random initializations: α̂(τ), whose agreement with α puts the numbers into context (eq. 11)
    uniform     attention that stays uniform: its probe is β^uf(τ)
    frozen      only the attention is trained: it is α^fr(τ) (A.6)
    additive    the translator of eq. 32 (A.1)

In translation the paper compares with B alone. Training stops at the last evaluated checkpoint. A set that is not
available is replaced by another, in its own row with the tag "other data". Users who have the paper's set name it:
data=ag-news, iwslt14, news-it-pt, news-en-nl or news-en-pt adds its official row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnlab.experiments.study import Scale, Setting
from attnlab.models.presets import PRESETS
from attnlab.tasks.classification import ClassificationConfig
from attnlab.tasks.translation import TranslationConfig
from attnlab.training.recipe import DECODING, TRAINING, DecodeConfig, Recipe

ROLES = {"A": 20, "B": 13, "C": 14, "D": 15, "E": 16, "F": 17, "uniform": 12, "frozen": 18, "additive": 19}
CHANGES = {"uniform": {"attention": "uniform"}, "frozen": {"trained": "attention"}, "additive": {"combine": "add"}}
SEEDS_APART = 100  # role r of seed s has the random seed 100 s + ROLES[r]; for s = 0, A to F and uniform as the authors

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
    """The size of an experiment at a scale; None: as in the paper."""

    train: int | None = None  # training examples
    measured: int | None = None  # measured examples of each part
    longest: int | None = None  # largest number of tokens; longer texts are truncated, longer sentences left out
    subwords: int = 8000
    width: int | None = None
    rate: float | None = None  # learning rate
    measured_at: tuple[int, ...] | None = None  # updates
    comparisons: str = "BCDEF"  # of a classifier; a translator has B
    proxy_epochs: int | None = None
    output: int = 100  # largest number of tokens of a translation


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
    """A data set, and what differs from the other sets in training on it."""

    name: str
    row: str  # its name in our tables
    published: str  # its name in the paper's
    data: ClassificationConfig | TranslationConfig
    measured_at: tuple[int, ...] = CLASSIFIED  # updates after which the authors evaluated
    from_scale: Scale = "full"  # the smallest scale at which it is run
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
        """Return the recipe of a role with a seed."""
        size, preset = self.size(scale), "lstm" if self.translates else "lstm-classifier"
        assert size.measured_at is not None
        model: dict[str, Any] = dict(CHANGES.get(role, {}))
        if size.width is not None:
            model |= {"width": size.width, "embedding_width": size.width}
        training, decoding = TRAINING[preset], DECODING.get(preset, DecodeConfig())
        steps = size.measured_at[-1]
        training = replace(
            training,
            lr=size.rate or training.lr,
            steps=steps,
            seed=SEEDS_APART * seed + ROLES[role],
            evaluate_every=steps,
            evaluate_at=tuple(step for step in size.measured_at if step),
            checkpoint_every=min(steps, 2000),
            compile="no",  # compiling many models in one process gains little
            rungs=16,  # lengths vary from 20 to 10,000 words
        )
        task = "translation" if self.translates else "classification"
        return Recipe(task, self._limit_data(size), replace(PRESETS[preset], **model), training, decoding)

    def _limit_data(self, size: ScaleSize) -> ClassificationConfig | TranslationConfig:
        limits = [limit for limit in (size.train, self.data.most_train) if limit is not None]
        data = replace(self.data, most_train=min(limits, default=None))
        if isinstance(data, TranslationConfig):
            data = replace(data, vocabulary=size.subwords)
        if size.longest is None:
            return data
        return replace(data, max_length=size.longest, too_long="skip" if self.translates else "truncate")


def make_texts(data: str) -> ClassificationConfig:
    return ClassificationConfig(data=data)


def make_pairs(data: str, pair: str, limit: int | None = None) -> TranslationConfig:
    """limit: the number of training pairs, if not all."""
    return TranslationConfig(data=data, pair=pair, most_train=limit, source_begin=True)


OTHER = ("other data",)
NO_GLOVE = ("other vocabulary",)  # without the rare words that the authors keep because GloVe has a vector for them
SLOW, PAIRS = (5e-5, 60), (1e-3, 30)

SST = LstmCorpus("sst", "SST, official parts", "SST", make_texts("sst"), from_scale="smoke", tags=OTHER)
MULTI = LstmCorpus("multi30k", "Multi30k", "Multi30k", make_pairs("multi30k", "de-en"), MULTI30K, "smoke", proxy=PAIRS)
SMS = LstmCorpus(
    "sms-spam", "SMS", "SMS", replace(make_texts("sms-spam"), held_out=1 - 3500 / 5574), from_scale="smoke"
)
CORPORA = (
    LstmCorpus("imdb", "IMDB", "IMDB", make_texts("imdb"), proxy=SLOW),
    LstmCorpus("yelp", "Yelp, a sample", "Yelp", make_texts("yelp"), tags=OTHER, proxy=SLOW),
    LstmCorpus("ag-news-sample", "AG News, a sample", "AG News", make_texts("ag-news-sample"), tags=OTHER),
    LstmCorpus("20newsgroups", "20 Newsgroups", "20 NG", make_texts("20newsgroups"), from_scale="small"),
    SST,
    LstmCorpus("amazon", "Amazon, labelled part", "Amzn", make_texts("amazon"), tags=OTHER, proxy=SLOW),
    MULTI,
    LstmCorpus("europarl-de-en", "IWSLT14, Europarl de-en", "IWSLT14", make_pairs("europarl", "de-en", 160_000),
               IWSLT14, tags=OTHER, proxy=PAIRS),
    LstmCorpus("europarl-it-pt", "News it-pt, Europarl", "News It-Pt", make_pairs("europarl", "it-pt", 21_572), IT_PT,
               tags=OTHER, proxy=PAIRS),
    LstmCorpus("europarl-en-nl", "News en-nl, Europarl", "News En-Nl", make_pairs("europarl", "en-nl", 52_070), EN_NL,
               tags=OTHER, proxy=PAIRS),
    LstmCorpus("europarl-en-pt", "News en-pt, Europarl", "News En-Pt", make_pairs("europarl", "en-pt", 48_538), EN_PT,
               tags=OTHER, proxy=PAIRS),
)  # fmt: skip
OFFICIAL = (
    LstmCorpus("ag-news", "AG News", "AG News", make_texts("ag-news")),
    LstmCorpus("iwslt14", "IWSLT14", "IWSLT14", make_pairs("iwslt14", "de-en"), IWSLT14, proxy=PAIRS),
    LstmCorpus(
        "news-it-pt", "News it-pt", "News It-Pt", make_pairs("news-commentary-v14", "it-pt"), IT_PT, proxy=PAIRS
    ),
    LstmCorpus(
        "news-en-nl", "News en-nl", "News En-Nl", make_pairs("news-commentary-v14", "en-nl"), EN_NL, proxy=PAIRS
    ),
    LstmCorpus(
        "news-en-pt", "News en-pt", "News En-Pt", make_pairs("news-commentary-v14", "en-pt"), EN_PT, proxy=PAIRS
    ),
)
# The paper's own sets, for which CORPORA has stand-ins. They run if data= names them: many users lack their files.


def list_corpora(setting: Setting) -> tuple[LstmCorpus, ...]:
    """Return the corpora of the tables, and the official sets that the option data= names."""
    named = setting.options.get("data", "").split(",")
    return (*CORPORA, *(corpus for corpus in OFFICIAL if corpus.name in named))
