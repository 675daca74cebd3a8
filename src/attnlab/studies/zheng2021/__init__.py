"""Zheng et al. 2021, Cascaded Head-colliding Attention: its tables and figures, one item each."""

from attnlab.experiments.study import Item, Study
from attnlab.studies.zheng2021.cascade_ablation import rates, section54, table4
from attnlab.studies.zheng2021.coda_models import OPTIONS
from attnlab.studies.zheng2021.forms import forms
from attnlab.studies.zheng2021.language_models import depth, fig2, table1
from attnlab.studies.zheng2021.translators import table2, table3

STUDY = Study(
    "zheng2021",
    "Zheng et al. 2021, Cascaded Head-colliding Attention",
    {
        "table1": Item("Table 1: perplexity of language models", table1, options=OPTIONS),
        "fig2": Item("Figure 2: head diversity of language models", fig2, options=OPTIONS),
        "table2": Item("Table 2: BLEU", table2, options=OPTIONS),
        "table3": Item("Table 3, Figure 3: the number of heads", table3, options=(*OPTIONS, "heads")),
        "table4": Item("Table 4, Figures 4–6: cascade and noise apart", table4, options=OPTIONS),
        "rates": Item("The learning rate, chosen on validation", rates, edition=2, options=OPTIONS),
        "section54": Item("§5.4: head diversity and BLEU", section54, options=OPTIONS),
        "depth": Item("Why? Language models as deep as the paper's, at two rates", depth, options=OPTIONS),
        "forms": Item("Forms of CODA without a published number", forms, options=OPTIONS),
    },
)
