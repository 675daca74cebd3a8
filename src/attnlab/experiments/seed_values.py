"""Measures of runs with several seeds: read by seed, averaged with an interval, as text and as a figure."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnlab.experiments.cell_text import format_number
from attnlab.experiments.significance import Interval, compute_interval
from attnlab.report.figures import MARKERS, OKABE_ITO, escape_dollars
from attnlab.report.numbers import format_real

Values = Mapping[str, Any]  # what was measured of one run


def read_path(*path: str) -> Callable[[Values], float | None]:
    """Return the function that reads a number of nested values; it returns None if there is no such number."""

    def read_number(values: Values) -> float | None:
        value: Any = values
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) and not math.isnan(value) else None

    return read_number


@dataclass(frozen=True)
class SeedMeasure:
    """A number of each measured run: a column of a table."""

    name: str  # with its unit
    read: Callable[[Values], float | None]
    better: Literal["higher", "lower", ""] = ""
    form: str = ""  # a format specification; by default four figures

    def list_values(self, runs: Mapping[int, Values]) -> dict[int, float]:
        """Return the value of each seed that has one."""
        each = {seed: self.read(values) for seed, values in runs.items()}
        return {seed: x for seed, x in each.items() if x is not None}

    def compute_mean(self, runs: Mapping[int, Values]) -> float | None:
        values = self.list_values(runs).values()
        return statistics.fmean(values) if values else None

    def format_value(self, x: float) -> str:
        return format_real(x, self.form) if self.form else format_number(x)

    def format_mean(self, runs: Mapping[int, Values]) -> str:
        """Return mean ± half of the 95 % interval, and the number of seeds if some have no value."""
        values = list(self.list_values(runs).values())
        if not values:
            return "–"
        text = self.format_value(statistics.fmean(values))
        if (interval := compute_interval(values)) is not None:
            half = (interval[1] - interval[0]) / 2
            text += f" ± {self.format_value(half) if self.form else format(half, '.2g')}"
        return text if len(values) == len(runs) else f"{text} ({len(values)} of {len(runs)} seeds)"


def draw_measures(rows: Mapping[str, Mapping[int, Values]], measures: Sequence[SeedMeasure]) -> Figure:
    """Draw a panel for each measure, with the seeds, the mean and the 95 % interval of each row."""
    figure = Figure(figsize=(2.2 + 2.6 * len(measures), 0.9 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots(1, len(measures), squeeze=False, sharey=True)[0]
    for axis, measure in zip(axes, measures, strict=True):
        draw_seeds(axis, {name: measure.list_values(runs) for name, runs in rows.items()})
        better = f" ({measure.better} is better)" if measure.better else ""
        axis.set_xlabel(f"{measure.name}{better}", fontsize=8)
    return figure


def draw_seeds(
    axis: Any,
    rows: Mapping[str, Mapping[int, float]],
    *,
    first: int = 0,
    intervals: Mapping[str, Interval | None] | None = None,
) -> None:
    """Draw seeds (small), mean and 95 % interval of each row, the first on top.

    first       the number of the first row's colour
    intervals   by row, if they are not those of the means of these values
    """
    for place, (name, values) in enumerate(rows.items()):
        if seeds := list(filter(math.isfinite, values.values())):
            style = {"color": OKABE_ITO[(place + first) % 7]}
            axis.plot(seeds, [place] * len(seeds), "o", markersize=3, alpha=0.5, **style)
            interval = compute_interval(seeds) if intervals is None else intervals[name]
            if interval is not None:
                axis.plot(interval, [place, place], linewidth=1.5, **style)
            axis.plot(statistics.fmean(seeds), place, MARKERS[(place + first) % 5], markersize=6, **style)
    axis.set_yticks(range(len(rows)), [escape_dollars(name) for name in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(alpha=0.3, axis="x")
