"""Signed contributions: the part of an attention's output that each key accounts for, with its sign.

The output is a sum of vectors, y_i = Σ_h Σ_j c_hij + b with c_hij = α_hij (v_hj A_hi) W_h (`contribution`). Projected
onto the output itself,

    s_hij = ⟨c_hij, y_i⟩ / ‖y_i‖²        Σ_h Σ_j s_hij + ⟨b, y_i⟩ / ‖y_i‖² = 1

A norm says how large a vector is; s says how much of it points the way the output points. Below 0, the key works
against the output, and vectors that cancel each other get s that cancel. No vector (h,i,j,e) is computed:

    s_hij = α_hij ⟨v_hj, p_hi⟩        p_hi = A_hi W_h y_iᵀ / ‖y_i‖²

With residual=True, y_i = Σ_h Σ_j c_hij + r_i + b is the state after the attention, and r_i has a share of its own.
"""

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.block import read_part
from attnlab.analysis.contribution import check_linear, is_linear
from attnlab.analysis.sums import Analysis, build_pair_mask, check_record, mean_over_queries, read_token_masks
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import Layer, Record, apply_turning

COLUMNS = ("share", "negative_share", "first_token_share")


@dataclass(frozen=True, eq=False)
class SignedShares:
    """The shares of one layer's output. All parts of a query sum to 1."""

    head: Tensor  # (b,h,i,j)
    bias: Tensor  # (b,i)
    residual: Tensor  # (b,i); 0 without the residual

    @property
    def layer(self) -> Tensor:
        """The heads together, (b,i,j), without the residual."""
        return self.head.sum(1)

    @property
    def error(self) -> float:
        """The completeness error: the largest |sum of all parts − 1|, over queries with an output."""
        total = self.layer.sum(-1) + self.bias + self.residual
        return float((total - 1).abs().where(total != 0, 0.0).max()) if total.numel() else 0.0


def signed_shares(layer: Layer, *, residual: bool = False) -> SignedShares:
    """Compute the signed contributions of one layer. Raises ValueError if its output is not a sum over keys."""
    check_linear(layer)
    projection, y = widen(layer.output_weight), widen(layer.outputs)
    r = widen(read_part(layer, "residual")) if residual else torch.zeros_like(y)
    y = y + r
    square = y.square().sum(-1, keepdim=True)  # (b,i,1)
    direction = y / square.masked_fill(square == 0, 1.0)
    along = torch.einsum("hde,bie->bhid", projection, direction)
    if layer.turning is not None:
        turning = widen(layer.turning)
        along = apply_turning(turning.mT if turning.dim() == 5 else turning, along)
    products = along @ widen(layer.values).mT  # (b,h,i,j)
    for rows, weights in layer.chunks():
        products[:, :, rows] *= weights
    bias = torch.zeros_like(direction[..., 0]) if layer.output_bias is None else direction @ widen(layer.output_bias)
    return SignedShares(products, bias, (r * direction).sum(-1))


class Signed(Analysis):
    """Signed contributions of each head over a corpus.

    share               the head's part of the layer's output, Σ_j s_hij; mean over queries, then over examples
    negative_share      the part that works against the output, Σ_j max(0, −s_hij)
    first_token_share   s of the first token
    completeness_error  the largest |sum of all parts − 1| of the layer; mean over batches
    """

    def add(self, record: Record) -> None:
        for layer in check_record(record, "signed").layers:
            if not is_linear(layer):
                continue
            queries, keys = read_token_masks(record, layer)
            shares = signed_shares(layer)
            part = shares.head * build_pair_mask(layer, queries, keys)  # (b,h,i,j)
            values = (part.sum(-1), (-part).clamp_min(0).sum(-1), part[..., 0])
            for name, x in zip(COLUMNS, values, strict=True):
                self.accumulate(layer, name, mean_over_queries(x, queries).sum(0))
            self.accumulate(layer, "examples", torch.tensor(len(queries)))
            self.accumulate(layer, "error", torch.tensor(shares.error * len(queries)))

    def table(self) -> pd.DataFrame:
        rows = []
        for kind, layer in self.list_layers():
            count = self.get(kind, layer, "examples")
            values = {name: self.get(kind, layer, name) / count for name in COLUMNS}
            error = float(self.get(kind, layer, "error") / count)
            for head in range(len(values["share"])):
                row = {name: float(x[head]) for name, x in values.items()}
                rows.append({"kind": kind, "layer": layer, "head": head} | row | {"completeness_error": error})
        return pd.DataFrame(rows)
