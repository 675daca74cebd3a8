"""Named sums over many records. Several processes can add up their sums."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import pandas as pd
import torch
from torch import Tensor

from attnlab.records.record import KINDS, Layer, Record


class Sums:
    """Running sums in float64 on the CPU, named "kind/layer/what"."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def accumulate(self, layer: Layer, what: str, value: Tensor) -> None:
        """Add a value to the sum `what` of a layer."""
        value = value.detach().double().cpu()
        if not bool(value.isfinite().all()):
            raise ValueError(f"{layer.name}: {what} is not finite; check its weights and states for NaN and infinity")
        self._add(f"{layer.kind}/{layer.index}/{what}", value)

    def tensors(self) -> dict[str, Tensor]:
        """Return all sums by name, ready to store or send."""
        return dict(self.sums)

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors() of another instance."""
        for name, value in tensors.items():
            self._add(name, value)

    def get(self, kind: str, layer: int, what: str) -> Tensor:
        return self.sums[f"{kind}/{layer}/{what}"]

    def has(self, kind: str, layer: int, what: str) -> bool:
        return f"{kind}/{layer}/{what}" in self.sums

    def list_layers(self) -> list[tuple[str, int]]:
        """Return the kind and index of every layer that has a sum, in order."""
        if not self.sums:
            raise ValueError("no record was added, so there is no table; call add(record) first")
        places = (name.split("/") for name in self.sums if name.count("/") == 2)
        layers = {(kind, int(layer)) for kind, layer, _ in places}
        return sorted(layers, key=lambda place: (list(KINDS).index(place[0]), place[1]))

    def _add(self, name: str, value: Tensor) -> None:
        total = self.sums.get(name)
        if total is not None and total.shape != value.shape:
            shapes = f"{tuple(total.shape)} and {tuple(value.shape)}"
            raise ValueError(f"{name} has the shapes {shapes}: the records come from different models")
        self.sums[name] = value.clone() if total is None else total + value


class Analysis(Sums, ABC):
    """Sums that make one table: what `attnlab inspect --analysis` adds to its tables."""

    @abstractmethod
    def add(self, record: Record) -> object:
        """Add the examples of one record."""

    @abstractmethod
    def table(self) -> pd.DataFrame:
        """Return the table of all records that were added, with units in the names of its columns."""


def check_record(record: Record, reader: str) -> Record:
    """Return the record, or raise TypeError. `reader` is the caller's name, for the error message."""
    if not isinstance(record, Record):
        raise TypeError(f"{reader} reads a Record, got a {type(record).__name__}; create one with attnlab.record")
    return record


def read_token_masks(record: Record, layer: Layer) -> tuple[Tensor, Tensor]:
    """Return bool masks of a layer's queries (b,i) and keys (b,j): True = a token, False = padding.

    Without a mask in the record, every position is a token.
    """
    b, _, i, _ = layer.context.shape
    masks = []
    for name, length in zip(KINDS[layer.kind], (i, layer.grouped_values.shape[2]), strict=True):
        mask = record.masks.get(name)
        if mask is None:
            mask = torch.ones(b, length, dtype=torch.bool)
        if mask.shape != (b, length):
            raise ValueError(f"{layer.name} has {length} positions, but the {name} mask has shape {tuple(mask.shape)}")
        masks.append(mask.to(layer.context.device))
    return masks[0], masks[1]


def build_pair_mask(layer: Layer, queries: Tensor, keys: Tensor, rows: slice | None = None) -> Tensor:
    """Return a bool mask (b,1,i,j) of the weights that count: both ends are tokens, and the key is visible.

    rows   only these queries
    """
    rows = slice(0, layer.context.shape[2]) if rows is None else rows
    return layer.see(rows.start, rows.stop) & queries[:, None, rows, None] & keys[:, None, None, :]


def mean_over_queries(values: Tensor, queries: Tensor) -> Tensor:
    """Average (b,h,i) to (b,h) over the queries where the mask (b,i) is True; 0 if there are none."""
    count = queries.sum(1).clamp_min(1)[:, None]
    return values.where(queries[:, None], 0.0).sum(-1) / count
