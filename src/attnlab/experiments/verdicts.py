"""A published number beside ours, and the verdict on the two.

    reproduced       the published value lies in our 95 % interval over the seeds, or our mean in the published one
    same direction   of a contrast (a against b): our interval excludes 0, on the side that the paper claims
    not reproduced   neither
    not run          with the reason
    no verdict       fewer than 3 seeds, so that there is no interval; or nothing was published to compare with

A measure that no seed changes, such as a count, is exact: its interval is the point. The interval of a share of seeds
is that of Clopper and Pearson. A cell is official if it was run as the paper ran it, and a stand-in if its tags name
other data, another model or a smaller scale.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from scipy.special import betaincinv, stdtrit

from attnlab.config import suggest_nearest

Verdict = Literal["reproduced", "same direction", "not reproduced", "no verdict", "not run"]
Group = Literal["official", "stand-in", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
STAND_INS = ("other data", "other model", "smaller scale")
TAGS = (*STAND_INS, "erratum")  # erratum: the published form has a mistake, which the note names
FEWEST_SEEDS = 3

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table or figure: what was published, and what each seed gave."""

    item: str
    row: str
    column: str
    published: float | None = None
    values: tuple[float, ...] = ()  # one per seed; of a contrast, the difference within each seed
    published_interval: Interval | None = None
    sign: Literal[-1, 0, 1] = 0  # of a contrast: the side of 0 that the paper claims; 0: not a contrast
    exact: bool = False  # no seed changes it
    correlation: bool = False  # between −1 and 1: its interval is that of Fisher's z
    share: bool = False  # each seed has 1 or 0: the interval is binomial
    tags: tuple[str, ...] = ()
    note: str = ""
    not_run: str = ""  # why there are no values

    def __post_init__(self) -> None:
        for tag in self.tags:
            if tag not in TAGS:
                raise ValueError(
                    f"{self}: unknown tag {tag!r}{suggest_nearest(tag, TAGS)}; available: {', '.join(TAGS)}"
                )
        if bool(self.values) == bool(self.not_run):
            raise ValueError(f"{self} must have either values or a reason why it was not run")
        if self.exact + self.correlation + self.share > 1:
            raise ValueError(f"{self} can only be one of: exact, a correlation, a share of seeds")
        if self.exact and len(self.values) > 1:
            raise ValueError(f"{self} is exact and must have one value, got {len(self.values)}")
        if self.correlation and not all(abs(r) <= 1 for r in self.values):
            raise ValueError(f"{self}: correlations must be between −1 and 1, got {self.values}")
        if self.share and not set(self.values) <= {0.0, 1.0}:
            raise ValueError(f"{self}: a share of seeds has values 0 and 1, got {self.values}")
        bounds = self.published_interval or ()
        numbers = (*self.values, *bounds, *(() if self.published is None else (self.published,)))
        if not all(math.isfinite(x) for x in numbers):
            raise ValueError(
                f"{self}: values must be finite, got {numbers}; drop failed seeds and mention them in note="
            )
        if bounds and bounds[0] > bounds[1]:
            raise ValueError(f"{self}: the published interval {bounds} has its lower end above its upper end")

    def __str__(self) -> str:
        return f"{self.item}, {self.row}, {self.column}"

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def interval(self) -> Interval | None:
        """The mean ± t₀.₉₇₅,ₙ₋₁ · s/√n, from three seeds on; for correlations computed on artanh r; for a share
        binomial; for an exact value the value itself."""
        if self.exact and self.values:
            return self.values[0], self.values[0]
        count = len(self.values)
        if count < FEWEST_SEEDS:
            return None
        if self.share:
            return _compute_binomial(round(sum(self.values)), count)
        values = [math.atanh(r * (1 - 1e-12)) for r in self.values] if self.correlation else self.values
        mean = statistics.fmean(values)
        margin = float(stdtrit(count - 1, 0.975)) * statistics.stdev(values) / math.sqrt(count)
        low, high = mean - margin, mean + margin
        return (math.tanh(low), math.tanh(high)) if self.correlation else (low, high)

    @property
    def verdict(self) -> Verdict:
        if self.not_run:
            return "not run"
        ours, mean = self.interval, self.mean
        if ours is None or mean is None or (self.published is None and not self.published_interval and not self.sign):
            return "no verdict"
        if self.published is not None and ours[0] <= self.published <= ours[1]:
            return "reproduced"
        if self.published_interval and self.published_interval[0] <= mean <= self.published_interval[1]:
            return "reproduced"
        if (self.sign > 0 and ours[0] > 0) or (self.sign < 0 and ours[1] < 0):
            return "same direction"
        return "not reproduced"

    @property
    def group(self) -> Group:
        if self.not_run:
            return "not run"
        return "stand-in" if any(tag in STAND_INS for tag in self.tags) else "official"

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Cell":
        """Return a cell from its stored fields; those at their default may be missing."""
        lists = {name: tuple(x) for name, x in stored.items() if isinstance(x, list)}
        return cls(**stored | lists)


def _compute_binomial(did: int, count: int) -> Interval:
    """Return Clopper and Pearson's 95 % interval of a probability with `did` successes in `count` trials."""
    low = float(betaincinv(did, count - did + 1, 0.025)) if did else 0.0
    high = float(betaincinv(did + 1, count - did, 0.975)) if did < count else 1.0
    return low, high


def make_contrast(a: Cell, b: Cell, *, row: str | None = None, column: str | None = None) -> Cell:
    """Return a − b, seed by seed: the differences of their values and of the published numbers."""
    if a.published is None or b.published is None or a.published == b.published:
        raise ValueError(f"the paper draws no contrast between {a} and {b}: {a.published} and {b.published}")
    if a.share or b.share:
        raise ValueError(f"{a} and {b} are shares of seeds, whose difference has no interval here")
    reason = a.not_run or b.not_run
    if not reason and len(a.values) != len(b.values):
        raise ValueError(f"{a} has {len(a.values)} seeds and {b} has {len(b.values)}: a contrast needs the same seeds")
    return Cell(
        item=a.item,
        row=row or (a.row if a.row == b.row else f"{a.row} − {b.row}"),
        column=column or (a.column if a.column == b.column else f"{a.column} − {b.column}"),
        published=a.published - b.published,
        values=() if reason else tuple(x - y for x, y in zip(a.values, b.values, strict=True)),
        sign=1 if a.published > b.published else -1,
        exact=a.exact and b.exact,
        tags=tuple(dict.fromkeys((*a.tags, *b.tags))),
        not_run=reason,
    )


def count_verdicts(cells: Iterable[Cell]) -> dict[Group, dict[Verdict, int]]:
    """Return how many cells of each group have each verdict."""
    counted: dict[Group, dict[Verdict, int]] = {group: dict.fromkeys(VERDICTS, 0) for group in get_args(Group)}
    for cell in cells:
        counted[cell.group][cell.verdict] += 1
    return counted
