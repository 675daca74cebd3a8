"""What the demo came to: the values of every attention and seed, and how attentions compare."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.commands.demo.settings import DemoConfig
from attnlab.experiments.significance import compute_interval
from attnlab.experiments.study import Findings
from attnlab.records.record import Record

Values = Mapping[str, Any]  # of one run, as `measures` has them
LEARNT = 0.95  # accuracy


@dataclass(frozen=True)
class DemoMeasure:
    """A number of a run; None where it has none."""

    name: str
    of: Callable[[Values], float | None]
    form: str = ".3f"

    def told(self, x: float) -> str:
        return format(x, self.form).replace("-", "−")


def at_head(values: Values, name: str, moment: int = -1) -> float | None:
    """What the head that was chosen has of this at a moment."""
    layer, head = values["head"]
    of_heads = values["at"][moment][name][layer]
    return None if of_heads is None else of_heads[head]


def first_at(values: Values, accuracy: float) -> int | None:
    """The number of the first moment with such an accuracy."""
    return next((n for n, at in enumerate(values["at"]) if at["accuracy"] >= accuracy), None)


def _learnt_at(values: Values) -> float | None:
    moment = first_at(values, LEARNT)
    return None if moment is None else values["moments"][moment]


ACCURACY = DemoMeasure("accuracy", lambda v: v["at"][-1]["accuracy"])
SOONEST = DemoMeasure("95 % at step", _learnt_at, ".0f")
AER = DemoMeasure("AER by weight", lambda v: at_head(v, "aer_weight"))
AER_NORM = DemoMeasure("AER by norm", lambda v: at_head(v, "aer_norm"))
RIGHT = DemoMeasure("on its source", lambda v: at_head(v, "right"), ".2f")
BELOW = DemoMeasure("below 0", lambda v: at_head(v, "below"), ".2f")
AGREEMENT = DemoMeasure("A(α, β)", lambda v: v["at"][-1]["agreement"])
JSD = DemoMeasure("JSD of heads (nats a sentence)", lambda v: v["inside"].get("jsd"), ".2f")
RESIDUAL = DemoMeasure("residual", lambda v: v["inside"].get("residual"))
COSINE = DemoMeasure("cosine", lambda v: v["inside"].get("cosine"))
GRADIENT = DemoMeasure("query gradient at step 0", lambda v: v["inside"].get("initial_gradient"), ".2f")
LAST_GRADIENT = DemoMeasure("and at the end", lambda v: v["inside"].get("gradient"), ".2f")
QUALITY = (ACCURACY, SOONEST, AER, AER_NORM, RIGHT, BELOW, AGREEMENT)
INSIDE = (JSD, RESIDUAL, COSINE, GRADIENT, LAST_GRADIENT)


@dataclass(frozen=True, eq=False)
class Learner:
    """One attention with its seeds."""

    name: str
    parameters: int
    found: Mapping[int, Values]  # by seed
    records: Mapping[int, Record]  # of the first seed, by step

    @property
    def moments(self) -> Sequence[int]:
        return self.first["moments"]

    @property
    def first(self) -> Values:
        return next(iter(self.found.values()))

    @property
    def head(self) -> str:
        layer, head = self.first["head"]
        return f"cross layer {layer}, head {head}"

    def values(self, measure: DemoMeasure) -> dict[int, float]:
        """By seed, of those that have one."""
        each = {seed: measure.of(values) for seed, values in self.found.items()}
        return {seed: x for seed, x in each.items() if x is not None}

    def mean(self, measure: DemoMeasure) -> float | None:
        values = self.values(measure)
        return statistics.fmean(values.values()) if values else None

    def curves(self, of: Callable[[Values, int], float | None]) -> list[list[float]]:
        """A value at every moment, for each seed that has them."""
        each = [[of(values, n) for n in range(len(self.moments))] for values in self.found.values()]
        return [[x for x in line if x is not None] for line in each if None not in line]

    def cell(self, measure: DemoMeasure) -> str:
        """Mean ± half of the 95 % interval over the seeds; that of fewer seeds than all says so."""
        values = list(self.values(measure).values())
        if not values:
            return "–"
        told, spread = measure.told(statistics.fmean(values)), compute_interval(values)
        told += "" if spread is None else f" ± {measure.told((spread[1] - spread[0]) / 2)}"
        return told if len(values) == len(self.found) else f"{told} ({len(values)} of {len(self.found)} seeds)"


@dataclass(frozen=True)
class Order:
    """Which attention has most of something and which least, on average over the seeds; the first of those that tie."""

    most: Learner
    least: Learner
    same: bool  # in every seed

    @property
    def several(self) -> bool:
        return self.most is not self.least


@dataclass(frozen=True, eq=False)
class DemoResults:
    config: DemoConfig
    learners: Sequence[Learner]  # those that learnt
    failed: Mapping[str, str]  # why a run did not come to its end
    copying: Findings | None
    folder: Path

    def order(self, measure: DemoMeasure) -> Order | None:
        """Among those that have a value in every seed; None where there are none."""
        each = {learner: learner.values(measure) for learner in self.learners}
        whole = {learner: statistics.fmean(x.values()) for learner, x in each.items() if len(x) == len(learner.found)}
        if not whole:
            return None
        most, least = (end(whole, key=lambda learner: whole[learner]) for end in (max, min))
        rivals = [each[learner] for learner in whole]
        up, down = each[most], each[least]
        seeds = set.intersection(*map(set, rivals))
        top = all(up[seed] >= other[seed] for other in rivals for seed in seeds)
        bottom = all(down[seed] <= other[seed] for other in rivals for seed in seeds)
        return Order(most, least, top and bottom)
