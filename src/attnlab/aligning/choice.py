"""Which of a model's maps an alignment is read from: by weights, norms or probes, in which layer and head.

A candidate is one map. A reading that leaves the layer or the head open has several, and a rule to choose one by:

    highest-norm   the largest mean of ‖αf(x)‖ over the text, as Kobayashi et al. 2020 choose without gold links
    best-on        the lowest AER on gold links

Heads together ("mean") are the mean of their weights, or the norm of their sum, ‖Σ_h α f(x)‖. Layers together ("mean")
are the mean of their maps; the "layer mean" in the paper's table is another thing, the mean of the layers' AER.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from attnlab.config import suggest_nearest

By = Literal["weight", "norm", "probe"]
Way = Literal["awo", "awi"]
Place = int | Literal["mean"]
Rule = Literal["highest-norm", "best-on"]
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Candidate:
    """One map: by what, how its rows are taken, of which layer and head."""

    by: By
    setting: Way
    layer: Place
    head: Place

    def __str__(self) -> str:
        where = "layers together" if self.layer == "mean" else f"layer {self.layer}"
        who = "heads together" if self.head == "mean" else f"head {self.head}"
        return f"by {self.by}, {self.setting}, {where}, {who}"


@dataclass(frozen=True)
class Reading:
    """What to read; layer and head are a number from 0, "mean", or a rule."""

    by: By = "norm"
    setting: Way = "awi"
    layer: Place | Rule = "highest-norm"
    head: Place | Rule = "mean"

    def __post_init__(self) -> None:
        for name, value, known in (("by", self.by, get_args(By)), ("setting", self.setting, get_args(Way))):
            if value not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, not {value!r}{suggest_nearest(value, known)}"
                )
        if len({place for place in (self.layer, self.head) if place in RULES}) > 1:
            raise ValueError("layer and head are chosen by one rule: say highest-norm, or best-on, for both")

    @property
    def rule(self) -> Rule | None:
        """What chooses among the candidates, where there are several."""
        return next((rule for rule in RULES if rule in (self.layer, self.head)), None)

    def candidates(self, layers: int, heads: int) -> list[Candidate]:
        """The maps that a model of so many cross attentions and heads offers to this reading."""
        if self.by == "probe":
            return [Candidate("probe", "awo", layers - 1, "mean")]
        places = [_places("layer", self.layer, layers), _places("head", self.head, heads)]
        return [Candidate(self.by, self.setting, layer, head) for layer in places[0] for head in places[1]]


def place(text: str, name: str) -> Place | Rule:
    """A layer or a head as it is written: 3, mean, highest-norm, best-on."""
    if text.isdecimal():
        return int(text)
    for known in ("mean", *RULES):
        if text == known:
            return known  # type: ignore[return-value]
    raise ValueError(f"{name} must be a number from 0, mean, {', '.join(RULES)}; not {text!r}")


def _places(name: str, asked: Place | Rule, count: int) -> list[Place]:
    if asked == "mean":
        return ["mean"]
    if isinstance(asked, int):
        if not 0 <= asked < count:
            raise ValueError(f"{name} {asked}: the model's cross attention has {name}s 0 to {count - 1}")
        return [asked]
    return list(range(count))
