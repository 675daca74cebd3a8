"""The known numbers of Heo & Choi 2024. Its full text is not available, so the other numbers are unknown, not zero."""

PTB = {"softmax": 108.26, "dagpam": 106.38}  # perplexity of the 15-layer model
WIKITEXT103 = {"softmax": 25.96, "dagpam": 25.33}  # of the 8-layer model
IWSLT14_PRE = {"softmax": 28.54, "dagpam": 29.25}  # BLEU, English to German, Pre-LN
