"""How much a token keeps of itself in each layer, over a corpus: by weights, by norms and by ALTI.

    weight_ratio, norm_ratio   the mixing ratio of `mixing`, maps weight-residual and norm: 0, a token keeps only its
                               own state, 1, it takes only from others
    alti_ratio                 1 − the share of the token itself (`alti`)
    alti_entropy_nats          −Σ_j a_ij ln a_ij of the shares: e^entropy is the number of tokens that a state is from

Each is the mean over queries, then over examples. A map that a block does not have is left out.
"""

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.contribution import is_linear
from attnlab.analysis.diversity import entropy
from attnlab.analysis.mixing import mixing
from attnlab.analysis.sums import Analysis, check_record, mean_over_queries, read_token_masks
from attnlab.records.record import Layer, Record

COLUMNS = ("weight_ratio", "norm_ratio", "alti_ratio", "alti_entropy_nats")


class Sharing(Analysis):
    """The mixing of each layer over a corpus, by three maps."""

    def add(self, record: Record) -> None:
        for layer in check_record(record, "sharing").layers:
            queries, _ = read_token_masks(record, layer)
            for name, value in _measure(layer).items():
                mean = mean_over_queries(value.nan_to_num(0.0)[:, None], queries).sum(0)  # (1,)
                self.accumulate(layer, name, mean)
            self.accumulate(layer, "examples", torch.tensor(len(queries)))

    def table(self) -> pd.DataFrame:
        rows = []
        for kind, layer in self.list_layers():
            count = self.get(kind, layer, "examples")
            held = [name for name in COLUMNS if self.has(kind, layer, name)]
            values = {name: float(self.get(kind, layer, name) / count) for name in held}
            rows.append({"kind": kind, "layer": layer} | values)
        return pd.DataFrame(rows)


def _measure(layer: Layer) -> dict[str, Tensor]:
    """Return each column of one layer, (b,i)."""
    values = {"weight_ratio": mixing(layer, "weight-residual").ratio}
    if is_linear(layer) and "norm.scale" in layer.around:
        alti = mixing(layer, "alti")
        values |= {"norm_ratio": mixing(layer, "norm").ratio, "alti_ratio": alti.ratio}
        values["alti_entropy_nats"] = entropy(alti.map)
    return values
