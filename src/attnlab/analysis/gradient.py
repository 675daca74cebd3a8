"""How much gradient passes an attention: the Jacobians of softmax and daGPAM, and the lemmas of Heo & Choi (2024).

For a softmax p of n logits a (their Lemma 2), with its size as the sum of the absolute values of all entries:

    J(p)_jk = ∂p_j/∂a_k = p_j ([j=k] − p_k)        Σ_jk |J_jk| = 2 (1 − Σ_j p_j²) ≤ 2 (1 − 1/n)

The size is 0 if p is at one key, and largest if p is uniform, which is a collapsed layer (Lemma 3): a softmax cannot
have both distinct tokens and large gradients. This holds for the sum of absolute values. It does not hold for the
Frobenius and spectral norms from n = 3 on: they are largest at a tie of two keys. `lemma3` shows both.

For daGPAM, P = (1+λ⁺) softmax(a⁺) − λ⁻ softmax(a⁻), if a⁻ = −a⁺ = −a, which its ReLU and W⁻ may break (Lemma 5):

    J = (1+λ⁺) J(softmax(a)) + λ⁻ J(softmax(−a))       the entries of both have the same signs, so their sizes add

The residuals of input X and output Y of a layer with one head (rank.py) obey, with a factor γ of its attention

    Lemma 1            ‖res(Y)‖ ≤ 4√2 γ/√d · ‖W_QK‖₁ ‖W_V‖ ‖res(X)‖³                W_QK = W_Q W_Kᵀ, norms 1,∞
    Lemma 4, triangle  ‖res(Y)‖ ≤ 4√2 γ/√d · [(1+λ⁺) ‖W⁺_QK‖₁ + λ⁻ ‖W⁻_QK‖₁] ‖W_V‖ ‖res(X)‖³

No source defines γ, so `smallest_gamma` reports which γ suffices for a given layer. The second bound is larger than the
first. That alone proves nothing: a larger upper bound does not mean a larger residual.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.rank import composite_norm, residual
from attnlab.analysis.sums import Sums, build_pair_mask, check_record, mean_over_queries, read_token_masks
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import Record

# mechanisms whose weights are a softmax of logits
SOFTMAX = {"softmax", "dot", "realformer", "coda", "coda-cs", "gated", "fox", "resformer", "xsa"}


def softmax_jacobian(p: Tensor) -> Tensor:
    """Compute J of each row (…,n) of probabilities; (…,n,n)."""
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def softmax_jacobian_size(p: Tensor) -> Tensor:
    """Compute Σ |J| of each row (…,n) without forming J; (…)."""
    return 2.0 * (p.sum(-1).square() - p.square().sum(-1))


def largest_jacobian_size(n: int | Tensor) -> Any:
    """Return the largest possible Σ |J| for n keys: Lemma 3."""
    return 2.0 * (1.0 - 1.0 / n)


def dual_jacobian(logits: Tensor, plus: float, minus: float) -> Tensor:
    """Compute the J of daGPAM at logits a (…,n), with −a in its negative branch; (…,n,n)."""
    positive, negative = (softmax_jacobian((sign * logits).softmax(-1)) for sign in (1.0, -1.0))
    return (1.0 + plus) * positive + minus * negative


def lemma3(sizes: Iterable[int] = (2, 3, 4, 8)) -> pd.DataFrame:
    """Return n, at, and three norms of softmax's J: at the uniform p, at a tie of two keys, and close to one key."""
    rows = []
    for n in sizes:
        if n < 2:
            raise ValueError(f"sizes must be at least 2, got {n}: a softmax over one key has no gradient")
        uniform, tie = torch.full((n,), 1.0 / n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        tie[:2] = 0.5
        sharp = torch.cat([torch.tensor([0.99]), torch.full((n - 1,), 0.01 / (n - 1))]).double()
        for at, p in (("uniform", uniform), ("tie of two", tie), ("0.99 on one", sharp)):
            j = softmax_jacobian(p)
            norms = {"sum_of_absolute": float(j.abs().sum()), "frobenius": float(j.norm())}
            rows.append({"n": n, "at": at} | norms | {"spectral": float(torch.linalg.matrix_norm(j, 2))})
    return pd.DataFrame(rows)


def history(measured: Mapping[int, Iterable[Mapping[str, Any]]]) -> pd.DataFrame:
    """Return step, kind, layer, projection, norm from the rows that attnlab.recording.gradients measured by step."""
    rows = [{"step": step, **row} for step, found in sorted(measured.items()) for row in found]
    return pd.DataFrame(rows, columns=["step", "kind", "layer", "projection", "norm"])


def jacobians(record: Record) -> pd.DataFrame:
    """Return a table with a row for every head: see `Jacobians.table`."""
    return Jacobians().add(record).table()


class Jacobians(Sums):
    """The sizes of softmax's Jacobian over many records. Several processes can merge their sums."""

    @torch.no_grad()
    def add(self, record: Record) -> "Jacobians":
        """Add the examples of one record. Raises ValueError if its weights are not known to be a softmax."""
        mechanism = str(check_record(record, "jacobians").meta.get("mechanism", ""))
        if not {name.strip() for name in mechanism.split(",")} <= SOFTMAX:
            raise ValueError(
                f"jacobians needs softmax weights, and those of {mechanism or 'this record'} are not known to be; "
                f"supported: {', '.join(sorted(SOFTMAX))}"
            )
        for layer in record.layers:
            tokens = read_token_masks(record, layer)
            keys = torch.zeros_like(tokens[0], dtype=torch.int64)  # (b,i) number of keys that a query sees
            size = widen(layer.context).new_zeros(layer.context.shape[:3])
            for rows, weights in layer.chunks():
                counted = build_pair_mask(layer, *tokens, rows)
                keys[:, rows] = counted[:, 0].sum(-1)
                size[:, :, rows] = softmax_jacobian_size(widen(weights).where(counted, 0.0))
            queries, keys = keys > 0, keys.clamp_min(1)[:, None]
            largest = largest_jacobian_size(keys.to(size.dtype)).expand_as(size)
            self.accumulate(layer, "size", mean_over_queries(size, queries).sum(0))
            self.accumulate(layer, "largest", mean_over_queries(largest, queries).sum(0))
            self.accumulate(layer, "examples", queries.any(1).sum())
        return self

    def table(self) -> pd.DataFrame:
        """Return kind, layer, head, jacobian_size = Σ|J|, largest_size for uniform weights, and share_of_largest.

        Values are means over the queries of a sentence, then over sentences.
        """
        frames = []
        for kind, layer in self.list_layers():
            count = self.get(kind, layer, "examples").clamp_min(1)
            size, largest = (self.get(kind, layer, what) / count for what in ("size", "largest"))
            columns = {"jacobian_size": size.numpy(), "largest_size": largest.numpy()}
            columns["share_of_largest"] = (size / largest).numpy()
            frames.append(pd.DataFrame({"kind": kind, "layer": layer, "head": range(len(size))} | columns))
        return pd.concat(frames, ignore_index=True)


def residual_bound(gamma: float, qk: float, value: float, size: float, head_dim: int) -> float:
    """Compute the right side of Lemma 1 from qk = ‖W_QK‖₁, value = ‖W_V‖_{1,∞}, size = ‖res(X)‖_{1,∞}.

    With qk = (1+λ⁺) ‖W⁺_QK‖₁ + λ⁻ ‖W⁻_QK‖₁ it is that of Lemma 4.
    """
    return 4.0 * math.sqrt(2.0 / head_dim) * gamma * qk * value * size**3


@torch.no_grad()
def smallest_gamma(record: Record, projections: Mapping[str, Mapping[str, Tensor]]) -> pd.DataFrame:
    """Return a row for every head of every self-attention, with res around the mean:

    gamma         the smallest γ for which Lemma 1 holds for every sentence of the record
    region_below  √d / (4√2 ‖W_QK‖₁ ‖W_V‖_{1,∞}): with γ below this, the lemma implies that the residual shrinks

    projections   "query", "key" and "value" (h,e,d) of each layer, by its name: recording.gradients.projections.
    The lemma has no biases and no padding; the states measured here include the model's biases.
    """
    frames = []
    for layer in check_record(record, "smallest_gamma").layers:
        if layer.kind == "cross":
            continue
        if layer.name not in projections:
            raise ValueError(f"projections= has no entry for {layer.name}; get them from attnlab.recording.gradients")
        queries, _ = read_token_masks(record, layer)
        own = projections[layer.name]
        query, key, value = (widen(own[name]).to(queries.device) for name in ("query", "key", "value"))
        per_head = queries[:, None].expand(layer.context.shape[:3])
        sizes = composite_norm(residual(widen(layer.context), per_head))  # (b,h)
        cubed = composite_norm(residual(widen(layer.inputs), queries)) ** 3  # (b,)
        terms = (
            residual_bound(1.0, float((q @ k.T).abs().sum(0).amax()), float(composite_norm(v)), 1.0, v.shape[1])
            for q, k, v in zip(query, key, value, strict=True)
        )
        region = 1.0 / torch.tensor(list(terms), dtype=torch.float64)
        some = cubed > 0
        gamma = (sizes[some] / cubed[some, None]).amax(0).double().cpu() * region
        columns = {"head": range(len(region)), "gamma": gamma.numpy(), "region_below": region.numpy()}
        frames.append(pd.DataFrame({"kind": layer.kind, "layer": layer.index} | columns))
    return pd.concat(frames, ignore_index=True)
