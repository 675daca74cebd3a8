"""Figures: how alike tokens become by layer, gradients over training, and the outputs that weights can reach."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnlab.report.figures import DASHES, MARKERS, OKABE_ITO


def draw_by_layer(lines: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], columns: Sequence[str]) -> Figure:
    """Draw a panel for each column with a line for each name: the column by layer, the mean of its seeds."""
    figure = Figure(figsize=(3.0 * len(columns) + 0.4, 3.5), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    for axis, column in zip(axes, columns, strict=True):
        for number, (name, seeds) in enumerate(lines.items()):
            mean = np.mean([seed[column] for seed in seeds], axis=0)
            _plot_line(axis, number, name, range(len(mean)), mean)
            known = mean[~np.isnan(mean)]
            if "residual" in column and (known > 0).all() and known.max() > 50 * known.min():
                axis.set_yscale("log")
        axis.set(xlabel="layer", ylabel=column)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _add_legend(figure, axes[0])
    return figure


def draw_over_training(lines: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> Figure:
    """Draw the mean norm over layers by step, and over steps by layer, with a line for each name; rows by seed."""
    figure = Figure(figsize=(6.6, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, by in zip(axes, ("step", "layer"), strict=True):
        for number, (name, seeds) in enumerate(lines.items()):
            rows = [row for seed in seeds for row in seed]
            places = sorted({row[by] for row in rows})
            means = [np.mean([row["norm"] for row in rows if row[by] == place]) for place in places]
            _plot_line(axis, number, name, [place + (by == "layer") for place in places], means)
        axis.set(xlabel="updates" if by == "step" else "layer", ylabel="norm of the query gradient", yscale="log")
    axes[0].set_xscale("symlog", linthresh=10)
    axes[0].set_xlim(left=0)
    axes[0].margins(x=0.05)
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    _add_legend(figure, axes[0])
    return figure


def draw_region(values: np.ndarray, hull: np.ndarray, panels: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Draw values (n,2) and their convex hull (k,2) in each panel, with the region reached and outputs (m,2)."""
    figure = Figure(figsize=(2.6 * len(panels) + 0.2, 3.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axis, (name, (region, outputs)) in zip(axes, panels.items(), strict=True):
        axis.fill(*region.T, facecolor=OKABE_ITO[5], alpha=0.35, edgecolor=OKABE_ITO[0], label="reached")
        axis.plot(*outputs.T, ".", color=OKABE_ITO[0], markersize=2.5, label="outputs")
        axis.fill(*hull.T, facecolor="none", edgecolor="black", linestyle="--", label="convex hull")
        axis.plot(*values.T, "D", color=OKABE_ITO[1], markersize=5, label="values")
        axis.set_title(name, fontsize=9)
        axis.set_aspect("equal")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    return figure


def _plot_line(axis: Axes, number: int, name: str, x: Sequence[float], y: Sequence[float]) -> None:
    style = {"linestyle": DASHES[number // 7 % 4], "marker": MARKERS[number % 5], "color": OKABE_ITO[number % 7]}
    axis.plot(x, y, label=name, markersize=3, linewidth=1.2, **style)  # type: ignore[arg-type]
    axis.grid(alpha=0.3)


def _add_legend(figure: Figure, axis: Axes) -> None:
    figure.legend(*axis.get_legend_handles_labels(), fontsize=7, ncols=1 + len(figure.axes), loc="outside upper center")
