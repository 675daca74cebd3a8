"""The texts of the study and how models are trained on them; every attention by the same recipe.

The paper's widths, rates and steps are not known, so all rows are of another model. A model of 15 layers is trained
with a lower rate and a longer warm-up than one of 4 (benchmarks/learning.py), else as that one.
"""

from attnlab.experiments.corpora import ARTIFICIAL, StudyCorpus

SIZES = ("other model",)
OTHER = ("other data", "other model")
QUIET = {"log_every": "50", "compile": "no"}

TINY = {
    "width": "32", "heads": "2", "feed_forward": "64", "dropout": "0", "lr": "5e-3", "warmup": "10", "steps": "40",
    "batch_tokens": "512", "evaluate_every": "40", "checkpoint_every": "40", **QUIET,
}  # fmt: skip
LITTLE = {
    "width": "64", "heads": "2", "feed_forward": "128", "dropout": "0.1", "lr": "3e-3", "warmup": "50",
    "steps": "300", "batch_tokens": "1024", "evaluate_every": "100", "checkpoint_every": "300", **QUIET,
}  # fmt: skip
WORDS = {
    "block": "128", "context": "96", "width": "256", "heads": "4", "feed_forward": "1024", "dropout": "0.3",
    "attention_dropout": "0.1", "lr": "1e-3", "warmup": "800", "steps": "5000", "schedule": "cosine", "clip": "1.0",
    "weight_decay": "0.01", "optimiser": "adamw", "batch_tokens": "4096", "evaluate_every": "250",
    "checkpoint_every": "1000", **QUIET,
}  # fmt: skip
SHORT = {"block": "64", "context": "32"}
ARTIFICIAL_TEXT = {"data": ARTIFICIAL, "block": "16", "context": "8"}

DEEP = (  # 15 layers, and weights kept on the way for the gradients
    StudyCorpus(
        "ptb", "Penn Treebank, 15 layers", "language",
        {"small": {"data": "ptb", **SHORT, **LITTLE, "layers": "15", "width": "32", "feed_forward": "64",
                   "steps": "150", "evaluate_every": "150", "evaluate_at": "(10,30,75,150)"},
         "full": {"data": "ptb", **WORDS, "layers": "15", "evaluate_at": "(50,100,200,500,1000,2000,3500,5000)"}},
        tags=SIZES,
    ),
    StudyCorpus(
        ARTIFICIAL, "artificial text, 5 layers", "language",
        {"smoke": {**ARTIFICIAL_TEXT, **TINY, "layers": "5", "evaluate_at": "(10,40)"}}, tags=OTHER,
    ),
)  # fmt: skip

LANGUAGE = (  # 8 layers
    StudyCorpus(
        "wikitext-103", "WikiText-103, 8 layers", "language", {"full": {"model": "wikitext103", "layers": "8"}},
        asked="286,000 updates of 65,536 tokens a run",
    ),
    StudyCorpus(
        "wikitext-2", "WikiText-2, 8 layers", "language",
        {"full": {"data": "wikitext-2", **WORDS, "layers": "8", "steps": "6000"}}, tags=OTHER,
    ),
    StudyCorpus(
        "ptb", "Penn Treebank, 8 layers", "language",
        {"small": {"data": "ptb", **SHORT, **LITTLE, "layers": "8"}, "full": {"data": "ptb", **WORDS, "layers": "8"}},
        tags=OTHER,
    ),
    StudyCorpus(
        ARTIFICIAL, "artificial text, 3 layers", "language", {"smoke": {**ARTIFICIAL_TEXT, **TINY, "layers": "3"}},
        tags=OTHER,
    ),
)  # fmt: skip

TRANSLATION = (  # English to German
    StudyCorpus(
        "iwslt14", "IWSLT14 en→de", "translation", {"full": {"model": "iwslt14", "pair": "en-de"}},
        asked="25,000 updates of 16,384 tokens a run",
    ),
    StudyCorpus(
        "europarl", "Europarl en→de", "translation",
        {"full": {
            "model": "iwslt14", "data": "europarl", "pair": "en-de", "subwords": "bpe", "vocabulary": "10000",
            "joint": "false", "max_length": "256", "too_long": "skip", "steps": "10000", "batch_tokens": "16384",
            "accumulate": "1", "evaluate_every": "500", "checkpoint_every": "1000",
        }},
        tags=OTHER,
    ),
    StudyCorpus(
        "multi30k", "Multi30k en→de", "translation",
        {"small": {"data": "multi30k", "pair": "en-de", "most_train": "5000", "vocabulary": "2000", **LITTLE,
                   "layers": "2"},
         "full": {
            "data": "multi30k", "pair": "en-de", "layers": "3", "width": "256", "heads": "4", "feed_forward": "512",
            "dropout": "0.3", "lr": "1e-3", "warmup": "1000", "steps": "4000", "label_smoothing": "0.1",
            "batch_tokens": "4096", "evaluate_every": "250", "checkpoint_every": "1000", **QUIET,
         }},
        tags=OTHER,
    ),
    StudyCorpus(
        "lexicon", "artificial language pair", "synthetic",
        {"smoke": {"data": "lexicon", "examples": "1200", "held_out": "60", **TINY, "layers": "2"}}, tags=OTHER,
    ),
)  # fmt: skip
NAMES = tuple(dict.fromkeys(corpus.name for corpus in (*DEEP, *LANGUAGE, *TRANSLATION)))
