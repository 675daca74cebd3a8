"""Choose the map that an alignment is read from: by weights, norms or probes, in one layer and head.

A candidate is one map. A reading without a fixed layer or head has several candidates, and a rule to choose one:

    highest-norm   the largest mean of ‖αf(x)‖ over the text; Kobayashi et al. 2020 use it without gold links
    best-on        the lowest AER on gold links

Head "mean" is the mean of the heads' weights, or the norm of their sum, ‖Σ_h α f(x)‖. Layer "mean" is the mean of the
layers' maps. It is not the "layer mean" of the paper's table, which is the mean of the layers' AER.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from attnlab.config import Natural, check_fields

By = Literal["weight", "norm", "probe"]
RowSetting = Literal["awo", "awi"]
RowChoice = Literal["awo", "awi", "auto"]
Place = Natural | Literal["mean"]
Rule = Literal["highest-norm", "best-on"]
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Candidate:
    """One map: weights, norms or probes, of one layer and head, with rows taken as output (awo) or input (awi)."""

    by: By
    setting: RowSetting
    layer: Place
    head: Place

    def __str__(self) -> str:
        where = "layers together" if self.layer == "mean" else f"layer {self.layer}"
        who = "heads together" if self.head == "mean" else f"head {self.head}"
        return f"by {self.by}, {self.setting}, {where}, {who}"


@dataclass(frozen=True)
class Reading:
    """The maps to read. layer and head are a number from 0, "mean", or a rule. Setting "auto" reads both."""

    by: By = "norm"
    setting: RowChoice = "auto"
    layer: Place | Rule = "highest-norm"
    head: Place | Rule = "mean"

    def __post_init__(self) -> None:
        check_fields(self)
        if len({place for place in (self.layer, self.head) if place in RULES}) > 1:
            raise ValueError("layer and head must use the same rule: pass highest-norm or best-on for both")

    @property
    def rule(self) -> Rule | None:
        """The rule that chooses among several candidates, or None."""
        return next((rule for rule in RULES if rule in (self.layer, self.head)), None)

    def candidates(self, layers: int, heads: int) -> list[Candidate]:
        """List the maps to read from a model with this number of cross-attention layers and heads."""
        if self.by == "probe":
            return [Candidate("probe", "awo", layers - 1, "mean")]
        places = [_list_places("layer", self.layer, layers), _list_places("head", self.head, heads)]
        settings: tuple[RowSetting, ...] = get_args(RowSetting) if self.setting == "auto" else (self.setting,)
        return [Candidate(self.by, s, layer, head) for layer in places[0] for head in places[1] for s in settings]


def parse_place(text: str, name: str) -> Place | Rule:
    """Parse a layer or head: a number, mean, highest-norm or best-on."""
    if text.isdecimal():
        return int(text)
    if text in ("mean", *RULES):
        return text  # type: ignore[return-value]
    raise ValueError(f"{name} must be a number from 0, mean or {' or '.join(RULES)}, got {text!r}")


def _list_places(name: str, place: Place | Rule, count: int) -> list[Place]:
    if place == "mean":
        return ["mean"]
    if isinstance(place, int):
        if not 0 <= place < count:
            raise ValueError(f"{name} must be 0 to {count - 1} in this model's cross attention, got {place}")
        return [place]
    return list(range(count))
