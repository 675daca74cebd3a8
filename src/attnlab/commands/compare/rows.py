"""The rows of a comparison as they came out: values by seed, intervals, differences, cost, and what failed."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from attnlab.commands.compare.cost import ModelCost
from attnlab.commands.compare.measures import ComparisonMeasure, measures
from attnlab.commands.compare.plan import ComparisonRow, Plan
from attnlab.experiments.significance import Contrast, compute_bootstrap_p, correct_by_holm, compute_interval, contrast_seeds


@dataclass(frozen=True)
class RowResult:
    """What came of one row."""

    row: ComparisonRow
    size: ModelCost | None = None
    point: int | None = None  # of the grid, chosen for it
    trials: Mapping[int, float] = field(default_factory=dict)  # validation loss by point, of the first seed
    found: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # what was measured, by seed
    runs: Mapping[int, str] = field(default_factory=dict)  # folders, by seed
    curves: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)  # (step, validation loss), by seed
    speed: Mapping[str, Any] | None = None
    failed: tuple[str, ...] = ()  # what went wrong, in words

    def values(self, measure: ComparisonMeasure) -> dict[int, float]:
        """By seed, of the runs that are finished."""
        read = {seed: measure.of(found) for seed, found in self.found.items()}
        return {seed: value for seed, value in read.items() if value is not None}


@dataclass(frozen=True)
class ComparisonResults:
    plan: Plan
    architecture: str
    part: str
    outcomes: tuple[RowResult, ...]
    references: Callable[[], Sequence[str]] | None = None  # of a translation
    hardware: tuple[str, ...] = ()  # that the runs were measured on

    @cached_property
    def measures(self) -> list[ComparisonMeasure]:
        return measures(self.architecture, [found for outcome in self.outcomes for found in outcome.found.values()])

    @cached_property
    def judged(self) -> ComparisonMeasure | None:
        """The measure that rows are judged by: the first there is."""
        return self.measures[0] if self.measures else None

    def contrasts(self, measure: ComparisonMeasure) -> dict[str, Contrast]:
        """Each row against the first, by label; those that can be told."""
        first, *others = self.outcomes
        found = {o.row.label: contrast_seeds(o.values(measure), first.values(measure)) for o in others}
        known = {label: contrast for label, contrast in found.items() if contrast is not None}
        corrected = correct_by_holm({label: contrast.p for label, contrast in known.items()})
        return {label: replace(contrast, holm=corrected[label]) for label, contrast in known.items()}

    @cached_property
    def bootstrap(self) -> dict[str, dict[int, float]]:
        """Of a translation: p of sacrebleu's paired bootstrap against the first row, by label and seed."""
        if self.references is None:
            return {}
        references = self.references()
        first, *others = self.outcomes
        found = {
            outcome.row.label: {
                seed: compute_bootstrap_p(found["translations"], first.found[seed]["translations"], references)
                for seed, found in outcome.found.items()
                if seed in first.found
            }
            for outcome in others
        }
        return {label: ps for label, ps in found.items() if ps}

    def as_json(self) -> dict[str, Any]:
        contrasts = {measure.name: self.contrasts(measure) for measure in self.measures}
        rows = []
        for outcome in self.outcomes:
            label, size = outcome.row.label, outcome.size
            row: dict[str, Any] = {"row": label, "control": outcome.row.says, "settings": dict(outcome.row.values)}
            row |= {"parameters": size.parameters if size else None, "flops_per_token": size.flops if size else None}
            chosen = None if outcome.point is None else self.settings(outcome)
            row |= {"chosen": chosen, "trials": dict(outcome.trials), "runs": dict(outcome.runs)}
            row |= {"failed": list(outcome.failed), "speed": outcome.speed, "measures": {}}
            for measure in self.measures:
                values = outcome.values(measure)
                if not values:
                    continue
                mean = {"mean": statistics.fmean(values.values()), "interval": compute_interval(list(values.values()))}
                against = contrasts[measure.name].get(label)
                found = {"seeds": values, **mean, "better": measure.better}
                row["measures"][measure.name] = found | {"against_first": against and vars(against)}
            if label in self.bootstrap:
                row["paired_bootstrap_p"] = self.bootstrap[label]
            rows.append(row)
        return {"judged_by": self.judged.name if self.judged else None, "part": self.part, "rows": rows}

    def settings(self, outcome: RowResult) -> dict[str, str]:
        """What the grid and a control say of a row at its chosen point."""
        point = outcome.point or 0
        return {**self.plan.points[point], **(outcome.row.at[point] if outcome.row.at else {})}
