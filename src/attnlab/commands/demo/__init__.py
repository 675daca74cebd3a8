"""The demo: what attention is, how it is learnt and what it is good for, in two minutes and one page.

Several attentions learn to translate the lexicon, an artificial language pair whose true word alignments are known,
with several seeds each; a study of Snell et al. shows which sequences teach attention at all. Every analysis is run on
what came out.
"""
