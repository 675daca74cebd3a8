"""The texts of the study, and how models are trained on them: every attention has the same recipe.

The paper's widths, learning rates and steps are not known, so the tags of all rows name another model. Deep models are
trained with a lower learning rate and a longer warm-up than the 4 layers of experiments/recipes.py.
"""

from attnlab.experiments import recipes
from attnlab.experiments.corpora import ARTIFICIAL, StudyCorpus

SIZES = ("other model",)
OTHER = ("other data", "other model")

TINY = {**recipes.TINY, "heads": "2", "steps": "40", "evaluate_every": "40", "checkpoint_every": "40"}
LITTLE = {"heads": "2", "steps": "300", "checkpoint_every": "300"}
LITTLE_WORDS = {**recipes.LITTLE_PENN_TREEBANK, **LITTLE}
WORDS = {
    **recipes.PENN_TREEBANK, **recipes.FREQUENT, "lr": "1e-3", "warmup": "800", "steps": "5000",
    "evaluate_every": "250",
}  # fmt: skip
BYTES = {
    **WORDS, "data": "enwik8", "block": "512", "context": "256", "layers": "8", "steps": "2000", "dropout": "0.1",
    "batch_tokens": "16384", "evaluate_every": "1000",
}  # fmt: skip
LONG = "2,000 updates of 16,384 bytes a run, each scored on 5,000,000 bytes"
ARTIFICIAL_TEXT = {"data": ARTIFICIAL, "block": "16", "context": "8"}

DEEP = (  # 15 layers, with weights kept during training for the gradients
    StudyCorpus(
        "ptb", "Penn Treebank, 15 layers", "language",
        {"small": {**LITTLE_WORDS, "layers": "15", "width": "32", "feed_forward": "64", "steps": "150",
                   "evaluate_every": "150", "evaluate_at": "(10,30,75,150)"},
         "full": {**WORDS, "layers": "15", "evaluate_at": "(50,100,200,500,1000,2000,3500,5000)"}},
        tags=SIZES,
    ),
    StudyCorpus(
        ARTIFICIAL, "artificial text, 5 layers", "language",
        {"smoke": {**TINY, **ARTIFICIAL_TEXT, "layers": "5", "evaluate_at": "(10,40)"}}, tags=OTHER,
    ),
)  # fmt: skip

LANGUAGE = (  # 8 layers
    StudyCorpus(
        "wikitext-103", "WikiText-103, 8 layers", "language", {"full": {"model": "wikitext103", "layers": "8"}},
        asked="286,000 updates of 65,536 tokens a run", lacking="the text of WikiText-103 is",
    ),
    StudyCorpus(
        "wikitext-2", "WikiText-2, 8 layers", "language",
        {"full": {**WORDS, "data": "wikitext-2", "layers": "8", "steps": "6000"}}, tags=OTHER,
    ),
    StudyCorpus("enwik8", "enwik8, 8 layers", "language", {"full": BYTES}, tags=SIZES, asked=LONG),
    StudyCorpus(
        "ptb", "Penn Treebank, 8 layers", "language",
        {"small": {**LITTLE_WORDS, "layers": "8"}, "full": {**WORDS, "layers": "8"}}, tags=OTHER,
    ),
    StudyCorpus(
        ARTIFICIAL, "artificial text, 3 layers", "language", {"smoke": {**TINY, **ARTIFICIAL_TEXT, "layers": "3"}},
        tags=OTHER,
    ),
)  # fmt: skip

TRANSLATION = (  # English to German
    StudyCorpus(
        "iwslt14", "IWSLT14 en→de", "translation", {"full": {"model": "iwslt14", "pair": "en-de"}},
        asked="25,000 updates of 16,384 tokens a run", lacking="the training pairs of IWSLT14 are",
    ),
    StudyCorpus(
        "europarl", "Europarl en→de", "translation", {"full": {**recipes.EUROPARL, "pair": "en-de"}}, tags=OTHER
    ),
    StudyCorpus(
        "multi30k", "Multi30k en→de", "translation",
        {"small": {**recipes.LITTLE_MULTI30K, **LITTLE, "pair": "en-de"},
         "full": {**recipes.MULTI30K, **recipes.FREQUENT, "pair": "en-de"}},
        tags=OTHER,
    ),
    StudyCorpus(
        "lexicon", "artificial language pair", "synthetic",
        {"smoke": {**TINY, "data": "lexicon", "examples": "1200", "held_out": "60"}}, tags=OTHER,
    ),
)  # fmt: skip
NAMES = tuple(dict.fromkeys(corpus.name for corpus in (*DEEP, *LANGUAGE, *TRANSLATION)))
