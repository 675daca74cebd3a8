"""The figures of Heo & Choi 2024 that are known. Its full text could not be had: the others are unknown, not zero."""

PTB = {"softmax": 108.26, "dagpam": 106.38}  # perplexity of the 15-layer model
WIKITEXT103 = {"softmax": 25.96, "dagpam": 25.33}  # of the 8-layer model
IWSLT14_PRE = {"softmax": 28.54, "dagpam": 29.25}  # BLEU, English to German, Pre-LN
