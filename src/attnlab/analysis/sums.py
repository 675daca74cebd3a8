"""Sums over many records: named tensors that only add up, so that several processes can join theirs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attnlab.records.record import KINDS, Layer, Record


class Sums:
    """What was added so far, in float64 on the CPU, under "kind/layer/what"."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def accumulate(self, layer: Layer, what: str, value: Tensor) -> None:
        """Add to one sum of a layer."""
        value = value.detach().double().cpu()
        if not bool(value.isfinite().all()):
            raise ValueError(f"{layer.name}: {what} is not finite: its weights or states hold numbers that are not")
        self._add(f"{layer.kind}/{layer.index}/{what}", value)

    def tensors(self) -> dict[str, Tensor]:
        """All sums, to be stored or sent."""
        return dict(self.sums)

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Take in what tensors() of another gave."""
        for name, value in tensors.items():
            self._add(name, value)

    def get(self, kind: str, layer: int, what: str) -> Tensor:
        return self.sums[f"{kind}/{layer}/{what}"]

    def has(self, kind: str, layer: int, what: str) -> bool:
        return f"{kind}/{layer}/{what}" in self.sums

    def list_layers(self) -> list[tuple[str, int]]:
        """Kind and number of every layer that something was noted of, in order."""
        if not self.sums:
            raise ValueError("nothing was added: there is no table")
        found = {(kind, int(layer)) for kind, layer, _ in (name.split("/") for name in self.sums)}
        return sorted(found, key=lambda place: (list(KINDS).index(place[0]), place[1]))

    def _add(self, name: str, value: Tensor) -> None:
        there = self.sums.get(name)
        if there is not None and there.shape != value.shape:
            raise ValueError(f"{name} is {tuple(there.shape)} here and {tuple(value.shape)} there: not the same model")
        self.sums[name] = value.clone() if there is None else there + value


def check_record(record: Record, reader: str) -> Record:
    if not isinstance(record, Record):
        raise TypeError(f"{reader} reads a Record, not a {type(record).__name__}; attnlab.record makes one")
    return record


def read_token_masks(record: Record, layer: Layer) -> tuple[Tensor, Tensor]:
    """Which queries (b,i) and keys (b,j) of a layer are tokens, not padding; all, where the record has no mask."""
    b, _, i, _ = layer.context.shape
    found = []
    for name, length in zip(KINDS[layer.kind], (i, layer.grouped_values.shape[2]), strict=True):
        mask = record.masks.get(name)
        if mask is None:
            mask = torch.ones(b, length, dtype=torch.bool)
        if mask.shape != (b, length):
            raise ValueError(f"{layer.name} has {length} positions, but the mask of the {name} is {tuple(mask.shape)}")
        found.append(mask.to(layer.context.device))
    return found[0], found[1]


def build_pair_mask(layer: Layer, queries: Tensor, keys: Tensor) -> Tensor:
    """What is counted of the weights, (b,1,i,j): a query that is a token, and a key that is one and is visible."""
    return layer.mask[(None,) * (4 - layer.mask.dim())] & queries[:, None, :, None] & keys[:, None, None, :]


def mean_over_queries(values: Tensor, queries: Tensor) -> Tensor:
    """(b,h,i) -> (b,h), over the queries (b,i) that count; 0 where there is none."""
    count = queries.sum(1).clamp_min(1)[:, None]
    return values.where(queries[:, None], 0.0).sum(-1) / count
