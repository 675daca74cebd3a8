"""Kobayashi et al. 2020, Attention is Not Only a Weight: its tables and figures, one item each."""

from attnlab.experiments.study import Item, Study
from attnlab.studies.kobayashi2020.bert import OPTIONS, figure3, figure4, frequency, table1, table2
from attnlab.studies.kobayashi2020.ibm1_baseline import ibm1
from attnlab.studies.kobayashi2020.paper_recipe import alignment_by_paper_recipe
from attnlab.studies.kobayashi2020.word_alignment import OPTIONS as ATTENTION
from attnlab.studies.kobayashi2020.word_alignment import alignment, mechanisms

BERT = {
    "table1": Item("Table 1: how ‖f(x)‖ varies", table1, options=OPTIONS),
    "figure3": Item("Figure 3: weights and norms by category", figure3, options=OPTIONS),
    "table2": Item("Table 2: Spearman's ρ of α and ‖f(x)‖", table2, options=OPTIONS),
    "figure4": Item("Figure 4: [SEP], head by head", figure4, options=OPTIONS),
    "frequency": Item("§4.3: frequent words have short vectors", frequency, options=OPTIONS),
}

ALIGNMENT = {
    "alignment": Item("§5: word alignment by weights and norms", alignment, edition=2),
    "alignment-ibm1": Item("§5: IBM Model 1 on the same text", ibm1, {"smoke": 1, "small": 1, "full": 1}, edition=2),
    "alignment-mechanisms": Item(
        "§5, with other attention", mechanisms, {"smoke": 1, "small": 3, "full": 3}, edition=2, options=ATTENTION
    ),
    "alignment-paper-recipe": Item("§5, with the authors' recipe and the best BLEU", alignment_by_paper_recipe),
}

STUDY = Study(
    "kobayashi2020",
    "Kobayashi et al. 2020, Attention is Not Only a Weight: Analyzing Transformers with Vector Norms",
    {**BERT, **ALIGNMENT},
)
