"""A published number beside ours, and what the two together say.

    reproduced       the published value lies in our 95 % interval over the seeds, or our mean in the published one
    same direction   of a contrast (a against b): our interval excludes 0, on the side that the paper says
    not reproduced   neither
    not run          with the reason
    no verdict       fewer than 3 seeds, so that there is no interval; or nothing was published to compare with

A measure that no seed changes, such as a count, is exact: its interval is the point. Of a share of seeds that did
something it is Clopper and Pearson's, which stays between 0 and 1 and is not a point where all did. A cell is official
where it was run as the paper ran it, and a stand-in where its tags say that data, model or scale were others.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from scipy.special import betaincinv, stdtrit

from attnlab.config import suggest_nearest

Verdict = Literal["reproduced", "same direction", "not reproduced", "no verdict", "not run"]
Group = Literal["official", "stand-in", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
STAND_INS = ("other data", "other model", "smaller scale")
TAGS = (*STAND_INS, "erratum")  # erratum: the published form has a slip, which the note names
FEWEST_SEEDS = 3

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table or figure: what was published, and what each seed gave."""

    item: str
    row: str
    column: str
    published: float | None = None
    values: tuple[float, ...] = ()  # one a seed; of a contrast, the difference within each seed
    published_interval: Interval | None = None
    sign: Literal[-1, 0, 1] = 0  # of a contrast: the side of 0 that the paper says; 0: not a contrast
    exact: bool = False  # no seed changes it
    correlation: bool = False  # between −1 and 1: its interval is that of Fisher's z
    share: bool = False  # 1 of a seed that did it, 0 of one that did not: its interval is the binomial's
    tags: tuple[str, ...] = ()
    note: str = ""
    not_run: str = ""  # why there are no values

    def __post_init__(self) -> None:
        for tag in self.tags:
            if tag not in TAGS:
                raise ValueError(
                    f"{self}: unknown tag {tag!r}{suggest_nearest(tag, TAGS)}; there are {', '.join(TAGS)}"
                )
        if bool(self.values) == bool(self.not_run):
            raise ValueError(f"{self} must have values, or a reason why it was not run; and not both")
        if self.exact + self.correlation + self.share > 1:
            raise ValueError(f"{self} can be exact, a correlation, or a share of seeds: one of them")
        if self.exact and len(self.values) > 1:
            raise ValueError(f"{self} is exact, and has {len(self.values)} values; it must have one")
        if self.correlation and not all(abs(r) <= 1 for r in self.values):
            raise ValueError(f"{self}: {self.values} are not all between −1 and 1, as correlations are")
        if self.share and not set(self.values) <= {0.0, 1.0}:
            raise ValueError(f"{self}: {self.values} are not all 0 or 1, as in a share of seeds")
        bounds = self.published_interval or ()
        numbers = (*self.values, *bounds, *(() if self.published is None else (self.published,)))
        if not all(math.isfinite(x) for x in numbers):
            raise ValueError(f"{self}: {numbers} are not all finite; leave out a seed that failed, and say so in note=")
        if bounds and bounds[0] > bounds[1]:
            raise ValueError(f"{self}: the published interval {bounds} ends before it begins")

    def __str__(self) -> str:
        return f"{self.item}, {self.row}, {self.column}"

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def interval(self) -> Interval | None:
        """The mean ± t₀.₉₇₅,ₙ₋₁ · s/√n, from three seeds on; of correlations that of artanh r, put back; of a share the
        binomial's; an exact value is its own."""
        if self.exact and self.values:
            return self.values[0], self.values[0]
        count = len(self.values)
        if count < FEWEST_SEEDS:
            return None
        if self.share:
            return _binomial(round(sum(self.values)), count)
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

    def as_json(self) -> dict[str, Any]:
        """Its fields, and what follows from them for those who only read."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"mean": self.mean, "interval": self.interval, "verdict": self.verdict, "group": self.group}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Cell":
        own: dict[str, Any] = {"correlation": False, "share": False} | stored
        own = {field.name: own[field.name] for field in fields(cls)}
        for name in ("values", "published_interval", "tags"):
            own[name] = None if own[name] is None else tuple(own[name])
        return cls(**own)


def _binomial(did: int, count: int) -> Interval:
    """Clopper and Pearson's 95 % interval of a probability, of which so many trials of a count came true."""
    low = float(betaincinv(did, count - did + 1, 0.025)) if did else 0.0
    high = float(betaincinv(did + 1, count - did, 0.975)) if did < count else 1.0
    return low, high


def contrast(a: Cell, b: Cell, *, row: str | None = None, column: str | None = None) -> Cell:
    """a against b, seed by seed: the differences of their values, and of what was published."""
    if a.published is None or b.published is None or a.published == b.published:
        raise ValueError(f"the paper draws no contrast between {a} and {b}: {a.published} and {b.published}")
    if a.share or b.share:
        raise ValueError(f"{a} and {b} are shares of seeds: the difference of two has no interval here")
    reason = a.not_run or b.not_run
    if not reason and len(a.values) != len(b.values):
        raise ValueError(f"{a} has {len(a.values)} seeds and {b} has {len(b.values)}: a contrast is within a seed")
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


def tally(cells: Iterable[Cell]) -> dict[Group, dict[Verdict, int]]:
    """How many cells of each group have each verdict."""
    counted: dict[Group, dict[Verdict, int]] = {group: dict.fromkeys(VERDICTS, 0) for group in get_args(Group)}
    for cell in cells:
        counted[cell.group][cell.verdict] += 1
    return counted
