"""From layer maps to the whole model: how much each input token contributes to each output token.

Each map of `mixing` is normalised to shares: rows that sum to 1. A cross attention divides its shares between its keys
and the query's own state. Then, from the first layer to the last (Abnar & Zuidema 2020; with norms, Modarressi et al.
2022),

    rollout   R ← A R                            self-attention
              R ← own·R + A R_encoder            cross attention, R_encoder that of the encoder
    flow      the largest flow from an output token to an input token, with shares as capacities of a layered graph

rollout(record, "weight-residual") is the original rollout, rollout(record, "norm") the norm-based one; every name in
MAPS works. In a decoder with cross attention, the feed-forward follows the cross attention only. Choose a map for each
kind there, for example {"encoder-self": "block", "decoder-self": "norm", "cross": "block"}.

Results are named as layers are: "encoder-self" and "decoder-self" (b,i,j), and "cross" (b,i,j), target from source.
Rows of "decoder-self" and "cross" together sum to 1. A record that lacks layers of a hybrid model has no rollout, nor
has one in which a token takes nothing from any token.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor

from attnlab.analysis.diversity import entropy
from attnlab.analysis.mixing import is_cross, mixing
from attnlab.analysis.sums import Analysis, check_record, mean_over_queries, read_token_masks
from attnlab.records.record import KINDS, Layer, Record

By = str | Mapping[str, str]  # a name in MAPS, or one for each kind of layer
CAPACITY = 2**30  # integer units of a share of 1


def rollout(record: Record, by: By = "norm") -> dict[str, Tensor]:
    """Compute the share of every input token in every output token. Reads one layer at a time."""
    shares: dict[str, Tensor] = {}
    for layer, among_keys, own in _shares(record, by):
        if is_cross(layer):
            kept = own[..., None]  # (b,i,1)
            shares["decoder-self"] = kept * shares.get("decoder-self", _identity(among_keys))
            of_keys = among_keys @ shares.get("encoder-self", _identity(among_keys.mT))
            shares["cross"] = of_keys + (kept * shares["cross"] if "cross" in shares else 0.0)
        else:
            shares.setdefault(layer.kind, _identity(among_keys))
            query, _ = KINDS[layer.kind]
            shares |= {kind: among_keys @ before for kind, before in shares.items() if KINDS[kind][0] == query}
    return shares


def flow(record: Record, by: By = "weight-residual") -> dict[str, Tensor]:
    """Compute the largest flow between each output and input token, exact up to 2⁻³⁰ per edge of the smallest cut.

    It solves one flow problem for every pair of tokens, so it suits sentences, not long texts.
    """
    graph = Graph()
    for layer, among_keys, own in _shares(record, by):
        graph.add(layer, among_keys, own)
    result = {}
    for kind, (query, key) in KINDS.items():
        if not {query, key} <= set(graph.top):
            continue
        top, bottom = graph.top[query], graph.bottom[key]
        flows = torch.zeros(len(record), len(top), len(bottom), dtype=torch.float64)
        for example in range(len(record)):
            capacities = csr_array(graph.capacities(example))
            for i, output in enumerate(top):
                for j, source in enumerate(bottom):
                    flows[example, i, j] = maximum_flow(capacities, output, source).flow_value / CAPACITY
        result[kind] = flows
    return result


class Graph:
    """Tokens before and after every layer as numbered nodes. Edges lead from a token to the tokens it reads."""

    def __init__(self) -> None:
        self.size = 0
        self.bottom: dict[str, range] = {}  # nodes of "source" and "target" before the first layer
        self.top: dict[str, range] = {}  # nodes after the last layer
        self.edges: list[tuple[range, range, Tensor]] = []  # from, to, capacities (b,from,to)

    def add(self, layer: Layer, among_keys: Tensor, own: Tensor) -> None:
        query, key = KINDS[layer.kind]
        for name, count in ((query, among_keys.shape[1]), (key, among_keys.shape[2])):
            if name not in self.top:
                self.bottom[name] = self.top[name] = self._new(count)
        above = self._new(among_keys.shape[1])
        self.edges.append((above, self.top[key], among_keys))
        if is_cross(layer):
            self.edges.append((above, self.top[query], torch.diag_embed(own)))
        self.top[query] = above

    def capacities(self, example: int) -> np.ndarray:
        table = np.zeros((self.size, self.size), dtype=np.int32)
        for above, below, shares in self.edges:
            whole = (shares[example].double() * CAPACITY).round().to(torch.int32)
            table[above.start : above.stop, below.start : below.stop] = whole.cpu().numpy()
        return table

    def _new(self, count: int) -> range:
        self.size += count
        return range(self.size - count, self.size)


class RolloutShares(Analysis):
    """Where the tokens of a stack come from, over a corpus, by the norm-based rollout of all layers.

    own_share           of the output token's own input, 0 across two sequences
    first_token_share   of the first token
    tokens              e^entropy of the shares: the number of input tokens that an output token is from

    Each is the mean over output tokens, then over examples.
    """

    def add(self, record: Record) -> None:
        last = {layer.kind: layer for layer in check_record(record, "rollout").layers}
        for kind, shares in rollout(record).items():
            layer = last[kind]
            queries, _ = read_token_masks(record, layer)
            own = torch.zeros_like(shares[..., 0]) if is_cross(layer) else shares.diagonal(dim1=1, dim2=2)
            total = shares.sum(-1, keepdim=True)
            spread = entropy(shares / total.masked_fill(total == 0, 1.0)).exp()
            columns = {"own_share": own, "first_token_share": shares[..., 0], "tokens": spread}
            for name, x in columns.items():
                self.accumulate(layer, name, mean_over_queries(x[:, None], queries).sum(0))
            self.accumulate(layer, "examples", torch.tensor(len(queries)))

    def table(self) -> pd.DataFrame:
        rows = []
        for kind, layer in self.list_layers():
            names, count = ("own_share", "first_token_share", "tokens"), self.get(kind, layer, "examples")
            values = {name: float(self.get(kind, layer, name) / count) for name in names}
            rows.append({"kind": kind, "layers": layer + 1} | values)
        return pd.DataFrame(rows)


def _shares(record: Record, by: By) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    """Yield each layer with the shares of its keys (b,i,j) and of the query itself (b,i); together they sum to 1."""
    if not len(record.layers):
        raise ValueError("this record has no layers, so there is nothing to roll out")
    if missing := record.meta.get("missing_layers"):
        raise ValueError(f"a rollout needs every layer, and this record lacks {missing}: read the maps of its layers")
    if not isinstance(by, str) and (missing := set(record.kinds) - set(by)):
        raise ValueError(f"by= has no map for {', '.join(sorted(missing))}")
    for layer in record.layers:
        name = by if isinstance(by, str) else by[layer.kind]
        mixed = mixing(layer, name)
        if mixed.map.min() < 0:
            raise ValueError(f"{layer.name} has negative weights, which are not shares; roll out norms with by='norm'")
        own = torch.zeros_like(mixed.map[..., 0]) if mixed.own is None else mixed.own
        total = mixed.map.sum(-1) + own  # (b,i)
        if bool((blank := (total == 0) & read_token_masks(record, layer)[0]).any()):
            example, token = blank.nonzero()[0].tolist()
            what = f"token {token} of example {example} takes nothing from any token by {name!r}, so it has no shares"
            raise ValueError(f"{layer.name}: {what} to roll out; by='weight-residual' also counts what it keeps")
        total = total.masked_fill(total == 0, 1.0)  # padding that sees nothing
        yield layer, mixed.map / total[..., None], own / total


def _identity(like: Tensor) -> Tensor:
    b, n, _ = like.shape
    return torch.eye(n, dtype=like.dtype, device=like.device).expand(b, n, n)
