"""The figures of a comparison, each with what one sees in it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnlab.commands.compare.measures import ComparisonMeasure
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.experiments.significance import compute_interval
from attnlab.report.figures import OKABE_ITO, draw_curves

MARKERS, DASHES = "os^Dv", ("-", "--", "-.", ":")
MOST = 4  # measures side by side
MOST_TICKS = 12  # layers that are named under a panel


def all_of(results: ComparisonResults) -> dict[str, tuple[Figure, str]]:
    """Those that the results allow, by name."""
    drawn: dict[str, tuple[Figure, str]] = {}
    ready = [outcome for outcome in results.outcomes if outcome.found]
    if not ready or results.judged is None:
        return drawn
    quality = [measure for measure in results.measures if measure.better][:MOST]
    says = "Each row with its seeds (small dots), their mean and its 95 % interval, by measure of quality."
    drawn["quality"] = _intervals(ready, quality), says
    if contrasts := results.contrasts(results.judged):
        values = {label: contrast.differences for label, contrast in contrasts.items()}
        what = f"{results.judged.name}, difference from {results.outcomes[0].row.label}"
        says = "The difference of each row from the first within each seed, with the mean and its 95 % interval."
        drawn["differences"] = _one_panel(values, what, first=1), says
    drawn["learning"] = _learning(ready), "Validation loss against updates, the mean over seeds."
    if timed := [outcome for outcome in ready if outcome.speed]:
        says = f"{results.judged.name} against the speed of training, a point a row."
        drawn["speed"] = _speed(timed, results.judged), says
    if any("layers" in found.get("inside", {}) for outcome in ready for found in outcome.found.values()):
        says = "By layer and kind: divergence of heads, relative residual, cosine of tokens, and query gradients."
        drawn["inside"] = _inside(ready), says
    return drawn


def _intervals(outcomes: Sequence[RowResult], measures: Sequence[ComparisonMeasure]) -> Figure:
    figure = Figure(figsize=(2.2 + 2.6 * len(measures), 0.9 + 0.36 * len(outcomes)), layout="constrained")
    axes = figure.subplots(1, len(measures), squeeze=False, sharey=True)[0]
    for axis, measure in zip(axes, measures, strict=True):
        _dots(axis, {outcome.row.label: _finite(outcome.values(measure)) for outcome in outcomes})
        axis.set_xlabel(f"{measure.name} ({measure.better} is better)", fontsize=8)
    return figure


def _finite(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _one_panel(values: Mapping[str, Mapping[int, float]], what: str, first: int) -> Figure:
    figure = Figure(figsize=(6.2, 0.9 + 0.36 * len(values)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0.0, color="black", linewidth=0.8)
    _dots(axis, values, first)
    axis.set_xlabel(what, fontsize=9)
    return figure


def _dots(axis: Any, values: Mapping[str, Mapping[int, float]], first: int = 0) -> None:
    """A line of seeds, mean and interval for each name, the first on top, in the style of row number `first`."""
    for place, of_seeds in enumerate(values.values()):
        colour, marker = OKABE_ITO[(place + first) % 7], MARKERS[(place + first) % 5]
        seeds = list(of_seeds.values())
        if not seeds:
            continue
        axis.plot(seeds, [place] * len(seeds), "o", markersize=3, color=colour, alpha=0.5)
        if (spread := compute_interval(seeds)) is not None:
            axis.plot(spread, [place, place], color=colour, linewidth=1.5)
        axis.plot(statistics.fmean(seeds), place, marker, markersize=6, color=colour)
    axis.set_yticks(range(len(values)), [plain(name) for name in values], fontsize=8)
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(alpha=0.3, axis="x")


def _learning(outcomes: Sequence[RowResult]) -> Figure:
    lines = {}
    for outcome in outcomes:
        steps = sorted(set.intersection(*(set(dict(curve)) for curve in outcome.curves.values())))
        means = [statistics.fmean(dict(curve)[step] for curve in outcome.curves.values()) for step in steps]
        lines[plain(outcome.row.label)] = (steps, means)
    return draw_curves(lines, x="updates", y="validation loss (nats a target)")


def _speed(outcomes: Sequence[RowResult], measure: ComparisonMeasure) -> Figure:
    figure = Figure(figsize=(6.2, 3.6), layout="constrained")
    axis = figure.subplots()
    for place, outcome in enumerate(outcomes):
        values, speed = list(outcome.values(measure).values()), outcome.speed or {}
        mean, spread = statistics.fmean(values), compute_interval(values)
        colour = OKABE_ITO[place % 7]
        if spread is not None:
            axis.plot([speed["tokens_per_second"]] * 2, spread, color=colour, linewidth=1)
        axis.plot([speed["slowest"], speed["fastest"]], [mean, mean], color=colour, linewidth=1)
        style: Any = {"color": colour, "markersize": 7, "linestyle": ""}
        axis.plot(speed["tokens_per_second"], mean, marker=MARKERS[place % 5], label=plain(outcome.row.label), **style)
    axis.set_xlabel("target tokens a second in training")
    axis.set_ylabel(f"{measure.name} ({measure.better} is better)")
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


LAYER_MEASURES = {"jsd": "head JSD (nats a sentence)", "residual": "relative residual", "cosine": "mean cosine",
                  "gradient": "query gradient"}  # fmt: skip


def _inside(outcomes: Sequence[RowResult]) -> Figure:
    """A row of panels for each kind of attention, a line for each row of the table, the mean over its seeds."""
    frames = {outcome.row.label: _layers(outcome) for outcome in outcomes}
    whole = pd.concat(frames, names=["row"]).reset_index(level="row")
    kinds, names = list(whole["kind"].unique()), [name for name in LAYER_MEASURES if name in whole]
    figure = Figure(figsize=(0.6 + 2.5 * len(names), 0.6 + 2.1 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), len(names), squeeze=False)
    for line, kind in enumerate(kinds):
        for axis, name in zip(axes[line], names, strict=True):
            for place, label in enumerate(frames):
                values = whole[(whole["row"] == label) & (whole["kind"] == kind)].groupby("layer")[name].mean()
                style: Any = {"marker": MARKERS[place % 5], "color": OKABE_ITO[place % 7], "markersize": 4}
                axis.plot(values.index, values, DASHES[place % 4], label=plain(label), **style)
            axis.set_title(f"{kind}: {LAYER_MEASURES[name]}", fontsize=8)
            layers = sorted(whole.loc[whole["kind"] == kind, "layer"].unique())
            axis.set_xticks(layers[:: -(-len(layers) // MOST_TICKS)])  # a locator would put some between two layers
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
        axes[line][0].set_ylabel("mean over seeds", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("layer, from 0", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _layers(outcome: RowResult) -> pd.DataFrame:
    rows = [row for found in outcome.found.values() for row in found.get("inside", {}).get("layers", [])]
    return pd.DataFrame(rows, columns=None if rows else ["kind", "layer", *LAYER_MEASURES])


def plain(text: str) -> str:
    """As it stands: matplotlib would read dollars as mathematics."""
    return text.replace("$", r"\$")
