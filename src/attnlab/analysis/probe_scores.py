"""The probes of a record beside its weights: scores of every source position for every target position.

    example, target_position, source_position      where
    source_token                                   the token there: its text if the record has it, else its id
    target                                         the true word or class y_t, as an id
    weight                                         α, the mean over heads
    beta, saliency                                 the probes β and Δ that attnlab.recording.probe adds to the layer

Padding has no rows. A comparison of two scores treats the scores of each target position as one row. Over all rows it
reports how often A(u, v) holds, how often it holds by chance, and the mean of Kendall's τ_b (agreement.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from attnlab.analysis.agreement import agreement, kendall, random_baseline
from attnlab.analysis.contribution_table import read_side
from attnlab.analysis.sums import build_pair_mask, check_record, read_token_masks
from attnlab.records.record import KINDS, Layer, Record


@dataclass(frozen=True, eq=False)
class Scores:
    """Named scores (b,t,l) of one layer of a record."""

    record: Record
    layer: Layer
    named: Mapping[str, Tensor]
    seen: Tensor  # (b,t,l) bool, False at padding

    def table(self) -> pd.DataFrame:
        """Return a table with a row for every two positions, in the columns described above."""
        return pd.concat([self._frame(example) for example in range(len(self.seen))], ignore_index=True)

    def compare_pair(self, u: str, v: str, top: float = 0.05) -> dict[str, object]:
        """Compute how well v agrees with u, and the agreement expected by chance."""
        kept = self.seen.any(-1)
        if not bool(kept.any()):
            raise ValueError("every position of this record is padding, so there is nothing to compare")
        first, second, seen = (x[kept] for x in (self.named[u], self.named[v], self.seen))
        tau = kendall(first, second, seen)
        ordered = tau[~tau.isnan()]
        return {
            "u": u, "v": v, "rows": int(kept.sum()),
            "agreement": float(agreement(first, second, top, seen).double().mean()),
            "agreement_by_chance": float(random_baseline(seen.sum(-1), top)),
            "kendall_tau_b": float(ordered.mean()) if len(ordered) else None,
            "kendall_rows": len(ordered),  # u or v is constant in the other rows
        }  # fmt: skip

    def summary(self, pairs: Sequence[tuple[str, str]], top: float) -> pd.DataFrame:
        """Return a table with one row for each comparison."""
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
    """Read α and the named probes of a cross attention; default: the last one, which attnlab.recording.probe probes."""
    layers = check_record(record, "scores").kind("cross")
    if not -len(layers) <= layer < len(layers):
        raise ValueError(f"layer {layer} is not a cross attention of this record: it has {len(layers)} ({record!r})")
    chosen = layers[layer]
    weight = chosen.weights.mean(1).detach()  # (b,t,l)
    named = {"weight": weight} | {name: _read_probe(chosen, name, weight) for name in names}
    seen = build_pair_mask(chosen, *read_token_masks(record, chosen))  # (b,1,t,l)
    return Scores(record, chosen, named, seen[:, 0].expand(weight.shape))


def _read_probe(layer: Layer, name: str, weight: Tensor) -> Tensor:
    if name not in layer.extras:
        raise ValueError(f"{layer.name} has no {name} in its extras; add it with attnlab.recording.probe")
    probe = layer.extras[name].detach()
    if probe.shape != weight.shape:
        raise ValueError(f"{layer.name}: {name} has shape {tuple(probe.shape)}, expected {tuple(weight.shape)}")
    return probe
