"""Attention statistics over a corpus: running sums over records, at constant memory.

For one layer and the keys j of category c (Kobayashi et al. 2020, §4), each value is the mean over the queries i of an
example, then over examples; s = Σ_j |α_hij| is 1 in most mechanisms:

    weight_share       Σ_{j∈c} α_hij                 entropy_nats        −Σ_j p ln p,  p = |α_hij| / s
    norm_sum           Σ_{j∈c} ‖α_hij f_h(x_j)‖      first_token_share   α_h,i,first

The mean, standard deviation, minimum and maximum of ‖f_h(x)‖ are over all tokens x of the corpus or of a category; cv
is the deviation divided by the mean. Spearman's ρ of |α| and ‖f‖ is over all visible pairs of a query and a key, in all
layers and heads of a kind. Spearman's ρ of a token's frequency rank and its ‖f‖ or |α| is over all tokens; both are
averaged over layers and heads, and |α| also over the queries that see the token. Each ρ comes with an error bound
(attnlab.analysis.joint). Padding never counts.

If a mechanism turns the context of each query (a gate), norm_sum includes the turning, and ‖f_h(x)‖ is without it,
because it belongs to the token. If a mechanism transforms the mixed context (finish), its output is not a sum over
keys: everything with ‖f‖ is NaN, and such a layer has no part in the correlations.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.categories import Categories
from attnlab.analysis.contribution import is_linear, norms
from attnlab.analysis.contribution_table import select_heads, select_layers
from attnlab.analysis.frequency import Frequency
from attnlab.analysis.joint import NORMS, WEIGHTS, correlation
from attnlab.analysis.sums import Sums, read_token_masks
from attnlab.analysis.totals import Totals
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import KINDS, Layer, Record

SIDES = ("source", "target")
PAIR_COLUMNS = ["kind", "category", "pairs", "spearman", "error_bound"]
PLACES, COUNTS = ".places", ".counts"  # suffixes of a sparse table in tensors()


@dataclass(frozen=True, eq=False)
class SequenceKind:
    """The tokens of a batch that are queries and keys of one kind of layer."""

    queries: Tensor  # (b,i) bool, False = padding
    keys: Tensor  # (b,j)
    category: Tensor  # (b,j)
    member: Tensor  # (b,j,c) float64: 1 in its category; 0 everywhere for padding
    rank: Tensor | None  # (b,j) the frequency bin


@dataclass(frozen=True, eq=False)
class Received:
    """What the keys of one layer receive from all queries of their example."""

    mass: Tensor  # (b,h,j) Σ_i α
    size: Tensor  # (b,h,j) Σ_i |α|
    entropy: Tensor  # (b,h) summed over queries
    seen: Tensor  # (b,j) number of queries that see the key


class Statistics(Sums):
    """Sums over a corpus. Several processes can add up their sums.

    categories, frequency   for "source" and "target", or one for both; all categories have the same names
    layers, heads           only these; default: all
    """

    def __init__(
        self, categories: Categories | Mapping[str, Categories],
        frequency: Frequency | Mapping[str, Frequency] | None = None, *,
        layers: Collection[int] | None = None, heads: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.categories = categories if isinstance(categories, Mapping) else dict.fromkeys(SIDES, categories)
        self.frequency = frequency if isinstance(frequency, Mapping | None) else dict.fromkeys(SIDES, frequency)
        self.names = next(iter(self.categories.values())).names
        self.layers, self.heads = layers, heads

    def add(self, record: Record) -> None:
        """Add the examples of one record."""
        for kind in dict.fromkeys(record.kinds):
            sequences = self._sequences(record, kind)
            norm = weight = torch.zeros_like(sequences.keys, dtype=torch.float64)
            heads = with_norm = 0
            for layer in select_layers(record, [kind], self.layers):
                vector, received = self._layer(layer, sequences)
                heads += received.size.shape[1]
                weight = weight + received.size.sum(1) / received.seen.clamp_min(1)
                if vector is not None:
                    norm, with_norm = norm + vector.sum(1), with_norm + vector.shape[1]
            if not heads:
                raise ValueError(f"no {kind} layer is among layers={sorted(self.layers or ())}")
            self._add(f"{kind}/examples", torch.tensor(len(record)))
            self._add(f"{kind}/tokens", sequences.keys.sum())
            if sequences.rank is not None:
                self._occurrences(kind, sequences, weight / heads, norm / with_norm if with_norm else None)

    def tensors(self) -> dict[str, Tensor]:
        """Return all sums by name on the CPU, ready to store or send. Tables of counts are sparse."""
        stored = {}
        for name, x in self.sums.items():
            if x.dim() == 2 and x.dtype == torch.int64:
                places = x.flatten().nonzero().flatten()
                stored[name + PLACES], stored[name + COUNTS] = places.cpu(), x.flatten()[places].cpu()
                stored[name + ".shape"] = torch.tensor(x.shape)
            else:
                stored[name] = x.cpu()
        return stored

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors() of another instance."""
        for name, x in tensors.items():
            if name.endswith(PLACES):
                table = name.removesuffix(PLACES)
                rows, columns = tensors[table + ".shape"].tolist()
                whole = self._table(table, rows, columns, torch.device("cpu"))
                whole.view(-1).index_add_(0, x.to(whole.device), tensors[table + COUNTS].to(whole.device))
            elif not name.endswith((COUNTS, ".shape")):
                self._add(name, x)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables heads, categories, spearman and, with frequencies, frequency: see docs/inspect.md."""
        layers = self.list_layers()
        kinds = list(dict.fromkeys(kind for kind, _ in layers))
        tables = {
            "heads": pd.concat([self._head_table(*layer) for layer in layers], ignore_index=True),
            "categories": pd.concat([self._category_table(*layer) for layer in layers], ignore_index=True),
            "spearman": pd.DataFrame([row for kind in kinds for row in self._pair_rows(kind)], columns=PAIR_COLUMNS),
        }
        if self.frequency is not None and all(f"{kind}/frequency.norm" in self.sums for kind in kinds):
            tables["frequency"] = pd.DataFrame([row for kind in kinds for row in self._frequency_rows(kind)])
        return tables

    def _sequences(self, record: Record, kind: str) -> SequenceKind:
        key = KINDS[kind][1]
        if key not in record.tokens:
            raise ValueError(f"the record has no tokens of the {key}, which statistics need")
        return self._build_sequences(key, record.tokens[key], *read_token_masks(record, record.kind(kind)[0]))

    def _build_sequences(self, key: str, tokens: Tensor, queries: Tensor, keys: Tensor | None = None) -> SequenceKind:
        keys = torch.ones_like(tokens, dtype=torch.bool) if keys is None else keys
        category = self.categories[key].of_token.to(tokens.device)[tokens]
        member = torch.nn.functional.one_hot(category, len(self.names)).double() * keys[..., None]
        rank = None if self.frequency is None else self.frequency[key].bins.to(tokens.device)[tokens]
        return SequenceKind(queries, keys, category, member, rank)

    def _layer(self, layer: Layer, sequences: SequenceKind) -> tuple[Tensor | None, Received]:
        """Add one layer. Returns ‖f‖ (b,h,j), None if it has no norms, and what its keys receive, in float64."""
        heads = select_heads(layer, self.heads)
        computed = norms(layer) if is_linear(layer) else None
        vector = None if computed is None else computed.vector[:, heads]
        received = self._count_received(layer, vector, heads, sequences)
        taken = None
        if computed is not None and layer.turning is not None:
            parts = (part.head[:, heads] * sequences.queries[:, None, rows, None] for rows, part in computed.chunks())
            taken = torch.stack([part.double().sum(2) for part in parts]).sum(0)  # (b,h,j)
        return self._add_sums(layer, vector, received, taken, sequences), received

    def add_totals(self, layer: Totals, tokens: Tensor, *, causal: bool) -> None:
        """Add one layer of a text of any length, from its totals; tokens (1,j) are its keys.

        Totals have no single pairs, so they add nothing to the correlation of weights and norms.
        """
        key, heads = KINDS[layer.kind][1], range(layer.vector.shape[1]) if self.heads is None else sorted(self.heads)
        sequences = self._build_sequences(key, tokens, torch.ones_like(layer.entropy[:, 0], dtype=torch.bool))
        vector, size = (x[:, list(heads)] for x in (layer.vector, layer.received_weight.double()))
        (i, j), every = (layer.entropy.shape[2], layer.vector.shape[2]), sequences.keys.double()
        seen = (i - (torch.arange(j, device=every.device) - (j - i)).clamp_min(0)) * every if causal else i * every
        received = Received(size, size, layer.entropy[:, list(heads)].double().sum(2), seen)
        norms = layer.received_norm[:, list(heads)].double()
        self._add_sums(layer, vector, received, norms, sequences)
        if f"{layer.kind}/examples" not in self.sums:
            self._add(f"{layer.kind}/examples", torch.tensor(1))
            self._add(f"{layer.kind}/tokens", sequences.keys.sum())

    def _add_sums(
        self, layer: Layer | Totals, vector: Tensor | None, received: Received, taken: Tensor | None,
        sequences: SequenceKind,
    ) -> Tensor | None:  # fmt: skip
        """Add what the keys of one layer receive. taken: Σ_i ‖αf‖ (b,h,j), default |α|·‖f‖. Returns ‖f‖ in float64."""
        place = f"{layer.kind}/{layer.index}/"
        if not (received.size.isfinite().all() and (vector is None or vector.isfinite().all())):
            raise ValueError(f"{layer.name} has weights or values that are not finite; try --dtype float32")
        heads = range(received.size.shape[1])
        per_query = 1.0 / sequences.queries.sum(1).clamp_min(1)[:, None, None]
        first = sequences.keys.int().argmax(1)[:, None, None].expand(-1, len(heads), 1)
        self._add(place + "weight_share", _by_category(received.mass * per_query, sequences))
        self._add(place + "first", (received.mass.gather(2, first) * per_query).sum((0, 2)))
        self._add(place + "entropy", (received.entropy * per_query[..., 0]).sum(0))
        self._add(place + "count", sequences.member.sum((0, 1)).expand(len(heads), -1))
        exact = torch.full_like(received.size, torch.nan) if vector is None else vector.double()
        taken = received.size * exact if taken is None else taken
        self._add(place + "norm_sum", _by_category(taken * per_query, sequences))
        self._add(place + "sum", _by_category(exact, sequences))
        self._add(place + "square", _by_category(exact**2, sequences))
        outside = sequences.member[:, None] == 0  # (b,1,j,c)
        self._add(place + "min", exact[..., None].masked_fill(outside, torch.inf).amin((0, 2)))
        self._add(place + "max", exact[..., None].masked_fill(outside, -torch.inf).amax((0, 2)))
        return None if vector is None else exact

    def _count_received(
        self, layer: Layer, vector: Tensor | None, heads: list[int], sequences: SequenceKind
    ) -> Received:
        """Sum by key, add entropies and fill the table of pairs, in one pass over chunks of the weights."""
        (b, j), h, device = sequences.keys.shape, len(heads), layer.context.device
        mass, size, entropy, seen = (
            torch.zeros(s, dtype=torch.float64, device=device) for s in ((b, h, j), (b, h, j), (b, h), (b, j))
        )
        cells = WEIGHTS.size * NORMS.size
        whole = self._table(f"{layer.kind}/pairs", len(self.names) + 1, cells, device)  # last row: hidden pairs
        if vector is not None:  # (b,h,j) the cell of weight bin 0
            column = NORMS.find_bins(vector) + (sequences.category * cells)[:, None].int()
        for rows, weights in layer.chunks():
            visible = (
                layer.see(rows.start, rows.stop)
                & sequences.queries[:, None, rows, None]
                & sequences.keys[:, None, None]
            )
            part = widen(weights if len(heads) == weights.shape[1] else weights[:, heads]).where(visible, 0.0)
            mass += part.sum(2)
            part = part.abs()
            size += part.sum(2)
            row_sum = part.sum(-1)
            spread = torch.special.entr(part).sum(-1) / row_sum + row_sum.log()
            entropy += spread.nan_to_num(0.0, 0.0, 0.0).double().sum(-1)
            seen += visible[:, 0].sum(1)
            if vector is None:
                continue
            cell = WEIGHTS.find_bins(part).mul_(NORMS.size).add_(column[:, :, None])
            cell = cell.masked_fill_(~visible, len(self.names) * cells).view(-1)
            whole.view(-1).index_add_(0, cell, _ONE.to(cell.device).expand(len(cell)))
        return Received(mass, size, entropy, seen)

    def _occurrences(self, kind: str, sequences: SequenceKind, weight: Tensor, norm: Tensor | None) -> None:
        assert sequences.rank is not None
        known = sequences.keys & (sequences.rank >= 0)
        for what, x, bins in (("weight", weight, WEIGHTS), ("norm", norm, NORMS)):
            whole = self._table(f"{kind}/frequency.{what}", len(self._single(kind)), bins.size, weight.device)
            if x is None:
                continue
            cell = sequences.rank[known] * bins.size + bins.find_bins(x[known])
            whole.view(-1).index_add_(0, cell, _ONE.to(cell.device).expand(len(cell)))

    def _single(self, kind: str) -> Tensor:
        assert self.frequency is not None
        return self.frequency[KINDS[kind][1]].single

    def _table(self, name: str, rows: int, columns: int, device: torch.device) -> Tensor:
        if name not in self.sums:
            self.sums[name] = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        return self.sums[name]

    def _add(self, name: str, value: Tensor) -> None:
        value, total = value.detach().cpu(), self.sums.get(name)
        if total is not None and name.endswith("/min"):
            self.sums[name] = torch.minimum(total, value)
        elif total is not None and name.endswith("/max"):
            self.sums[name] = torch.maximum(total, value)
        else:
            super()._add(name, value)

    def _head_table(self, kind: str, layer: int) -> pd.DataFrame:
        at, examples = f"{kind}/{layer}/", self.sums[f"{kind}/examples"]
        count, total, square = (self.sums[at + name].sum(1) for name in ("count", "sum", "square"))
        mean = total / count
        deviation = (square / count - mean**2).clamp_min(0.0).sqrt()
        columns = {
            "head": self._head_numbers(len(mean)), "norm_mean": mean, "norm_sd": deviation,
            "norm_cv": deviation / mean, "norm_min": self.sums[at + "min"].amin(1),
            "norm_max": self.sums[at + "max"].amax(1), "entropy_nats": self.sums[at + "entropy"] / examples,
            "first_token_share": self.sums[at + "first"] / examples,
        }  # fmt: skip
        return pd.DataFrame({"kind": kind, "layer": layer} | columns)

    def _category_table(self, kind: str, layer: int) -> pd.DataFrame:
        at, examples = f"{kind}/{layer}/", self.sums[f"{kind}/examples"]
        count, total = self.sums[at + "count"], self.sums[at + "sum"]
        columns = {
            "head": [head for head in self._head_numbers(len(count)) for _ in self.names],
            "category": list(self.names) * len(count),
            "tokens": count.long().flatten(),
            "weight_share": (self.sums[at + "weight_share"] / examples).flatten(),
            "norm_sum": (self.sums[at + "norm_sum"] / examples).flatten(),
            "norm_mean": (total / count).flatten(),
        }
        return pd.DataFrame({"kind": kind, "layer": layer} | columns)

    def _head_numbers(self, count: int) -> list[int]:
        return list(range(count)) if self.heads is None else sorted(set(self.heads))

    def _pair_rows(self, kind: str) -> Iterator[dict[str, Any]]:
        if f"{kind}/pairs" not in self.sums:  # totals have no pairs
            return
        table = self.sums[f"{kind}/pairs"][:-1].view(-1, WEIGHTS.size, NORMS.size)
        for name, counts in [*zip(self.names, table, strict=True), ("all", table.sum(0))]:
            yield {"kind": kind, "category": name} | _correlate("pairs", counts)

    def _frequency_rows(self, kind: str) -> Iterator[dict[str, Any]]:
        for what in ("norm", "weight"):
            counts = self.sums[f"{kind}/frequency.{what}"]
            yield {"kind": kind, "of": what} | _correlate("tokens", counts, self._single(kind))


_ONE = torch.ones((), dtype=torch.int64)


def _by_category(x: Tensor, sequences: SequenceKind) -> Tensor:
    """Sum (b,h,j) over examples and the keys of each category to (h,c)."""
    return torch.einsum("bhj,bjc->hc", x, sequences.member)


def _correlate(counted: str, counts: Tensor, single: Tensor | None = None) -> dict[str, float]:
    result = correlation(counts, single)
    return {counted: result.count, "spearman": result.spearman, "error_bound": result.bound}


def extremes(heads: pd.DataFrame) -> pd.DataFrame:
    """Return the heads whose ‖f‖ varies most and least, and the mean of all (Table 1 of Kobayashi et al. 2020)."""
    columns = ["norm_mean", "norm_sd", "norm_cv", "norm_max", "norm_min"]
    rows = []
    for what, place in (("greatest CV", heads["norm_cv"].idxmax()), ("least CV", heads["norm_cv"].idxmin())):
        row = heads.loc[place]
        rows.append({"head": f"{what}: {row['kind']} layer {row['layer']} head {row['head']}"} | dict(row[columns]))
    rows.append({"head": "mean over heads"} | dict(heads[columns].mean()))
    return pd.DataFrame(rows)
