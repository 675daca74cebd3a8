"""The rows of a table: variants of a model, trained alike on one corpus with every seed, or the reason why not."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.experiments.corpora import Ground, select_names
from attnlab.experiments.engine import Measured
from attnlab.experiments.plan import Measure
from attnlab.experiments.verdicts import Cell

NOT_FINITE = "it is infinite or not a number"
VALIDATION = "validation perplexity"  # a column
Value = Callable[[dict[str, Any]], float]  # of what was measured


def read_perplexity(part: str) -> Value:
    """Return the function that reads a perplexity from measured {"perplexity": {"valid": …, "test": …}}."""
    return lambda values: values["perplexity"][part]


@dataclass(frozen=True)
class Variant:
    """A row's model: its name and what it changes."""

    name: str  # the value of attention=
    label: str  # its name in the table
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    at: str = ""  # the condition, if a table has several rows of one name


class Variants:
    """Variants on one corpus, read from the ledger and made into the cells of one item."""

    def __init__(
        self, item: str, ground: Ground, variants: Sequence[Variant], measure: Measure, known: Sequence[str]
    ) -> None:
        """known: every name of the study, of which attention= may select some."""
        self.item, self.ground, self.setting = item, ground, ground.setting
        self.reason = ground.explain_absence()
        self.names = select_names(self.setting, "attention", known)
        self.measured: Measured[tuple[Variant, int]] = Measured()
        if not self.reason:
            asked = [variant for variant in variants if variant.name in self.names]
            plan = {
                (each, seed): ground.plan_run(seed, each.values, measure)
                for each in asked
                for seed in self.setting.seeds
            }
            self.measured = self.setting.rows.read_plan(plan)
            if plan and not self.measured.rows:
                self.reason = ground.explain_missing()

    @property
    def comparable(self) -> bool:
        """Whether a published number can be compared with ours: on the paper's data, at full scale."""
        return self.ground.corpus.of_paper and (self.setting.scale == "full" or bool(self.reason))

    def list_values(self, variant: Variant) -> list[dict[str, Any]]:
        """Return what was measured of a variant, seed by seed."""
        keys = [(variant, seed) for seed in self.setting.seeds]
        return [self.measured.values[key] for key in keys if key in self.measured.values]

    def make_level(
        self,
        variant: Variant,
        column: str,
        value: Value,
        published: float | None = None,
        *,
        label: str = "",
        at: str | None = None,
        note: str = "",
    ) -> Cell:
        """Return the cell of one variant, with the published number if it is comparable.

        label, at   the row's name of the variant and of its condition, if not its own
        """
        about = self.describe_cell(variant.at if at is None else at, label or variant.label, column)
        about |= {"published": published if self.comparable else None}
        if reason := self.explain_absence(variant):
            return Cell(**about, not_run=reason)
        keys = [(variant, seed) for seed in self.setting.seeds]
        values = [value(self.measured.values[key]) for key in keys if key in self.measured.values]
        return _make_cell(values, len(keys), self._find_failure(keys), about | {"note": note})

    def make_contrast(
        self,
        a: Variant,
        b: Variant,
        column: str,
        value: Value | tuple[Value, Value],
        published: float | None = None,
        *,
        sign: int = 0,
        label: str = "",
        at: str | None = None,
        note: str = "",
    ) -> Cell:
        """Return the cell of a − b within each seed; sign: the side of 0 that the paper claims without a number.

        value       of both, or of each
        label, at   the row's name of the two and of their condition, if not their own
        """
        at = (a.at if a.at == b.at else "") if at is None else at
        about = self.describe_cell(at, label or f"{a.label} − {b.label}", column) | self.state_claim(published, sign)
        if reason := self.explain_absence(a) or self.explain_absence(b):
            return Cell(**about, not_run=reason)
        about["note"] = "; ".join(filter(None, (about.get("note", ""), note)))
        of_a, of_b = value if isinstance(value, tuple) else (value, value)
        known, seeds = self.measured.values, self.setting.seeds
        gaps = [of_a(known[a, s]) - of_b(known[b, s]) for s in seeds if (a, s) in known and (b, s) in known]
        return _make_cell(gaps, len(seeds), self._find_failure([(x, s) for s in seeds for x in (a, b)]), about)

    def compare_two(
        self,
        a: Variant,
        b: Variant,
        column: str,
        value: Value,
        published: Mapping[str, float] | None = None,
        *,
        sign: int = 0,
    ) -> list[Cell]:
        """Return the cells of b, of a and of a − b; published: the paper's numbers by the names of the variants."""
        known = published or {}
        gap = known[a.name] - known[b.name] if known else None
        levels = [self.make_level(each, column, value, known.get(each.name)) for each in (b, a)]
        return [*levels, self.make_contrast(a, b, column, value, gap, sign=sign)]

    def state_claim(self, published: float | None, sign: int = 0) -> dict[str, Any]:
        """Return the paper's claim about a difference; on other data only its side of 0 is compared."""
        side = sign if published is None else 1 if published > 0 else -1
        if published is None or self.comparable:
            return {"published": None if published is None else round(published, 2), "number": "", "sign": side}
        return {"sign": side, "note": f"{published:+.2f} in the paper"}

    def explain_absence(self, variant: Variant) -> str:
        if not self.reason and variant.name not in self.names:
            return f"excluded by attention={self.setting.options['attention']}"
        return self.reason

    def describe_cell(self, at: str, label: str, column: str) -> dict[str, Any]:
        """Return a cell's item, row, column and tags."""
        row = ", ".join(filter(None, (self.ground.corpus.row, at)))
        return {"item": self.item, "row": f"{row}: {label}", "column": column, "tags": self.ground.tags}

    def _find_failure(self, keys: Sequence[tuple[Variant, int]]) -> str:
        return next((self.measured.failures[key] for key in keys if key in self.measured.failures), NOT_FINITE)


def _make_cell(values: Sequence[float], count: int, reason: str, about: dict[str, Any]) -> Cell:
    """Return the cell of the finite values; a note says how many seeds have none, and why."""
    kept = tuple(x for x in values if math.isfinite(x))
    if not kept:
        return Cell(**about, not_run=reason)
    missing = f"{count - len(kept)} of {count} seeds have no value: {reason}" if len(kept) < count else ""
    note = "; ".join(filter(None, (about.pop("note", ""), missing)))
    return Cell(**about, values=kept, note=note)
