"""A trained translator on the gold pairs: the alignment error of all its maps, by weights and by norms."""

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
    """The link counts of every map of one trained model on the gold pairs, and the mean norm of each layer and head."""

    layers: int
    heads: int
    counts: dict[Candidate, np.ndarray]  # (pairs, 4)
    norms: dict[tuple[Place, Place], float]
    valid_loss: float

    def compute_error(self, by: By, setting: RowSetting, layer: Place, head: Place = "mean") -> float:
        """Return the AER in %."""
        return 100 * compute_rate("aer", self.counts[Candidate(by, setting, layer, head)])

    def list_layer_errors(self, by: By, setting: RowSetting) -> list[float]:
        return [self.compute_error(by, setting, layer) for layer in range(self.layers)]

    def list_head_errors(self, by: By, setting: RowSetting) -> list[float]:
        return [self.compute_error(by, setting, *place) for place in self.places]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Every layer and head."""
        return list(product(range(self.layers), range(self.heads)))

    def choose_two_fold(self, by: By, setting: RowSetting) -> float:
        """Return the AER in % if each half of the pairs is scored by the layer that is best on the other half."""
        layers = [self.counts[Candidate(by, setting, layer, "mean")] for layer in range(self.layers)]
        half = np.random.default_rng(0).permutation(len(layers[0])) % 2
        scored = []
        for here in (0, 1):
            best = min(range(self.layers), key=lambda layer: compute_rate("aer", layers[layer][half == here]))
            scored.append(layers[best][half != here])
        return 100 * compute_rate("aer", np.concatenate(scored))

    def make_rows(self, setting: RowSetting) -> dict[str, float]:
        """Return the rows of the table for AWO or AWI."""
        rows: dict[str, float] = {}
        for by in METHODS:
            layers = self.list_layer_errors(by, setting)
            rows[f"{by}, layer mean"] = float(np.mean(layers))
            rows[f"{by}, best layer"] = min(layers)
            rows[f"{by}, best layer by 2-fold choice"] = self.choose_two_fold(by, setting)
            rows[f"{by}, best head"] = min(self.list_head_errors(by, setting))
        layer = max(range(self.layers), key=lambda layer: self.norms[layer, "mean"])
        head = max(self.places, key=self.norms.__getitem__)
        rows["norm, layer of the highest norm"] = self.compute_error("norm", setting, layer)
        rows["norm, head of the highest norm"] = self.compute_error("norm", setting, *head)
        errors, sizes = self.list_head_errors("norm", setting), [self.norms[place] for place in self.places]
        if len(set(errors)) > 1:  # otherwise there is no correlation
            for name, correlation in RELATIONS.items():
                rows[name] = float(correlation(errors, sizes).statistic)
        return rows

    def to_json(self) -> dict[str, Any]:
        counts = {which: " ".join(map(str, counts.flatten())) for which, counts in self.counts.items()}
        return {
            "layers": self.layers,
            "heads": self.heads,
            "valid_loss": self.valid_loss,
            "counts": [asdict(which) | {"counts": text} for which, text in counts.items()],
            "norms": [{"layer": layer, "head": head, "norm": norm} for (layer, head), norm in self.norms.items()],
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "GoldCounts":
        counts = {}
        for each in stored["counts"]:
            which = Candidate(each["by"], each["setting"], each["layer"], each["head"])
            counts[which] = np.array(each["counts"].split(), int).reshape(-1, 4)
        norms = {(each["layer"], each["head"]): each["norm"] for each in stored["norms"]}
        return cls(stored["layers"], stored["heads"], counts, norms, stored["valid_loss"])


def measure_run(run: Run, source: Words, target: Words, gold: Gold) -> GoldCounts:
    """Count the links of every map of a run on the gold pairs, in one pass."""
    found = find_links(open_run_reader(run, source, target), _list_maps, with_norms=True)
    layers = 1 + max(c.layer for c in found.aligned if isinstance(c.layer, int))
    heads = 1 + max(c.head for c in found.aligned if isinstance(c.head, int))
    counts = {candidate: found.count_links(candidate, gold) for candidate in found.aligned}
    norms = {(c.layer, c.head): found.mean_norm(c) for c in found.aligned}
    return GoldCounts(layers, heads, counts, norms, float(run.folder.position().get("best", 0.0)))


def _list_maps(layers: int, heads: int) -> list[Candidate]:
    places: list[Place] = ["mean", *range(heads)]
    return [Candidate(*spot) for spot in product(METHODS, SETTINGS, range(layers), places)]
