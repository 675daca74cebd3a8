"""Which words move the prediction? The saliency Δ beside α and β (Snell et al. 2021, §5.1).

    Δ_{t,l} = e_l · ∂ log p(y_t) / ∂e_l       to first order, what the right word gains from the embedding e_l

Δ is positive if the word at l is evidence for y_t. The authors' released code reverses the sign in classification; here
it is as above. A(Δ, β) tells whether the most salient word alone predicts the right word.
"""

import pandas as pd

from attnlab.analysis.probe_scores import scores
from attnlab.records.record import Record


def saliency(record: Record, *, layer: int = -1) -> pd.DataFrame:
    """Return weight, beta and saliency of every target and source position; probe_scores.py describes the columns."""
    return scores(record, ["beta", "saliency"], layer=layer).table()


def summary(record: Record, *, top: float = 0.05, layer: int = -1) -> pd.DataFrame:
    """Return A and τ_b of (Δ, β) and of (α, Δ), one row each."""
    pairs = [("saliency", "beta"), ("weight", "saliency")]
    return scores(record, ["beta", "saliency"], layer=layer).summary(pairs, top)
