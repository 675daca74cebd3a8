"""A trained translator on the gold pairs: the rates of all its maps, by weights and by norms, and what they come to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from attnlab.aligning.choice import By, Candidate, Place, RowSetting
from attnlab.aligning.extraction import find_links
from attnlab.aligning.pair_readers import open_run_reader
from attnlab.analysis.alignment import compute_rate
from attnlab.tasks.links import Gold
from attnlab.training.runs import Run

METHODS: tuple[By, ...] = ("weight", "norm")
SETTINGS: tuple[RowSetting, ...] = ("awo", "awi")
RELATIONS = {"heads: Spearman's ρ of AER and norm": spearmanr, "heads: Pearson's r of AER and norm": pearsonr}

Words = Sequence[Sequence[str]]  # of every sentence


@dataclass(frozen=True, eq=False)
class GoldCounts:
    """One trained model on the gold pairs: what the rates of every map are made of, and the mean norm of its places."""

    layers: int
    heads: int
    counts: dict[Candidate, np.ndarray]  # (pairs, 4)
    norms: dict[tuple[Place, Place], float]
    valid_loss: float

    def error(self, by: By, setting: RowSetting, layer: Place, head: Place = "mean") -> float:
        """AER in %."""
        return 100 * compute_rate("aer", self.counts[Candidate(by, setting, layer, head)])

    def by_layer(self, by: By, setting: RowSetting) -> list[float]:
        return [self.error(by, setting, layer) for layer in range(self.layers)]

    def by_head(self, by: By, setting: RowSetting) -> list[float]:
        return [self.error(by, setting, *place) for place in self.places()]

    def places(self) -> list[tuple[int, int]]:
        return [(layer, head) for layer in range(self.layers) for head in range(self.heads)]

    def two_fold(self, by: By, setting: RowSetting) -> float:
        """AER in %, every half scored by the layer that is best on the other half."""
        layers = [self.counts[Candidate(by, setting, layer, "mean")] for layer in range(self.layers)]
        half = np.random.default_rng(0).permutation(len(layers[0])) % 2
        scored = []
        for here in (0, 1):
            best = min(range(self.layers), key=lambda layer: compute_rate("aer", layers[layer][half == here]))
            scored.append(layers[best][half != here])
        return 100 * compute_rate("aer", np.concatenate(scored))

    def rows(self, setting: RowSetting) -> dict[str, float]:
        """The table's rows for AWO or AWI."""
        rows: dict[str, float] = {}
        for by in METHODS:
            layers = self.by_layer(by, setting)
            rows[f"{by}, layer mean"] = float(np.mean(layers))
            rows[f"{by}, best layer"] = min(layers)
            rows[f"{by}, best layer by 2-fold choice"] = self.two_fold(by, setting)
            rows[f"{by}, best head"] = min(self.by_head(by, setting))
        layer = max(range(self.layers), key=lambda layer: self.norms[layer, "mean"])
        head = max(self.places(), key=self.norms.__getitem__)
        rows["norm, layer of the highest norm"] = self.error("norm", setting, layer)
        rows["norm, head of the highest norm"] = self.error("norm", setting, *head)
        errors, sizes = self.by_head("norm", setting), [self.norms[place] for place in self.places()]
        if len(set(errors)) > 1:  # else there is no correlation
            for name, correlation in RELATIONS.items():
                rows[name] = float(correlation(errors, sizes).statistic)
        return rows

    def as_json(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "heads": self.heads,
            "valid_loss": self.valid_loss,
            "counts": [
                asdict(which) | {"counts": " ".join(map(str, counts.flatten()))}
                for which, counts in self.counts.items()
            ],
            "norms": [{"layer": layer, "head": head, "norm": norm} for (layer, head), norm in self.norms.items()],
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "GoldCounts":
        counts = {
            Candidate(each["by"], each["setting"], each["layer"], each["head"]): np.array(
                each["counts"].split(), int
            ).reshape(-1, 4)
            for each in stored["counts"]
        }
        norms = {(each["layer"], each["head"]): each["norm"] for each in stored["norms"]}
        return cls(stored["layers"], stored["heads"], counts, norms, stored["valid_loss"])


def measure_run(run: Run, source: Words, target: Words, gold: Gold) -> GoldCounts:
    """Every map of a run on the gold pairs, in one pass."""
    found = find_links(open_run_reader(run, source, target), _list_maps, with_norms=True)
    layers = 1 + max(c.layer for c in found.aligned if isinstance(c.layer, int))
    heads = 1 + max(c.head for c in found.aligned if isinstance(c.head, int))
    counts = {candidate: found.count_links(candidate, gold) for candidate in found.aligned}
    norms = {(c.layer, c.head): found.mean_norm(c) for c in found.aligned}
    return GoldCounts(layers, heads, counts, norms, float(run.folder.position().get("best", 0.0)))


def _list_maps(layers: int, heads: int) -> list[Candidate]:
    places: list[Place] = ["mean", *range(heads)]
    return [Candidate(*spot) for spot in product(METHODS, SETTINGS, range(layers), places)]
