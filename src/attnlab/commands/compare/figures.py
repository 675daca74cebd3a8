"""The figures of a comparison, each with a caption."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.experiments.seed_values import SeedMeasure, draw_measures, draw_seeds
from attnlab.experiments.significance import Contrast, compute_interval
from attnlab.report.figures import DASHES, MARKERS, OKABE_ITO, draw_curves, escape_dollars

PANELS = 4  # measures side by side
APART = "Rows whose lines overlap can still differ; the table of differences has the tests."
TICKS = 12  # layers with a number under a panel
LAYER_MEASURES = {"jsd": "head JSD (nats a sentence)", "residual": "relative residual", "cosine": "mean cosine",
                  "gradient": "query gradient"}  # fmt: skip


def draw_figures(results: ComparisonResults) -> dict[str, tuple[Figure, str]]:
    """Return the figures that the results allow, by name."""
    rows, judge = [row for row in results.rows if row.measured], results.main_measure
    if not rows or judge is None:
        return {}
    quality = [measure for measure in results.measures if measure.better][:PANELS]
    seeds = "Small dots are seeds, the large mark is their mean, and the line is its 95 % interval."
    drawn = {
        "quality": (
            draw_measures({row.label: row.measured for row in rows}, quality),
            f"Quality. {seeds} {APART}",
        )
    }
    if contrasts := results.contrast_rows(judge):
        title = f"{judge.name}, difference from {results.rows[0].label}"
        caption = f"Difference from the first row within each seed. {seeds} A line that crosses 0 decides nothing."
        drawn["differences"] = _draw_differences(contrasts, title), caption
    drawn["learning"] = _draw_learning(rows), "Validation loss over updates, mean over seeds. Lower is better."
    if timed := [row for row in rows if row.speed]:
        caption = f"Each mark is a row: {judge.name} over training speed. Further right is faster."
        drawn["speed"] = _draw_speed(timed, judge), caption
    if any("layers" in values.get("inside", {}) for row in rows for values in row.measured.values()):
        caption = "By layer: divergence of heads, relative residual and cosine of tokens, and gradient of the queries."
        drawn["inside"] = _draw_layers(rows), caption
    return drawn


def _draw_differences(contrasts: Mapping[str, Contrast], title: str) -> Figure:
    figure = Figure(figsize=(6.2, 0.9 + 0.36 * len(contrasts)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0.0, color="black", linewidth=0.8)
    values = {label: contrast.differences for label, contrast in contrasts.items()}
    draw_seeds(axis, values, first=1, intervals={label: contrast.interval for label, contrast in contrasts.items()})
    axis.set_xlabel(title, fontsize=9)
    return figure


def _draw_learning(rows: Sequence[RowResult]) -> Figure:
    lines = {}
    for row in rows:
        curves = [dict(values["curve"]) for values in row.measured.values()]
        steps = sorted(set.intersection(*map(set, curves)))
        lines[escape_dollars(row.label)] = (steps, [statistics.fmean(curve[x] for curve in curves) for x in steps])
    return draw_curves(lines, x="updates", y="validation loss (nats a target)")


def _draw_speed(rows: Sequence[RowResult], measure: SeedMeasure) -> Figure:
    figure = Figure(figsize=(6.2, 3.6), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(rows):
        values, speed = list(measure.list_values(row.measured).values()), row.speed or {}
        style: Any = {"color": OKABE_ITO[place % 7]}
        x, mean = speed["tokens_per_second"], statistics.fmean(values)
        if (interval := compute_interval(values)) is not None:
            axis.plot([x, x], interval, linewidth=1, **style)
        axis.plot([speed["slowest"], speed["fastest"]], [mean, mean], linewidth=1, **style)
        axis.plot(x, mean, MARKERS[place % 5], markersize=7, label=escape_dollars(row.label), **style)
    axis.set_xlabel("target tokens a second in training")
    axis.set_ylabel(f"{measure.name} ({measure.better} is better)")
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def _draw_layers(rows: Sequence[RowResult]) -> Figure:
    """Draw a row of panels for each kind of attention, and in each panel a line for each row of the table."""
    inside = [(row.label, values.get("inside", {})) for row in rows for values in row.measured.values()]
    whole = pd.DataFrame([{"row": label, **layer} for label, values in inside for layer in values.get("layers", [])])
    kinds, names = list(whole["kind"].unique()), [name for name in LAYER_MEASURES if name in whole]
    figure = Figure(figsize=(0.6 + 2.5 * len(names), 0.6 + 2.1 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), len(names), squeeze=False)
    for line, kind in zip(axes, kinds, strict=True):
        of_kind = whole[whole["kind"] == kind]
        layers = sorted(of_kind["layer"].unique())
        for axis, name in zip(line, names, strict=True):
            for place, row in enumerate(rows):
                means = of_kind[of_kind["row"] == row.label].groupby("layer")[name].mean()
                style: Any = {"marker": MARKERS[place % 5], "color": OKABE_ITO[place % 7], "markersize": 4}
                axis.plot(means.index, means, DASHES[place % 4], label=escape_dollars(row.label), **style)
            axis.set_title(f"{kind}: {LAYER_MEASURES[name]}", fontsize=8)
            axis.set_xticks(layers[:: -(-len(layers) // TICKS)])  # a locator would put some between two layers
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("mean over seeds", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("layer, from 0", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure
