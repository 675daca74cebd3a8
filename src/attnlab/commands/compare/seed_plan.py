"""`attnlab compare … --plan effect=0.5`: how many seeds a wanted effect needs, from the spread over a pilot's seeds.

The pilot is an ordinary comparison without timing. Its runs are read from the ledger if they are there, and a larger
comparison uses them. See experiments/power.py for the test and for the interval of the spread.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnlab.commands.compare.measures import INSIDE, QUALITY
from attnlab.commands.compare.plan import Plan
from attnlab.commands.compare.rows import ComparisonResults
from attnlab.config import parse_value, suggest_nearest
from attnlab.experiments.power import COVERAGE, FEWEST_SEEDS, MOST_SEEDS, SeedNeed, plan_seeds
from attnlab.experiments.seed_values import SeedMeasure
from attnlab.report.page import Table


@dataclass(frozen=True)
class WantedEffect:
    """A difference between two rows that a comparison should find; measure None: the main one."""

    effect: float
    measure: SeedMeasure | None

    @classmethod
    def parse(cls, values: Mapping[str, str]) -> "WantedEffect":
        """Read the keys effect and measure; ValueError for bad values."""
        if "effect" not in values:
            raise ValueError("effect= is missing: --plan needs the difference to detect, such as --plan effect=0.5")
        effect = parse_value(values["effect"], float, "effect")
        if not (math.isfinite(effect) and effect > 0):
            raise ValueError(f"effect must be a finite number above 0, got {values['effect']}")
        return cls(effect, _find_measure(values["measure"]) if "measure" in values else None)

    def choose_measure(self, results: ComparisonResults) -> SeedMeasure:
        """Return the measure, if a run has it; ValueError otherwise."""
        if (measure := self.measure or results.main_measure) is None:
            raise ValueError("no run of the pilot finished, so no seeds can be planned; the report names the failures")
        if measure not in results.measures:
            known = ", ".join(_shorten(each) for each in results.measures)
            raise ValueError(f"measure={_shorten(measure)}: no run of this task has it; it has {known}")
        return measure


def check_pilot(plan: Plan) -> None:
    """Raise ValueError for a comparison that cannot be a pilot."""
    if len(plan.seeds) < FEWEST_SEEDS:
        raise ValueError(f"a pilot needs at least {FEWEST_SEEDS} seeds, got {len(plan.seeds)}: leave out seeds")
    if len(plan.rows) < 2:
        raise ValueError("--plan needs at least two attentions, such as attention=softmax,coda")


def list_needs(results: ComparisonResults, wanted: WantedEffect) -> dict[str, SeedNeed | None]:
    """Return what each row but the first needs, by label; None if it or the first row has too few finite values."""
    measure = wanted.choose_measure(results)
    first, *others = (list(filter(math.isfinite, measure.list_values(row.measured).values())) for row in results.rows)
    labels = [row.label for row in results.rows[1:]]
    return {
        label: plan_seeds(wanted.effect, row, first) if min(len(row), len(first)) >= FEWEST_SEEDS else None
        for label, row in zip(labels, others, strict=True)
    }


def tabulate_needs(needs: Mapping[str, SeedNeed | None]) -> Table:
    """Return a line for each row: its spread, the seeds it needs, and their range."""
    columns = ["attention", "spread of the difference", "seeds needed", "optimistic", "pessimistic"]
    lines = []
    for label, need in needs.items():
        counts = (need.seeds, need.optimistic, need.pessimistic) if need else ()
        shown = [f"{need.spread:.3g}", *map(_format_count, counts)] if need else ["–"] * 4
        lines.append([label, *shown])
    return Table(columns, lines)


def describe_needs(results: ComparisonResults, wanted: WantedEffect, needs: Mapping[str, SeedNeed | None]) -> list[str]:
    """Return how to read the table, and what to run next."""
    measure, first, seeds = wanted.choose_measure(results), results.rows[0].label, results.plan.seeds
    lines = [
        f"Seeds that find a true difference of {wanted.effect:g} in {measure.name} from {first} in 80 % of all "
        f"repetitions (5 %, two-sided, before Holm's correction), on the {results.part} part.",
        f"Optimistic and pessimistic: with the ends of the {100 * COVERAGE:.0f} % interval of the spread, which "
        f"{len(seeds)} seeds of each row leave uncertain.",
    ]
    lines += [f"{label}: too few runs of the pilot have a value" for label, need in needs.items() if need is None]
    lines += [f"{row.label} failed: {reason}" for row in results.rows for reason in row.failures]
    counts = [need.seeds for need in needs.values() if need]
    if counts and None in counts:
        lines.append("Choose a larger effect= or another measure=: no practical number of seeds is enough.")
    elif counts:
        lines.append(_advise(max(count for count in counts if count is not None), wanted, seeds))
    return lines


def _advise(most: int, wanted: WantedEffect, seeds: Sequence[int]) -> str:
    """Say which command to run next, if the rows need at most this many seeds."""
    without = "without --plan and effect=" if wanted.measure is None else "without --plan, effect= and measure="
    if most <= len(seeds):
        return f"The {len(seeds)} seeds of the pilot are enough. Next: the same command {without}."
    return (
        f"Next: the same command with --seeds {most}, {without}. It uses the pilot's runs, which raises "
        f"the chance of a false alarm from 5 % to up to 7 %; add seed={seeds[-1] + 1} for new seeds only."
    )


def _find_measure(name: str) -> SeedMeasure:
    """Return the measure of a name, with or without its unit."""
    known = {text.casefold(): each for each in (*QUALITY, *INSIDE) for text in (each.name, _shorten(each))}
    if (found := known.get(name.casefold())) is None:
        names = [_shorten(each) for each in (*QUALITY, *INSIDE)]
        raise ValueError(f"unknown measure {name!r}{suggest_nearest(name, names)}; available: {', '.join(names)}")
    return found


def _shorten(measure: SeedMeasure) -> str:
    return measure.name.partition(" (")[0]


def _format_count(count: int | None) -> str:
    return f"over {MOST_SEEDS:,}" if count is None else f"{count:,}"
