"""The texts of the study, and how models are trained on them: every attention has the same recipe.

The recipes of the paper's data are the authors' (models/presets.py, training/recipe.py). Those of other data are in
experiments/recipes.py; the item rates searches the learning rate of each attention.
"""

from attnlab.experiments import recipes
from attnlab.experiments.corpora import ARTIFICIAL, StudyCorpus

OTHER = ("other data", "other model")
LONGER = "twice the updates of the row without it"
WORDS = {**recipes.PENN_TREEBANK, **recipes.FREQUENT}

LANGUAGE = (
    StudyCorpus(
        "wikitext-103", "WikiText-103", "language", {"full": {"model": "wikitext103"}},
        asked="286,000 updates of 65,536 tokens a run", lacking="the text of WikiText-103 is",
    ),
    StudyCorpus(
        "wikitext-2", "WikiText-2", "language", {"full": {**WORDS, "data": "wikitext-2", "steps": "6000"}}, tags=OTHER
    ),
    StudyCorpus("ptb", "Penn Treebank", "language", {"small": recipes.LITTLE_PENN_TREEBANK, "full": WORDS}, tags=OTHER),
    StudyCorpus(
        "ptb-long", "Penn Treebank, 8,000 updates", "language", {"full": {**WORDS, "steps": "8000"}}, tags=OTHER,
        asked=LONGER,
    ),
    StudyCorpus(
        ARTIFICIAL, "artificial text", "language",
        {"smoke": {**recipes.TINY, "data": ARTIFICIAL, "block": "16", "context": "8"}}, tags=OTHER,
    ),
)  # fmt: skip

DEEP_WORDS = {**WORDS, "layers": "16", "warmup": "800", "steps": "5000", "evaluate_every": "250"}
NAG = {"optimiser": "nag", "lr": "1.0", "clip": "0.1", "weight_decay": "0.0", "min_lr": "1e-4"}  # as on WikiText-103
DEEP = (  # the paper's depth, at a rate for small models and at the paper's
    StudyCorpus("ptb-deep", "Penn Treebank, 16 layers, AdamW at 0.001", "language",
                {"full": {**DEEP_WORDS, "lr": "1e-3"}}, tags=OTHER),
    StudyCorpus("ptb-deep-nag", "Penn Treebank, 16 layers, NAG at 1.0", "language", {"full": {**DEEP_WORDS, **NAG}},
                tags=OTHER),
    StudyCorpus(
        ARTIFICIAL, "artificial text, 6 layers, NAG at 1.0", "language",
        {"smoke": {**recipes.TINY, **NAG, "data": ARTIFICIAL, "block": "16", "context": "8", "layers": "6"}},
        tags=OTHER,
    ),
)  # fmt: skip

TRANSLATION = (
    StudyCorpus(
        "iwslt14", "IWSLT14 de→en", "translation", {"full": {"model": "iwslt14"}},
        asked="25,000 updates of 16,384 tokens a run", lacking="the training pairs of IWSLT14 are",
    ),
    StudyCorpus(
        "wmt14", "WMT14 en→de", "translation", {"full": {"model": "wmt14"}},
        asked="275,000 updates of 32,768 tokens a run", lacking="the training pairs of WMT14 are",
    ),
    StudyCorpus("europarl", "Europarl de→en", "translation", {"full": recipes.EUROPARL}, tags=("other data",)),
    StudyCorpus(
        "europarl-480k", "Europarl de→en, 480,000 pairs", "translation",
        {"full": {**recipes.EUROPARL, "data": "europarl-480k"}}, tags=("other data",),
        asked="10,000 updates of 16,384 tokens a run",
    ),
    StudyCorpus(
        "multi30k", "Multi30k de→en", "translation",
        {"small": recipes.LITTLE_MULTI30K, "full": {**recipes.MULTI30K, **recipes.FREQUENT}}, tags=OTHER,
    ),
    StudyCorpus(
        "multi30k-long", "Multi30k de→en, 8,000 updates", "translation",
        {"full": {**recipes.MULTI30K, **recipes.FREQUENT, "steps": "8000"}}, tags=OTHER, asked=LONGER,
    ),
    StudyCorpus(
        "lexicon", "artificial language pair", "synthetic",
        {"smoke": {**recipes.TINY, "data": "lexicon", "examples": "1200", "held_out": "60"}}, tags=OTHER,
    ),
)  # fmt: skip
LIKE_IWSLT14 = tuple(corpus for corpus in TRANSLATION if corpus.name != "wmt14")  # of Tables 3 and 4
NAMES = tuple(corpus.name for corpus in (*LANGUAGE, *DEEP, *TRANSLATION))
