"""The texts of the study and how models are trained on them; every attention by the same recipe.

The official recipes are the authors' (models/presets.py, training/recipe.py). Those of multi30k and the Penn Treebank
at full scale are those of benchmarks/learning.py, settled on validation with softmax attention; the item rates looks
for the rate of each attention. Europarl has the model of iwslt14, on as many pairs as that has, with the same number of
tokens in an update.
"""

from attnlab.experiments.corpora import ARTIFICIAL, StudyCorpus

OTHER = ("other data", "other model")
QUIET = {"log_every": "50", "compile": "no"}

TINY = {
    "layers": "2", "width": "32", "heads": "4", "feed_forward": "64", "dropout": "0", "lr": "5e-3", "warmup": "10",
    "steps": "60", "evaluate_every": "60", "checkpoint_every": "60", **QUIET,
}  # fmt: skip
LITTLE = {
    "layers": "2", "width": "64", "heads": "4", "feed_forward": "128", "dropout": "0.1", "lr": "3e-3", "warmup": "50",
    "steps": "400", "evaluate_every": "100", "checkpoint_every": "400", **QUIET,
}  # fmt: skip
WORDS = {
    "block": "128", "context": "96", "layers": "4", "width": "256", "heads": "4", "feed_forward": "1024",
    "dropout": "0.3", "attention_dropout": "0.1", "lr": "2e-3", "warmup": "400", "steps": "4000",
    "schedule": "cosine", "clip": "1.0", "weight_decay": "0.01", "optimiser": "adamw", "batch_tokens": "4096",
    "evaluate_every": "200", "checkpoint_every": "1000", **QUIET,
}  # fmt: skip
PAIRS = {
    "layers": "3", "width": "256", "heads": "4", "feed_forward": "512", "dropout": "0.3", "lr": "1e-3",
    "warmup": "1000", "steps": "4000", "label_smoothing": "0.1", "batch_tokens": "4096", "evaluate_every": "250",
    "checkpoint_every": "1000", **QUIET,
}  # fmt: skip
EUROPARL = {
    "model": "iwslt14", "data": "europarl", "pair": "de-en", "subwords": "bpe", "vocabulary": "10000", "joint": "false",
    "max_length": "256", "too_long": "skip", "steps": "10000", "batch_tokens": "16384", "accumulate": "1",
    "evaluate_every": "500", "checkpoint_every": "1000",
}  # fmt: skip

LANGUAGE = (
    StudyCorpus(
        "wikitext-103", "WikiText-103", "language", {"full": {"model": "wikitext103"}},
        asked="286,000 updates of 65,536 tokens a run",
    ),
    StudyCorpus(
        "wikitext-2", "WikiText-2", "language", {"full": {"data": "wikitext-2", **WORDS, "steps": "6000"}}, tags=OTHER
    ),
    StudyCorpus(
        "ptb", "Penn Treebank", "language",
        {"small": {"data": "ptb", "block": "64", "context": "32", "batch_tokens": "1024", **LITTLE},
         "full": {"data": "ptb", **WORDS}},
        tags=OTHER,
    ),
    StudyCorpus(
        ARTIFICIAL, "artificial text", "language",
        {"smoke": {"data": ARTIFICIAL, "block": "16", "context": "8", "batch_tokens": "512", **TINY}}, tags=OTHER,
    ),
)  # fmt: skip

TRANSLATION = (
    StudyCorpus(
        "iwslt14", "IWSLT14 de→en", "translation", {"full": {"model": "iwslt14"}},
        asked="25,000 updates of 16,384 tokens a run",
    ),
    StudyCorpus(
        "wmt14", "WMT14 en→de", "translation", {"full": {"model": "wmt14"}},
        asked="275,000 updates of 32,768 tokens a run",
    ),
    StudyCorpus("europarl", "Europarl de→en", "translation", {"full": EUROPARL}, tags=("other data",)),
    StudyCorpus(
        "multi30k", "Multi30k de→en", "translation",
        {"small": {"data": "multi30k", "most_train": "5000", "vocabulary": "2000", "batch_tokens": "1024", **LITTLE},
         "full": {"data": "multi30k", **PAIRS}},
        tags=OTHER,
    ),
    StudyCorpus(
        "lexicon", "artificial language pair", "synthetic",
        {"smoke": {"data": "lexicon", "examples": "1200", "held_out": "60", "batch_tokens": "512", **TINY}}, tags=OTHER,
    ),
)  # fmt: skip
LIKE_IWSLT14 = tuple(corpus for corpus in TRANSLATION if corpus.name != "wmt14")  # of Tables 3 and 4
NAMES = tuple(corpus.name for corpus in (*LANGUAGE, *TRANSLATION))
