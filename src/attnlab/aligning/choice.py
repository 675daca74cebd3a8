"""Choose the map that an alignment is read from: by weights, norms or probes, in one layer and head.

A candidate is one map. A reading without a fixed layer or head has several candidates, and a rule to choose one:

    highest-norm     the largest mean of ‖αf(x)‖ over the text; Kobayashi et al. 2020 use it without gold links
    lowest-entropy   the smallest mean entropy of a row of the map, as a share of that of an even row
    agreement        the most links in common with the other direction; without one, the largest evidence of the links
    best-on          the lowest AER on gold links

By "auto" takes weights, norms and signed contributions as candidates, and chooses by agreement.

    weight     α                          signed     Σ_h α f(x) · y/‖y‖, y the output of the attention
    norm       ‖αf(x)‖                    gradient   |e · ∂ log p(y_t)/∂e|, e the vector of a source token
    probe      exp β                      encoder    the similarity of encoded words; `encoder_views` reads it

Head "mean" is the mean of the heads' weights, or the norm of their sum, ‖Σ_h α f(x)‖. Layer "mean" is the mean of the
layers' maps. It is not the "layer mean" of the paper's table, which is the mean of the layers' AER.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from attnlab.config import Natural, check_fields, suggest_nearest

By = Literal["weight", "norm", "signed", "probe", "gradient"]
ReadBy = Literal["weight", "norm", "signed", "probe", "gradient", "auto"]
RowSetting = Literal["awo", "awi"]
RowChoice = Literal["awo", "awi", "auto"]
Place = Natural | Literal["mean"]
Rule = Literal["highest-norm", "lowest-entropy", "agreement", "best-on"]
RULES: tuple[Rule, ...] = get_args(Rule)
AUTOMATIC: tuple[By, ...] = ("norm", "weight", "signed")  # what by=auto chooses from
SINGLE: tuple[By, ...] = ("probe", "gradient")  # one map for the whole model, with rows that predict


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

    by: ReadBy = "norm"
    setting: RowChoice = "auto"
    layer: Place | Rule = "highest-norm"
    head: Place | Rule = "mean"

    def __post_init__(self) -> None:
        check_fields(self)
        if len({place for place in (self.layer, self.head) if place in RULES}) > 1:
            raise ValueError(f"layer and head must use the same rule: pass one of {', '.join(RULES)} for both")

    @property
    def rule(self) -> Rule | None:
        """The rule that chooses among several candidates, or None."""
        return next((rule for rule in RULES if rule in (self.layer, self.head)), None)

    def candidates(self, layers: int, heads: int) -> list[Candidate]:
        """List the maps to read from a model with this number of cross-attention layers and heads."""
        if self.by in SINGLE:
            return [Candidate(self.by, "awo", layers - 1, "mean")]
        places = [_list_places("layer", self.layer, layers), _list_places("head", self.head, heads)]
        settings: tuple[RowSetting, ...] = get_args(RowSetting) if self.setting == "auto" else (self.setting,)
        bys: tuple[By, ...] = AUTOMATIC if self.by == "auto" else (self.by,)
        spots = [(layer, head) for layer in places[0] for head in places[1]]
        return [Candidate(by, s, *spot) for by in bys for spot in spots for s in settings if _has_head(by, spot[1])]


def _has_head(by: By, head: Place) -> bool:
    """Return whether the map exists: signed contributions are those of all heads together."""
    return by != "signed" or head == "mean"


def parse_place(text: str, name: str) -> Place | Rule:
    """Parse a layer or head: a number, mean or a rule."""
    if text.isdecimal():
        return int(text)
    if text in ("mean", *RULES):
        return text  # type: ignore[return-value]
    raise ValueError(
        f"{name} must be a number from 0, mean or {' or '.join(RULES)}, got {text!r}{suggest_nearest(text, RULES)}"
    )


def _list_places(name: str, place: Place | Rule, count: int) -> list[Place]:
    if place == "mean":
        return ["mean"]
    if isinstance(place, int):
        if not 0 <= place < count:
            raise ValueError(f"{name} must be 0 to {count - 1} in this model's cross attention, got {place}")
        return [place]
    return list(range(count))
