"""Recipes that several studies and benchmarks/learning.py share, as settings of `attnlab train`.

MULTI30K and PENN_TREEBANK were tuned on validation with softmax attention. EUROPARL is the model of iwslt14 with the
same number of tokens in an update. A study adds FREQUENT, so that its runs lose little when they are interrupted.
"""

QUIET = {"log_every": "50", "compile": "no"}
FREQUENT = {"checkpoint_every": "1000", **QUIET}

TINY = {
    "layers": "2", "width": "32", "heads": "4", "feed_forward": "64", "dropout": "0", "lr": "5e-3", "warmup": "10",
    "batch_tokens": "512", "steps": "60", "evaluate_every": "60", "checkpoint_every": "60", **QUIET,
}  # fmt: skip
LITTLE = {
    "layers": "2", "width": "64", "heads": "4", "feed_forward": "128", "dropout": "0.1", "lr": "3e-3", "warmup": "50",
    "batch_tokens": "1024", "steps": "400", "evaluate_every": "100", "checkpoint_every": "400", **QUIET,
}  # fmt: skip

MULTI30K = {
    "data": "multi30k", "layers": "3", "width": "256", "heads": "4", "feed_forward": "512", "dropout": "0.3",
    "lr": "1e-3", "warmup": "1000", "label_smoothing": "0.1", "batch_tokens": "4096", "steps": "4000",
    "evaluate_every": "250", "checkpoint_every": "4000", "compile": "no",
}  # fmt: skip
LITTLE_MULTI30K = {"data": "multi30k", "most_train": "5000", "vocabulary": "2000", **LITTLE}
PENN_TREEBANK = {
    "data": "ptb", "block": "128", "context": "96", "layers": "4", "width": "256", "heads": "4",
    "feed_forward": "1024", "dropout": "0.3", "attention_dropout": "0.1", "lr": "2e-3", "warmup": "400",
    "schedule": "cosine", "clip": "1.0", "weight_decay": "0.01", "optimiser": "adamw", "batch_tokens": "4096",
    "steps": "4000", "evaluate_every": "200", "checkpoint_every": "4000", "compile": "no",
}  # fmt: skip
LITTLE_PENN_TREEBANK = {"data": "ptb", "block": "64", "context": "32", **LITTLE}
EUROPARL = {
    "model": "iwslt14", "data": "europarl", "pair": "de-en", "subwords": "bpe", "vocabulary": "10000", "joint": "false",
    "max_length": "256", "too_long": "skip", "batch_tokens": "16384", "accumulate": "1", "steps": "10000",
    "evaluate_every": "500", "checkpoint_every": "1000",
}  # fmt: skip
