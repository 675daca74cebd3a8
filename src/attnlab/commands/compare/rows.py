"""The results of a comparison, row by row: values by seed, differences from the first row, cost, and failures."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from attnlab.commands.compare.controls import list_controls
from attnlab.commands.compare.cost import ModelCost
from attnlab.commands.compare.measures import BLEU, list_measures
from attnlab.commands.compare.plan import ComparisonRow, Plan
from attnlab.experiments.power import LEVEL, estimate_correlation, is_pairing_better
from attnlab.experiments.seed_values import SeedMeasure, Values
from attnlab.experiments.significance import (
    Contrast,
    compute_bootstrap_p,
    compute_interval,
    contrast_seeds,
    correct_by_holm,
)
from attnlab.tasks.task import Score


@dataclass(frozen=True)
class RowResult:
    """The result of one row."""

    row: ComparisonRow
    cost: ModelCost | None = None
    point: int | None = None  # the chosen point of the grid
    trials: Mapping[int, float] = field(default_factory=dict)  # validation loss of the first seed, by point
    measured: Mapping[int, Values] = field(default_factory=dict)  # by seed
    runs: Mapping[int, str] = field(default_factory=dict)  # folders, by seed
    speed: Values | None = None
    failures: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.row.label


@dataclass(frozen=True)
class ComparisonResults:
    plan: Plan
    main_score: Score  # of the task
    part: str  # where quality is measured: test or valid
    rows: tuple[RowResult, ...]
    references: Callable[[], Sequence[str]] | None = None  # of a translation
    hardware: tuple[str, ...] = ()  # where the runs were measured

    @cached_property
    def measures(self) -> list[SeedMeasure]:
        runs = (values for row in self.rows for values in row.measured.values())
        return list_measures(self.main_score, self.part, runs)

    @property
    def main_measure(self) -> SeedMeasure | None:
        """The measure that judges the rows: the first."""
        return self.measures[0] if self.measures else None

    @property
    def judges(self) -> list[SeedMeasure]:
        """The measures with a sentence for each row: the main one and, of translators, BLEU."""
        return [each for each in self.measures if each in (self.main_measure, BLEU)]

    @property
    def is_paired(self) -> bool:
        """Whether rows are compared seed by seed; the planned number of seeds alone decides it."""
        return is_pairing_better(len(self.plan.seeds))

    def contrast_rows(self, measure: SeedMeasure) -> dict[str, Contrast]:
        """Return each row minus the first, by label, for rows that share a seed with it.

        The user's rows are one family of Holm's correction and the controls another, so that controls which are added
        for winners do not change who won.
        """
        first, *others = (measure.list_values(row.measured) for row in self.rows)
        pairs, paired = zip((row.label for row in self.rows[1:]), others, strict=True), self.is_paired
        known = {label: x for label, row in pairs if (x := contrast_seeds(row, first, paired=paired))}
        corrected: dict[str, float | None] = {}
        for is_control in (False, True):
            family = {row.label for row in self.rows if row.row.is_control == is_control}
            corrected |= correct_by_holm({label: x.p for label, x in known.items() if label in family})
        return {label: replace(contrast, holm=corrected[label]) for label, contrast in known.items()}

    def list_winners(self) -> list[str]:
        """Return the rows that beat the first one: better, with Holm's p below 0.05, in the measure that judges."""
        if (measure := self.main_measure) is None:
            return []
        better = 1 if measure.better == "higher" else -1
        found = self.contrast_rows(measure).items()
        controls = {row.label for row in self.rows if row.row.is_control}
        return [
            label
            for label, x in found
            if label not in controls and x.holm is not None and x.holm < LEVEL and x.mean * better > 0
        ]

    def contrast_controls(self) -> dict[tuple[str, str], Contrast]:
        """Return each winner minus each of its controls, by their labels; all of them are one family of tests."""
        if (measure := self.main_measure) is None:
            return {}
        values = {row.label: measure.list_values(row.measured) for row in self.rows}
        known = {
            (label, control): x
            for label in self.list_winners()
            for control in list_controls(label, values)
            if (x := contrast_seeds(values[label], values[control], paired=self.is_paired))
        }
        corrected = correct_by_holm({pair: contrast.p for pair, contrast in known.items()})
        return {pair: replace(contrast, holm=corrected[pair]) for pair, contrast in known.items()}

    def correlate_rows(self, measure: SeedMeasure) -> float | None:
        """Return the correlation of the rows over the seeds that all of them have; None if it cannot be told."""
        values = [found for row in self.rows if (found := measure.list_values(row.measured))]
        seeds = [seed for seed in self.plan.seeds if all(seed in found for found in values)]
        return estimate_correlation([[found[seed] for seed in seeds] for found in values])

    @cached_property
    def bootstrap(self) -> dict[str, dict[int, float]]:
        """For translations, p of sacrebleu's paired bootstrap against the first row, by label and seed."""
        if self.references is None:
            return {}
        references, first = self.references(), self.rows[0].measured
        ps = {
            row.label: {
                seed: compute_bootstrap_p(values["translations"], first[seed]["translations"], references)
                for seed, values in row.measured.items()
                if seed in first
            }
            for row in self.rows[1:]
        }
        return {label: by_seed for label, by_seed in ps.items() if by_seed}

    def get_settings(self, row: RowResult) -> dict[str, str]:
        """Return what the grid and a control set at the chosen point of a row."""
        point = row.point or 0
        return {**self.plan.points[point], **(row.row.by_point[point] if row.row.by_point else {})}

    def as_json(self) -> dict[str, Any]:
        """Return means, intervals, tests, cost and failures of every row; the ledger has everything measured."""
        contrasts = {measure.name: self.contrast_rows(measure) for measure in self.measures}
        rows = []
        for result in self.rows:
            row: dict[str, Any] = {"row": result.label, "control": result.row.description}
            row |= {"parameters": result.cost and result.cost.parameters}
            row |= {"flops_per_token": result.cost and result.cost.flops, "trials": dict(result.trials)}
            row |= {"chosen": None if result.point is None else self.get_settings(result), "runs": dict(result.runs)}
            row |= {"failed": list(result.failures), "speed": result.speed, "measures": {}}
            for measure in self.measures:
                if seeds := measure.list_values(result.measured):
                    values = list(seeds.values())
                    against = contrasts[measure.name].get(result.label)
                    row["measures"][measure.name] = {
                        "seeds": seeds, "mean": statistics.fmean(values), "interval": compute_interval(values),
                        "better": measure.better, "against_first": against and vars(against),
                    }  # fmt: skip
            if result.label in self.bootstrap:
                row["paired_bootstrap_p"] = self.bootstrap[result.label]
            rows.append(row)
        correlations = {measure.name: self.correlate_rows(measure) for measure in self.measures}
        about = {"judged_by": self.main_measure and self.main_measure.name, "part": self.part}
        controls = [{"row": row, "control": name, **vars(x)} for (row, name), x in self.contrast_controls().items()]
        return about | {"correlation_over_seeds": correlations, "rows": rows, "against_controls": controls}
