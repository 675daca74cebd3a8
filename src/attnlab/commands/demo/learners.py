"""The results of the demo: every attention with its seeds, and how attentions rank."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from attnlab.commands.demo.settings import DemoConfig
from attnlab.experiments.seed_values import SeedMeasure, Values, read_path
from attnlab.experiments.study import Findings
from attnlab.records.record import Record

LEARNT = 0.95  # accuracy


def read_head(values: Values, name: str, moment: int = -1) -> float | None:
    """Return the value of the chosen head at a moment."""
    layer, head = values["head"]
    by_head = values["at"][moment][name][layer]
    return None if by_head is None else by_head[head]


def find_moment(values: Values, accuracy: float) -> int | None:
    """Return the number of the first moment with this accuracy."""
    return next((n for n, at in enumerate(values["at"]) if at["accuracy"] >= accuracy), None)


def _read_learnt_step(values: Values) -> float | None:
    moment = find_moment(values, LEARNT)
    return None if moment is None else values["moments"][moment]


ACCURACY = SeedMeasure("accuracy", lambda v: v["at"][-1]["accuracy"], form=".3f")
SOONEST = SeedMeasure("95 % at step", _read_learnt_step, form=".0f")
AER = SeedMeasure("AER by weight", lambda v: read_head(v, "aer_weight"), form=".3f")
AER_NORM = SeedMeasure("AER by norm", lambda v: read_head(v, "aer_norm"), form=".3f")
RIGHT = SeedMeasure("on its source", lambda v: read_head(v, "right"), form=".2f")
BELOW = SeedMeasure("below 0", lambda v: read_head(v, "below"), form=".2f")
AGREEMENT = SeedMeasure("A(α, β)", lambda v: v["at"][-1]["agreement"], form=".3f")
JSD = SeedMeasure("JSD of heads (nats a sentence)", read_path("inside", "jsd"), form=".2f")
RESIDUAL = SeedMeasure("residual", read_path("inside", "residual"), form=".3f")
COSINE = SeedMeasure("cosine", read_path("inside", "cosine"), form=".3f")
GRADIENT = SeedMeasure("query gradient at step 0", read_path("inside", "initial_gradient"), form=".2f")
LAST_GRADIENT = SeedMeasure("and at the end", read_path("inside", "gradient"), form=".2f")
QUALITY = (ACCURACY, SOONEST, AER, AER_NORM, RIGHT, BELOW, AGREEMENT)
INSIDE = (JSD, RESIDUAL, COSINE, GRADIENT, LAST_GRADIENT)


@dataclass(frozen=True, eq=False)
class Learner:
    """One attention with its seeds."""

    name: str
    parameters: int
    measured: Mapping[int, Values]  # by seed
    records: Mapping[int, Record]  # of the first seed, by step

    @property
    def first(self) -> Values:
        """What was measured of the first seed."""
        return next(iter(self.measured.values()))

    @property
    def moments(self) -> Sequence[int]:
        return self.first["moments"]

    def list_curves(self, read: Callable[[Values, int], float | None]) -> list[list[float]]:
        """Return a value at every moment, for each seed that has all of them."""
        curves = [[read(values, n) for n in range(len(self.moments))] for values in self.measured.values()]
        return [[x for x in curve if x is not None] for curve in curves if None not in curve]


@dataclass(frozen=True)
class Ranking:
    """The attentions with the highest and the lowest mean over seeds; of equal ones the first."""

    highest: Learner
    lowest: Learner
    in_every_seed: bool

    @property
    def has_several(self) -> bool:
        return self.highest is not self.lowest


@dataclass(frozen=True, eq=False)
class DemoResults:
    config: DemoConfig
    learners: Sequence[Learner]  # without those whose first seed failed
    failures: Mapping[str, str]  # the reason, by attention and seed
    copying: Findings | None

    def rank(self, measure: SeedMeasure) -> Ranking | None:
        """Rank the attentions that have a value in every seed; None if there are none."""
        values = {learner: measure.list_values(learner.measured) for learner in self.learners}
        whole = {learner: x for learner, x in values.items() if len(x) == len(learner.measured)}
        if not whole:
            return None
        highest, lowest = (end(whole, key=lambda x: statistics.fmean(whole[x].values())) for end in (max, min))
        seeds = set.intersection(*map(set, whole.values()))
        same = all(whole[lowest][seed] <= x[seed] <= whole[highest][seed] for x in whole.values() for seed in seeds)
        return Ranking(highest, lowest, same)
