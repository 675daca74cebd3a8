"""How much the heads of a layer differ, and statistics of each head (Zheng et al. 2021, §5.2 and §5.4).

Each query i of head a has a distribution p_a,i over keys. The distance of two heads is the Jensen–Shannon divergence of
their distributions, summed over the queries of a sentence and averaged over sentences. H is the entropy in nats:

    JSD_ab = Σ_i [ H(½(p_a,i + p_b,i)) − ½ H(p_a,i) − ½ H(p_b,i) ]        0 ≤ JSD_ab ≤ (number of queries) · ln 2

The paper states no base and sums over queries, so its numbers grow with the sentence length. The tables therefore also
give bits and the mean over queries. Weights that are negative (daGPAM) or do not sum to 1 become a distribution over
pairs of a key and a sign, p = |w| / Σ_j |w|: opposite signs at one key are different outcomes. This does not change
ordinary weights. A row of zeros differs from any other row by ½ ln 2. Padding queries, and queries that see no key, do
not count.

Noise alone raises the JSD: two equal heads whose logits get independent N(0,1) noise differ by several nats over a
sentence. Compare a sampled record with `recording/noise_null.py`: the same noise on a model trained without noise.

Statistics of one head, averaged over the queries of a sentence and then over sentences:

    confidence         max_j p_ij (Voita et al. 2019, who leave out the end of sentence: ignore=)
    entropy_nats       H(p_i)
    first_token_share  w_i,first, of the first token that is not padding
    output_share       ‖Σ_d mixed_hid W_hd‖ as a share of the sum over heads: what the head adds to the layer's output
    dead               True if output_share < dead_below / heads: the head adds almost nothing
    ablation_nats      mean increase of a target's loss without the head (Michel et al. 2019); needs a record that
                       attnlab.recording.ablation has processed
"""

import math
from collections.abc import Collection
from typing import get_args

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.contribution import compute_projected_norms
from attnlab.analysis.sums import Analysis, build_pair_mask, check_record, mean_over_queries, read_token_masks
from attnlab.mechanisms.mechanism import Impl, widen
from attnlab.records.record import KINDS, Layer, Record

AT_ONCE = {"cpu": 2**18, "cuda": 2**24}  # values that the definition processes at a time


@torch.no_grad()
def jsd(weights: Tensor, mask: Tensor | None = None, *, impl: Impl = "auto") -> Tensor:
    """Compute the JSD in nats of every two heads, summed over queries and averaged over the batch; (h,h), float64.

    weights  (b,h,i,j)
    mask     bool, broadcastable to (b,1,i,j), True = counted; queries without a counted key are left out
    impl     "reference": PyTorch in chunks; "fused": one Triton pass; "auto": fused on a GPU if supported
    """
    return _divergence(pair_entropy(weights, mask, impl=impl)).mean(0)


