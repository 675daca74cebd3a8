"""Snell et al. 2021, Approximating How Single Head Attention Learns: its tables and figures, one item each."""

from attnlab.experiments.study import Item, Scale, Study
from attnlab.studies.snell2021.additive import a1
from attnlab.studies.snell2021.agreements import table2, table3, table4, table6, table7, table8
from attnlab.studies.snell2021.copying import fig3, mixtures, section62
from attnlab.studies.snell2021.datasets import table9
from attnlab.studies.snell2021.derivative import derivative
from attnlab.studies.snell2021.frozen import table10
from attnlab.studies.snell2021.heads import fig6
from attnlab.studies.snell2021.keyword import fig7
from attnlab.studies.snell2021.model_sizes import a8
from attnlab.studies.snell2021.prediction import prediction
from attnlab.studies.snell2021.sms import a9
from attnlab.studies.snell2021.training_curves import fig2

DATA = ("data",)  # data=sst,imdb selects these corpora only
MANY: dict[Scale, int] = {"smoke": 3, "small": 5, "full": 20}

COUNTS = dict.fromkeys(("fig1", "fig4", "fig5", "fig8"), "attnlab diagnose draws it, for your own sentences")
ELSEWHERE = {"table1": "it is a list of symbols", "table5": "it is in table2", **COUNTS}

STUDY = Study(
    "snell2021",
    "Snell et al. 2021, Approximating How Single Head Attention Learns",
    {
        "derivative": Item("§4.1, A.2: the derivative at initialisation", derivative),
        "table2": Item("Tables 2 and 5: agreement of attention and probes", table2, options=DATA),
        "table3": Item("Table 3: the same by Kendall's τ", table3, options=DATA),
        "table4": Item("Table 4: by Kendall's τ and BLEU", table4, options=DATA),
        "table6": Item("Table 6: by BLEU", table6, options=DATA),
        "table7": Item("Table 7: on training examples", table7, options=DATA),
        "table8": Item("Table 8: on training examples, by BLEU", table8, options=DATA),
        "fig2": Item("Figure 2, A.7: agreement over training", fig2, options=DATA),
        "table10": Item("Table 10, A.6: β frozen", table10, options=DATA),
        "a1": Item("A.1: the optimal attention", a1),
        "a8": Item("A.8: numbers of parameters of the models", a8),
        "a9": Item("A.9: SMS Spam", a9),
        "fig3": Item("Figure 3, A.3: learning to copy", fig3, seeds=MANY),
        "fig6": Item("Figure 6, §5.2: several heads", fig6, seeds=MANY, edition=2, options=("form",)),
        "fig7": Item("Figure 7, §6.1: does β stay local?", fig7, seeds=MANY, edition=2),
        "prediction": Item("What attnlab diagnose predicts, and what seeds learn", prediction, seeds=MANY, edition=6),
        "section62": Item("§6.2: copying and a fixed permutation", section62, seeds=MANY),
        "mixtures": Item("Why? Figure 3's mixture, trained for longer", mixtures, seeds=MANY),
        "table9": Item("Table 9: the data sets", table9, edition=2),
    },
    ELSEWHERE,
)
