"""A published number beside ours, and the verdict on the two.

Let [l, h] be our 95 % interval over n seeds, v the published number and m its margin.

    reproduced       of a number:    v − m ≤ l and h ≤ v + m
    different        of a number:    h < v − m or l > v + m
    same direction   of a contrast:  p* < 0.05, and [l, h] on the side of 0 that the paper claims
    opposite         of a contrast:  p* < 0.05, and [l, h] on the other side
    open             these seeds cannot tell; the cell says how many it would take
    no verdict       n < 3, one model, or the paper says nothing to compare with
    not run          with the reason

**Margin.** The paper's own spread if it has one (`margin`, a standard deviation over its runs), or the interval that it
prints; else m = max(0.05 · |v|, r), with r half a unit of the last printed digit (39.47 has r = 0.005). So a number
near 0 has the margin r: 5 % of nothing is nothing, the paper claims no more than it prints, and a wider margin would be
our choice. An exact cell, such as a count, has m = r: it is equal or different.

**Contrasts.** A contrast has a `sign`: a difference a − b within each seed, or a correlation. p is that of the
two-sided t-test on the seeds' differences (of correlations, on artanh r). p* is corrected by Holm over the family: all
contrasts of the paper that were run at this scale with at least 3 seeds, of all items. Sorted p₁ ≤ … ≤ p_M give

    p*_k = max over j ≤ k of min(1, (M − j + 1) · p_j)

The same differences shown by two items are one test. Because p* ≥ p, a contrast with p* < 0.05 has an interval that
excludes 0. The reverse does not hold: such a contrast is open. 5 % of a small difference is less than seeds can tell,
and a margin as wide as that of the two numbers may contain 0. So a contrast is judged by its direction, and is
reproduced only if, in addition, [l, h] lies within its own margin (r is then that of two numbers).

**Without chance.** A contrast that no seed changes has no p and is judged by its side of 0; an exact one of 0 is
different. A share of seeds (0 or 1 each) has the interval of Clopper and Pearson and can be no contrast.

**One model.** Seeds that only draw other texts for one pretrained model replicate nothing: n counts texts, and the
number of models is 1. Their interval is over texts, so they have no verdict and no p.

**Seeds needed.** The fewest n with power 0.8 (`power`) if mean and spread stay: at the level 0.05 / M to tell a
contrast from 0; at 0.05 to tell a number from both ends of its margin, or from the nearer end if the mean is outside.
For a share, the fewest n at which the same share is decided.

A cell is official if it has the paper's data, vocabulary and model at full scale, and a stand-in if a tag names another
one.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal, get_args

from attnlab.config import suggest_nearest
from attnlab.experiments.power import FEWEST_SEEDS, LEVEL, MOST_SEEDS, count_seeds_needed
from attnlab.experiments.significance import (
    Interval,
    compute_interval,
    compute_p,
    compute_share_interval,
    correct_by_holm,
)

Verdict = Literal["reproduced", "same direction", "opposite", "different", "open", "no verdict", "not run"]
Group = Literal["official", "stand-in", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
ONE_MODEL = "one model"  # every seed reads the same pretrained model
STAND_INS = ("other data", "other vocabulary", "other model", "smaller scale")
TAGS = (*STAND_INS, ONE_MODEL, "erratum")  # erratum: the published form has a mistake, which the note names
IMPOSSIBLE = "not possible here: "  # starts the reason of a cell that no run of ours can fill
SHARE = 0.05  # of a published number: its margin
CLAIM = ("published", "published_interval", "margin", "number", "sign", "tags")  # fields of what the paper says


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table or figure: what was published, and what each seed gave."""

    item: str
    row: str
    column: str
    published: float | None = None
    values: tuple[float, ...] = ()  # one per seed; of a contrast, the difference within each seed
    published_interval: Interval | None = None
    margin: float | None = None  # the paper's own spread; None: 5 % of the published number, or its rounding
    number: str | None = None  # the published number, if several cells have it; "": computed from other numbers
    sign: Literal[-1, 0, 1] = 0  # of a contrast: the side of 0 that the paper claims; 0: not a contrast
    exact: bool = False  # no seed changes it
    correlation: bool = False  # between −1 and 1: its interval is that of Fisher's z
    share: bool = False  # each seed has 1 or 0: the interval is binomial
    tags: tuple[str, ...] = ()
    note: str = ""
    not_run: str = ""  # why there are no values
    family: tuple[float, ...] = ()  # p of every claim of the paper that was tested, its own included

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
        if self.share and self.sign:
            raise ValueError(f"{self} is a share of seeds, which has no test of a contrast here")
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
        """The 95 % t-interval of the mean, from three seeds on; for correlations computed on artanh r; for a share
        binomial; for an exact value the value itself."""
        if self.exact and self.values:
            return self.values[0], self.values[0]
        if self.share:
            count = len(self.values)
            return compute_share_interval(round(sum(self.values)), count) if count >= FEWEST_SEEDS else None
        interval = compute_interval(self._scale(self.values))
        return (math.tanh(interval[0]), math.tanh(interval[1])) if interval and self.correlation else interval

    @property
    def bounds(self) -> Interval | None:
        """The published number ± its margin, or the published interval."""
        if self.published_interval or self.published is None:
            return self.published_interval
        half = self.margin
        if half is None:
            rounding = _find_rounding(self.published) * (2 if self.sign else 1)
            half = rounding if self.exact else max(SHARE * abs(self.published), rounding)
        return self.published - half, self.published + half

    @property
    def p(self) -> float | None:
        """The p of the t-test of a contrast; None if it cannot be tested."""
        tested = self.sign and not self.exact and ONE_MODEL not in self.tags
        return compute_p(self._scale(self.values)) if tested else None

    @property
    def holm(self) -> float | None:
        """p*: p corrected by Holm's method for the family."""
        if (p := self.p) is None:
            return None
        family = self.family or (p,)
        return correct_by_holm(dict(enumerate(family)))[family.index(p)]

    @property
    def is_impossible(self) -> bool:
        """Whether no run of ours can fill it: the paper's data are not at hand, or it is no run of the paper."""
        return self.not_run.startswith(IMPOSSIBLE)

    @property
    def has_claim(self) -> bool:
        """Whether the paper says something about it."""
        return self.published is not None or self.published_interval is not None or bool(self.sign)

    @property
    def verdict(self) -> Verdict:
        if self.not_run:
            return "not run"
        ours, bounds = self.interval, self.bounds
        if ours is None or not self.has_claim or ONE_MODEL in self.tags:
            return "no verdict"
        inside = bounds is not None and bounds[0] <= ours[0] and ours[1] <= bounds[1]
        if self.sign:
            side = 1 if ours[0] > 0 else -1 if ours[1] < 0 else 0
            if not side and self.exact:
                return "different"
            if not side or (self.holm is not None and self.holm >= LEVEL):
                return "open"
            return "opposite" if side != self.sign else "reproduced" if inside else "same direction"
        if inside:
            return "reproduced"
        assert bounds is not None
        return "different" if ours[1] < bounds[0] or ours[0] > bounds[1] else "open"

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds that would decide an open cell; None if it is not open, or MOST_SEEDS are too few."""
        if self.verdict != "open":
            return None
        low, high = self.bounds or (0.0, 0.0)
        if self.share:
            return self._count_share_seeds(low, high)
        values = self._scale(self.values)
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        if self.sign:
            return count_seeds_needed([abs(mean)], spread, LEVEL / max(1, len(self.family)))
        low, high = self._scale((low, high))
        inside = low <= mean <= high
        return count_seeds_needed([mean - low, high - mean] if inside else [max(low - mean, mean - high)], spread)

    @property
    def outcome(self) -> str:
        """The verdict, with the number of seeds that an open cell needs."""
        if self.verdict != "open":
            return self.verdict
        needed = self.seeds_needed
        return f"open: {needed:,} seeds" if needed else f"open: over {MOST_SEEDS:,} seeds"

    def _scale(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Return the scale on which seeds are averaged: artanh r of correlations."""
        if not self.correlation:
            return values
        return tuple(math.atanh(max(-1.0, min(1.0, r)) * (1 - 1e-12)) for r in values)

    def _count_share_seeds(self, low: float, high: float) -> int | None:
        share = statistics.fmean(self.values)
        for count in range(len(self.values) + 1, MOST_SEEDS + 1):
            ours = compute_share_interval(round(share * count), count)
            if (low <= ours[0] and ours[1] <= high) or ours[1] < low or ours[0] > high:
                return count
        return None

    @property
    def group(self) -> Group:
        if self.not_run:
            return "not run"
        return "stand-in" if any(tag in STAND_INS for tag in self.tags) else "official"

    def restate(self, other: "Cell") -> "Cell":
        """Return the cell with its own values and with the claim and the tags of another."""
        return replace(self, **{name: getattr(other, name) for name in CLAIM})

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Cell":
        """Return a cell from its stored fields; those at their default may be missing."""
        lists = {name: tuple(x) for name, x in stored.items() if isinstance(x, list)}
        return cls(**stored | lists)


def _find_rounding(x: float) -> float:
    """Return half a unit of the last digit of a number as it is written."""
    exponent = Decimal(str(x)).as_tuple().exponent
    assert isinstance(exponent, int)
    return 0.5 * 10.0**exponent


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
        number="",
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


def correct_claims(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells of a paper, whose contrasts know the p of all others; equal differences are one test."""
    cells = list(cells)
    tests = {cell.values: p for cell in cells if (p := cell.p) is not None}
    family = tuple(sorted(tests.values()))
    return [cell if cell.p is None else replace(cell, family=family) for cell in cells]


def list_numbers(cells: Iterable[Cell]) -> set[str]:
    """Return the published numbers that cells are compared with, each once."""
    printed = (cell for cell in cells if cell.published is not None or cell.published_interval is not None)
    return {str(cell) if cell.number is None else cell.number for cell in printed if cell.number != ""}
