"""The demo: what attention is, how it is learnt and what it is good for, in two minutes and on one page.

Several attentions learn to translate the lexicon, an artificial language pair with known word alignments, with several
seeds each, and every analysis runs on them. An item of Snell et al. 2021 shows which sequences teach attention at all.
"""
