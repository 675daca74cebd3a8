"""Contributions followed through the feed-forward block (Kobayashi et al. 2024).

The feed-forward reads m_i = N(u_i) = Σ_j m_ij + …, m_ij = N_i(c_ij) (`mixing` defines c and N). Integrated gradients
with the baseline 0 distribute its output over these terms, linearly at each query. recording/around.py derives the
slopes, also for gated blocks; the record holds them:

    F_i(m) = ((m W₁)·slope_i [+ (m W₃)·factor_slope_i]) W₂

    feed-forward            ‖F_i(m_ij)‖
    feed-forward-residual   ‖F_i(m_ij) + m_ij‖ in a post-norm block, ‖F_i(m_ij) + c_ij‖ in a pre-norm one
    block                   the same after the norm that closes a post-norm block

Σ_j of the vectors, plus the contribution of the biases, is the block's output. F_i differs between queries, so there is
no Gram form. The vectors are computed for a few queries at a time: O(i j e f) operations, O(j (e + f)) memory a query.
"""

from torch import Tensor

from attnlab.analysis.block import apply_norm, read_part
from attnlab.analysis.vectors import read_vectors
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import Layer


def pass_through(layer: Layer, c: Tensor, rows: slice, to: str) -> Tensor:
    """Pass vectors c (b,i,k,e) of the queries in `rows` through norm and feed-forward, up to the place `to`."""
    m = apply_norm(layer, "norm", c, rows=rows)
    slope = read_part(layer, "feed_forward.slope")[:, rows, None]  # (b,i,1,f)
    inner = (m @ widen(read_part(layer, "feed_forward.inner"))) * slope
    if "feed_forward.factor" in layer.around:
        factor_slope = read_part(layer, "feed_forward.factor_slope")[:, rows, None]
        inner += (m @ widen(read_part(layer, "feed_forward.factor"))) * factor_slope
    out = inner @ widen(read_part(layer, "feed_forward.output"))  # (b,i,k,e)
    if to == "feed-forward":
        return out
    pre = bool(read_part(layer, "feed_forward.pre"))
    out = out + (c if pre else m)
    return out if pre or to != "block" else apply_norm(layer, "closing", out, rows=rows)


def norms_after(layer: Layer, to: str, *, diagonal: bool) -> Tensor:
    """Compute the norms (b,i,j) of contributions at the place `to`; `diagonal`: with the residual."""
    residual = widen(read_part(layer, "residual"))
    b, i, _ = residual.shape
    sizes = residual.new_empty(b, i, layer.grouped_values.shape[2])
    for rows, c in read_vectors(layer, read_part(layer, "feed_forward.inner").shape[-1]):
        if diagonal:
            c[:, :, rows].diagonal(dim1=1, dim2=2).add_(residual[:, rows].mT)
        sizes[:, rows] = pass_through(layer, c, rows, to).norm(dim=-1)
    return sizes
