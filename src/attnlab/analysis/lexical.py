"""Does attention go where the word can be translated from? α beside the lexical probe β (Snell et al. 2021, §2.2, §3).

    β_{t,l} = N([h_l, s_t])_{y_t}             eq. 4: what the right word would get, if only position l were attended
    β_l     = σ((2y − 1) W·h_l)               eq. 9: the same in classification

A record holds the logarithm of β; only the order within a row matters to A and τ_b. A(α, β) near 1 says that the
position with the largest weight is among those from which the word is best predicted; chance is beside it.
"""

import pandas as pd

from attnlab.analysis.probe_scores import scores
from attnlab.records.record import Record


def lexical(record: Record, *, layer: int = -1) -> pd.DataFrame:
    """weight and beta of every target and source position; probed.py describes the columns."""
    return scores(record, ["beta"], layer=layer).table()


def summary(record: Record, *, top: float = 0.05, layer: int = -1) -> pd.DataFrame:
    """A(α, β) and τ_b(α, β), one row."""
    return scores(record, ["beta"], layer=layer).summary([("weight", "beta")], top)