def pair_entropy(weights: Tensor, mask: Tensor | None = None, *, impl: Impl = "auto") -> Tensor:
    """Compute Σ_i H(½(p_a,i + p_b,i)), (b,h,h), float64. The diagonal has the entropy of each head."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    counted = _expand_mask(weights, mask)
    if impl == "fused" or (impl == "auto" and weights.is_cuda):
        from attnlab.analysis import contribution_kernel, diversity_kernel

        reason = contribution_kernel.find_tensor_gap(weights)
        if reason is None:
            return diversity_kernel.pair_entropy(weights.detach(), counted)
        if impl == "fused":
            raise ValueError(f"impl='fused' does not cover {reason}; use impl='auto' or 'reference'")
    return _by_definition(weights.detach(), counted)


def distribution(weights: Tensor) -> Tensor:
    """Normalise each row (…,j) to p: j outcomes, or 2j pairs of key and sign if a weight is negative. 0 stays 0."""
    if bool((weights < 0).any()):
        weights = torch.cat([weights.clamp_min(0.0), (-weights).clamp_min(0.0)], dim=-1)
    size = weights.sum(-1, keepdim=True)
    return weights / size.masked_fill(size == 0, 1.0)


def entropy(p: Tensor) -> Tensor:
    """Compute H of each row (…,j) in nats."""
    return -(p.clamp_min(torch.finfo(p.dtype).tiny).log() * p).sum(-1)


def diversity(record: Record) -> pd.DataFrame:
    """Return a table with a row for every two heads a < b of a layer: see `Diversity.pairs`."""
    return Diversity().add(record).pairs()


def heads(record: Record, *, ignore: Collection[int] = (), dead_below: float = 0.1) -> pd.DataFrame:
    """Return a table with a row for every head: see `Diversity.heads`."""
    return Diversity(ignore=ignore).add(record).heads(dead_below=dead_below)


class Diversity(Analysis):
    """The tables over many records, at constant memory. Several processes can merge their sums.

    ignore   ids of tokens that confidence leaves out, such as the end of sentence
    """

    def __init__(self, *, ignore: Collection[int] = ()) -> None:
        super().__init__()
        self.ignore = tuple(ignore)

    @torch.no_grad()
    def add(self, record: Record) -> "Diversity":
        """Add the examples of one record. Examples that are all padding do not count."""
        for layer in check_record(record, "diversity").layers:
            queries, keys = read_token_masks(record, layer)
            self._layer(layer, queries, keys, keys & self._find_considered(record, layer))
            if "ablated_nll" in layer.extras:
                increase = layer.extras["ablated_nll"].double() - layer.extras["nll"].double()[:, None]  # (b,h)
                self.accumulate(layer, "ablation", increase.sum(0))
                self.accumulate(layer, "scored", layer.extras["scored"].sum())
        return self

    def table(self) -> pd.DataFrame:
        """Return `pairs`."""
        return self.pairs()

    def pairs(self) -> pd.DataFrame:
        """Return kind, layer, head_a < head_b, jsd (nats a sentence), jsd_per_query (nats), jsd_bits (bits a sentence).

        The number of Table 4 is the mean of the column jsd, over all pairs of heads of all layers and kinds.
        """
        frames = []
        for kind, layer in self.list_layers():
            examples = self.get(kind, layer, "examples").clamp_min(1)
            jsd, per_query = (self.get(kind, layer, what) / examples for what in ("jsd", "jsd_per_query"))
            a, b = torch.triu_indices(len(jsd), len(jsd), offset=1)
            columns = {"kind": kind, "layer": layer, "head_a": a.numpy(), "head_b": b.numpy()}
            columns |= {"jsd": jsd[a, b].numpy(), "jsd_per_query": per_query[a, b].numpy()}
            frames.append(pd.DataFrame(columns | {"jsd_bits": (jsd[a, b] / math.log(2)).numpy()}))
        return pd.concat(frames, ignore_index=True)

    def heads(self, *, dead_below: float = 0.1) -> pd.DataFrame:
        """Return kind, layer, head and the columns described above; ablation_nats only if it was measured."""
        frames = []
        for kind, layer in self.list_layers():
            examples = self.get(kind, layer, "examples").clamp_min(1)
            names = ("confidence", "entropy_nats", "first_token_share")
            columns = {name: (self.get(kind, layer, name) / examples).numpy() for name in names}
            output = self.get(kind, layer, "output")
            share = output / output.sum().clamp_min(torch.finfo(output.dtype).tiny)
            columns |= {"output_share": share.numpy(), "dead": (share < dead_below / len(share)).numpy()}
            if self.has(kind, layer, "ablation"):
                scored = self.get(kind, layer, "scored").clamp_min(1)
                columns["ablation_nats"] = (self.get(kind, layer, "ablation") / scored).numpy()
            frames.append(pd.DataFrame({"kind": kind, "layer": layer, "head": range(len(share))} | columns))
        return pd.concat(frames, ignore_index=True)

    def _layer(self, layer: Layer, tokens: Tensor, keys: Tensor, considered: Tensor) -> None:
        b, h, i, _ = layer.context.shape
        queries = torch.zeros_like(tokens)  # (b,i) that see a key
        first = keys.int().argmax(1)[:, None, None, None].expand(b, h, i, 1)
        entropies = torch.zeros(b, h, h, dtype=torch.float64, device=keys.device)
        confidence, first_share = (widen(layer.context).new_zeros(b, h, i) for _ in range(2))
        for rows, weights in layer.chunks():
            counted = build_pair_mask(layer, tokens, keys, rows)
            queries[:, rows] = counted[:, 0].any(-1)
            entropies += pair_entropy(weights, counted)
            part = widen(weights).where(counted, 0.0)
            first_share[:, :, rows] = part.gather(-1, first[:, :, rows])[..., 0]
            part = part.abs()
            size = part.sum(-1).clamp_min(torch.finfo(part.dtype).tiny)
            confidence[:, :, rows] = part.where(considered[:, None, None], 0.0).amax(-1) / size
        divergence, count = _divergence(entropies), queries.sum(1).clamp_min(1)
        self.accumulate(layer, "jsd", divergence.sum(0))
        self.accumulate(layer, "jsd_per_query", (divergence / count[:, None, None]).sum(0))
        self.accumulate(layer, "examples", queries.any(1).sum())
        self.accumulate(layer, "entropy_nats", (entropies.diagonal(dim1=1, dim2=2) / count[:, None]).sum(0))
        self.accumulate(layer, "confidence", mean_over_queries(confidence, queries).sum(0))
        self.accumulate(layer, "first_token_share", mean_over_queries(first_share, queries).sum(0))
        output = compute_projected_norms(widen(layer.mixed), widen(layer.output_weight))  # (b,h,i)
        self.accumulate(layer, "output", mean_over_queries(output, queries).sum(0))

    def _find_considered(self, record: Record, layer: Layer) -> Tensor:
        """Return a bool mask (b,j) of the keys that confidence considers."""
        side = KINDS[layer.kind][1]
        if not self.ignore:
            return torch.ones(1, 1, dtype=torch.bool, device=layer.context.device)
        if side not in record.tokens:
            raise ValueError(f"ignore= needs token ids, but the record has no tokens of the {side}")
        tokens = record.tokens[side].to(layer.context.device)
        return ~torch.isin(tokens, torch.tensor(self.ignore, device=tokens.device))


def _divergence(entropies: Tensor) -> Tensor:
    """Compute the JSD (b,h,h) from the result of pair_entropy."""
    own = entropies.diagonal(dim1=1, dim2=2)  # (b,h)
    return (entropies - (own[:, :, None] + own[:, None, :]) / 2).clamp_min(0.0)


def _expand_mask(weights: Tensor, mask: Tensor | None) -> Tensor | None:
    """Expand the mask to (b,1,i,j). Raises if weights or mask have the wrong type or shape."""
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a torch tensor, got {type(weights).__name__}; use torch.as_tensor(weights)")
    if weights.dim() != 4 or not weights.is_floating_point():
        given = f"{weights.dtype} {tuple(weights.shape)}"
        raise ValueError(f"weights must be floating-point (batch, heads, queries, keys), got {given}")
    if mask is None:
        return None
    whole = (weights.shape[0], 1, *weights.shape[2:])
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dtype != torch.bool or len(shape) > 4 or any(m not in (1, n) for m, n in zip(shape, whole, strict=True)):
        given = f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"mask must be bool and broadcast to (b,1,i,j) = {whole}, got {given}")
    return mask.reshape(shape).expand(whole)


def _by_definition(weights: Tensor, counted: Tensor | None) -> Tensor:
    b, h, i, j = weights.shape
    entropies = torch.zeros(b, h, h, dtype=torch.float64, device=weights.device)
    rows = max(1, AT_ONCE.get(weights.device.type, 2**18) // max(1, b * h * j))
    for start in range(0, i, rows):
        some = slice(start, start + rows)
        part = widen(weights[:, :, some])
        p = distribution(part if counted is None else part.where(counted[:, :, some], 0.0))
        for a in range(h):
            entropies[:, a, a:] += entropy((p[:, a : a + 1] + p[:, a:]) / 2).sum(-1)
    return entropies.triu() + entropies.triu(1).mT
