"""The probes of a record beside its weights: scores of every source position for every target position.

    example, target_position, source_position      where
    source_token                                   what stands there: text, where the record has it, else its number
    target                                         the true word or class y_t, by number
    weight                                         α, the mean over heads
    beta, saliency                                 the probes β and Δ that models/probe.py put into the layer

Padding has no rows. A comparison takes the scores of each target position for a row, and asks of two of them, over all
rows together: how often A(u, v) holds, how often by chance, and the mean of Kendall's τ_b (agreement.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from attnlab.analysis.agreement import agreement, kendall, random_baseline
from attnlab.analysis.contribution_table import read_side
from attnlab.records.record import KINDS, Layer, Record


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores by name, (b,t,l) each, of one layer of a record."""

    record: Record
    layer: Layer
    named: Mapping[str, Tensor]
    seen: Tensor  # (b,t,l) bool, False at padding

    def table(self) -> pd.DataFrame:
        """A row for every two positions, in the columns described above."""
        return pd.concat([self._frame(example) for example in range(len(self.seen))], ignore_index=True)

    def compare_pair(self, u: str, v: str, top: float = 0.05) -> dict[str, object]:
        """How well v agrees with u, and what chance would give."""
        kept = self.seen.any(-1)
        if not bool(kept.any()):
            raise ValueError("every position of this record is padding: there is nothing to compare")
        first, second, seen = (x[kept] for x in (self.named[u], self.named[v], self.seen))
        tau = kendall(first, second, seen)
        ordered = tau[~tau.isnan()]
        return {
            "u": u,
            "v": v,
            "rows": int(kept.sum()),
            "agreement": float(agreement(first, second, top, seen).double().mean()),
            "agreement_by_chance": float(random_baseline(seen.sum(-1), top)),
            "kendall_tau_b": float(ordered.mean()) if len(ordered) else None,
            "kendall_rows": len(ordered),  # in the others u or v is constant
        }

    def summary(self, pairs: Sequence[tuple[str, str]], top: float) -> pd.DataFrame:
        """One row for each comparison."""
        return pd.DataFrame([self.compare_pair(u, v, top) for u, v in pairs])

    def _frame(self, example: int) -> pd.DataFrame:
        seen = self.seen[example].cpu()
        t, l = (places.numpy() for places in seen.nonzero().T)  # noqa: E741 (the paper's letter)
        source = read_side(self.record, KINDS[self.layer.kind][1], example, seen.shape[1], False)
        token = dict(zip(source.places.tolist(), source.labels, strict=True))
        columns = {"example": example, "target_position": t, "source_position": l}
        columns |= {"source_token": [token[place] for place in l.tolist()]}
        if "targets" in self.layer.extras:
            columns["target"] = self.layer.extras["targets"][example].cpu().numpy()[t]
        return pd.DataFrame(columns | {name: x[example].cpu()[seen].numpy() for name, x in self.named.items()})


def scores(record: Record, names: Sequence[str], *, layer: int = -1) -> Scores:
    """α and these probes of a cross attention, by default of the last, which is the one that is probed."""
    if not isinstance(record, Record):
        raise TypeError(
            f"a Record is wanted, not a {type(record).__name__}; attnlab.recording.probe.record_probes makes one"
        )
    layers = record.kind("cross")
    if not -len(layers) <= layer < len(layers):
        raise ValueError(f"there is no cross attention {layer} in {record!r}")
    chosen = layers[layer]
    weight = chosen.weights.mean(1).detach()  # (b,t,l)
    found = {"weight": weight} | {name: _read_probe(chosen, name, weight) for name in names}
    return Scores(record, chosen, found, _build_mask(record, chosen, weight))


def _read_probe(layer: Layer, name: str, weight: Tensor) -> Tensor:
    if name not in layer.extras:
        raise ValueError(f"{layer.name} has no {name} in its extras; attnlab.recording.probe adds it from the model")
    found = layer.extras[name].detach()
    if found.shape != weight.shape:
        raise ValueError(f"{name} of {layer.name} is {tuple(found.shape)}, but its weights are {tuple(weight.shape)}")
    return found


def _build_mask(record: Record, layer: Layer, weight: Tensor) -> Tensor:
    """Where neither target nor source is padding, and the attention may look; (b,t,l)."""
    seen = layer.mask[(None,) * (4 - layer.mask.dim())][:, 0].expand(weight.shape)
    for name, axis in zip(KINDS[layer.kind], (2, 1), strict=True):
        if name in record.masks:
            seen = seen & record.masks[name].to(seen.device).unsqueeze(axis)
    return seen
