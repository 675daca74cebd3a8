"""Snell et al. 2021, Approximating How Single Head Attention Learns: its tables and figures, one item each."""

from attnlab.studies.snell2021.copying import fig3, section62
from attnlab.studies.snell2021.datasets import table9
from attnlab.studies.snell2021.derivative import derivative
from attnlab.studies.snell2021.heads import fig6
from attnlab.studies.snell2021.keyword import fig7
from attnlab.studies.snell2021.prediction import prediction
from attnlab.studies.study import Item, Scale, Study

MANY: dict[Scale, int] = {"smoke": 3, "small": 5, "full": 20}

STUDY = Study(
    "snell2021",
    "Snell et al. 2021, Approximating How Single Head Attention Learns",
    {
        "derivative": Item("§4.1, A.2: the derivative at initialisation", derivative),
        "fig3": Item("Figure 3, A.3: learning to copy", fig3, seeds=MANY),
        "fig6": Item("Figure 6, §5.2: several heads", fig6, seeds=MANY),
        "fig7": Item("Figure 7, §6.1: does β stay local?", fig7, seeds=MANY),
        "prediction": Item("attnlab diagnose against what seeds learn", prediction, seeds=MANY),
        "section62": Item("§6.2: copying and a fixed permutation", section62, seeds=MANY),
        "table9": Item("Table 9: the data sets", table9),
    },
)
