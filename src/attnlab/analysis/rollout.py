"""From layer maps to the whole model: how much of what a token ends as came from each token that was read.

Each map of `mixing` becomes shares, rows that sum to 1; a cross attention shares out between its keys and the query's
own state. Then, from the first layer to the last (Abnar & Zuidema 2020; with norms, Modarressi et al. 2022),

    rollout   R ← A R                            self-attention
              R ← own·R + A R_encoder            cross attention, R_encoder that of the encoder
    flow      the largest flow from an output token to an input token, shares being the capacities of a layered graph

rollout(record, "weight-residual") is the original, rollout(record, "norm") the norm-based one, and so on for every name
in MAPS. In a decoder with cross attention the feed-forward follows the cross attention alone; there say which map for
which kind, as in {"encoder-self": "block", "decoder-self": "norm", "cross": "block"}.

Results are named as layers are: "encoder-self" and "decoder-self" (b,i,j), and "cross" (b,i,j), target from source.
Rows of "decoder-self" and "cross" together sum to 1.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor

from attnlab.analysis.mixing import is_cross, mixing
from attnlab.records.record import KINDS, Layer, Record

By = str | Mapping[str, str]  # a name in MAPS, or one for each kind of layer
CAPACITY = 2**30  # whole units that a share of 1 is divided into


def rollout(record: Record, by: By = "norm") -> dict[str, Tensor]:
    """Shares of every token in every token after the last layer; one layer is read at a time."""
    found: dict[str, Tensor] = {}
    for layer, among_keys, own in _shares(record, by):
        if is_cross(layer):
            keys = found["encoder-self"] if "encoder-self" in found else _identity(among_keys.mT)
            kept = own[..., None]  # (b,i,1)
            before = found["decoder-self"] if "decoder-self" in found else _identity(among_keys)
            found["decoder-self"] = kept * before
            found["cross"] = among_keys @ keys + (kept * found["cross"] if "cross" in found else 0.0)
        else:
            found.setdefault(layer.kind, _identity(among_keys))
            query, _ = KINDS[layer.kind]
            found |= {kind: among_keys @ before for kind, before in found.items() if KINDS[kind][0] == query}
    return found


def flow(record: Record, by: By = "weight-residual") -> dict[str, Tensor]:
    """The largest flow between each output and each input token: exact up to 2⁻³⁰ for each edge of the smallest cut.

    One flow problem for every pair of tokens: for sentences, not for books.
    """
    graph = Graph()
    for layer, among_keys, own in _shares(record, by):
        graph.add(layer, among_keys, own)
    made = {}
    for kind, (top, bottom) in graph.ends().items():
        flows = torch.zeros(len(record), len(top), len(bottom), dtype=torch.float64)
        for example in range(len(record)):
            capacities = csr_array(graph.capacities(example))
            for i, output in enumerate(top):
                for j, given in enumerate(bottom):
                    flows[example, i, j] = maximum_flow(capacities, output, given).flow_value / CAPACITY
        made[kind] = flows
    return made


class Graph:
    """Tokens before and after every layer, as numbered nodes; an edge leads from a token to one that it was made of."""

    def __init__(self) -> None:
        self.size = 0
        self.bottom: dict[str, range] = {}  # the nodes of "source" and "target" before the first layer
        self.top: dict[str, range] = {}  # and after the last one
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

    def ends(self) -> dict[str, tuple[range, range]]:
        """The output and input tokens of each kind of attribution."""
        return {kind: (self.top[q], self.bottom[k]) for kind, (q, k) in KINDS.items() if {q, k} <= set(self.top)}

    def capacities(self, example: int) -> np.ndarray:
        made = np.zeros((self.size, self.size), dtype=np.int32)
        for above, below, shares in self.edges:
            whole = (shares[example].double() * CAPACITY).round().to(torch.int32)
            made[above.start : above.stop, below.start : below.stop] = whole.cpu().numpy()
        return made

    def _new(self, count: int) -> range:
        self.size += count
        return range(self.size - count, self.size)


def _shares(record: Record, by: By) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    """Each layer with what its queries took from each key (b,i,j) and, in a cross attention, kept (b,i): sums of 1."""
    if not len(record.layers):
        raise ValueError("this record has no layers to roll out")
    if not isinstance(by, str) and (lacking := set(record.kinds) - set(by)):
        raise ValueError(f"by= names no map for {', '.join(sorted(lacking))}")
    for layer in record.layers:
        found = mixing(layer, by if isinstance(by, str) else by[layer.kind])
        if found.map.min() < 0:
            raise ValueError(
                f"{layer.name}: some of its weights are negative, and shares cannot be; roll out norms, by='norm'"
            )
        own = torch.zeros_like(found.map[..., 0]) if found.own is None else found.own
        total = found.map.sum(-1) + own  # (b,i)
        total = total.masked_fill(total == 0, 1.0)  # a query that sees nothing and keeps nothing has no shares
        yield layer, found.map / total[..., None], own / total


def _identity(like: Tensor) -> Tensor:
    b, n, _ = like.shape
    return torch.eye(n, dtype=like.dtype, device=like.device).expand(b, n, n)
