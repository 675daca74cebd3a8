"""The rows of a table: variants of a model, trained alike on one corpus with every seed, or the reason why not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.experiments.corpora import Ground, chosen
from attnlab.experiments.trained import Measure, Trained, Value, cell, difference, trained
from attnlab.experiments.verdicts import Cell


@dataclass(frozen=True)
class Variant:
    """What a row is called and what it changes; at: under which condition, where a table has several of one name."""

    name: str  # as attention= says it
    label: str  # as the table says it
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    at: str = ""


class Variants:
    """Variants on one ground: trained, then made into cells of one item."""

    def __init__(
        self, item: str, ground: Ground, variants: Sequence[Variant], measure: Measure, known: Sequence[str]
    ) -> None:
        """known: every name of the study, of which attention= may say some."""
        self.item, self.ground, self.setting = item, ground, ground.setting
        self.reason = ground.why_not()
        self.names = chosen(self.setting, "attention", known)
        self.trained: Trained[tuple[Variant, int]] = Trained({}, {})
        if not self.reason:
            asked = [variant for variant in variants if variant.name in self.names]
            recipes = {(each, seed): ground.recipe(seed, each.values) for each in asked for seed in self.setting.seeds}
            self.trained = trained(recipes, measure, ground.vocabulary, self.setting)

    @property
    def comparable(self) -> bool:
        """Whether a published number can be held against ours: on the paper's data, not cut down."""
        return self.ground.corpus.of_paper and (self.setting.scale == "full" or bool(self.reason))

    def of(self, variant: Variant) -> list[dict[str, Any]]:
        """What was measured, seed by seed."""
        keys = [(variant, seed) for seed in self.setting.seeds]
        return [self.trained.found[key] for key in keys if key in self.trained.found]

    def level(
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
        """What one variant gave, and the published number where it is comparable.

        label, at   what the row calls the variant and its condition, where not as it does itself
        """
        about = self.about(variant.at if at is None else at, label or variant.label, column)
        about |= {"published": published if self.comparable else None}
        if why := self.why_not(variant):
            return Cell(**about, not_run=why)
        return cell(self.trained, [(variant, seed) for seed in self.setting.seeds], value, note=note, **about)

    def contrast(
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
        """a less b within each seed; sign: the side of 0 that the paper says, where it prints no number.

        value       of both, or of each
        label, at   what the row calls the two and their condition, where not as they do themselves
        """
        at = (a.at if a.at == b.at else "") if at is None else at
        about = self.about(at, label or f"{a.label} − {b.label}", column) | self.said(published, sign)
        if why := self.why_not(a) or self.why_not(b):
            return Cell(**about, not_run=why)
        about["note"] = "; ".join(filter(None, (about.get("note", ""), note)))
        pairs = [((a, seed), (b, seed)) for seed in self.setting.seeds]
        return difference(self.trained, pairs, value if isinstance(value, tuple) else (value, value), **about)

    def said(self, published: float | None, sign: int = 0) -> dict[str, Any]:
        """What the paper says of a difference; where it is not comparable only its side of 0 is held against ours."""
        side = sign if published is None else 1 if published > 0 else -1
        if published is None or self.comparable:
            return {"published": None if published is None else round(published, 2), "sign": side}
        return {"sign": side, "note": f"{published:+.2f} in the paper"}

    def why_not(self, variant: Variant) -> str:
        if not self.reason and variant.name not in self.names:
            return f"left out by attention={self.setting.options['attention']}"
        return self.reason

    def about(self, at: str, label: str, column: str) -> dict[str, Any]:
        """Where a cell stands."""
        row = ", ".join(filter(None, (self.ground.corpus.row, at)))
        return {"item": self.item, "row": f"{row}: {label}", "column": column, "tags": self.ground.tags}
