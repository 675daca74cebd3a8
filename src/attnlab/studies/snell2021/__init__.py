"""Snell et al. 2021, Approximating How Single Head Attention Learns: its tables and figures, one item each."""

from attnlab.studies.snell2021.datasets import table9
from attnlab.studies.snell2021.derivative import derivative
from attnlab.studies.study import Item, Study

STUDY = Study(
    "snell2021",
    "Snell et al. 2021, Approximating How Single Head Attention Learns",
    {
        "derivative": Item("§4.1, A.2: the derivative at initialisation", derivative),
        "table9": Item("Table 9: the data sets", table9),
    },
)
