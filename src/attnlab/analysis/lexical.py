"""Does attention point to the word that it translates? α beside the lexical probe β (Snell et al. 2021, §2.2, §3).

    β_{t,l} = N([h_l, s_t])_{y_t}             eq. 4: the probability of the right word if only position l is attended
    β_l     = σ((2y − 1) W·h_l)               eq. 9: the same in classification

A record holds log β; A and τ_b depend only on the order within a row. A(α, β) near 1 means that the position with the
largest weight is among those that predict the word best. The table has the value expected by chance beside it.
"""

import pandas as pd

from attnlab.analysis.probe_scores import scores
from attnlab.records.record import Record


def lexical(record: Record, *, layer: int = -1) -> pd.DataFrame:
    """Return weight and beta of every target and source position; probe_scores.py describes the columns."""
    return scores(record, ["beta"], layer=layer).table()


def summary(record: Record, *, top: float = 0.05, layer: int = -1) -> pd.DataFrame:
    """Return A(α, β) and τ_b(α, β) as one row."""
    return scores(record, ["beta"], layer=layer).summary([("weight", "beta")], top)
