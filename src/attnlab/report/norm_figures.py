"""Figures of weights beside norms: by category, by head, and for one text (Kobayashi et al. 2020, Fig. 3 and 4)."""

from collections.abc import Callable, Sequence

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from attnlab.report.colours import SEQUENTIAL, choose_colormap
from attnlab.report.figures import DASHES, MARKERS, OKABE_ITO, escape_dollars

LABELLED = 40  # largest number of tokens with labels beside a map


def draw_category_lines(categories: pd.DataFrame) -> Figure:
    """Draw Fig. 3: how much each category receives in each layer, by weight and by norm, mean over heads.

    Norms that are all NaN are left out.
    """
    means = categories.groupby(["category", "layer"], sort=False)[["weight_share", "norm_sum"]].mean()
    figure = Figure(figsize=(9.0, 3.3), layout="constrained")
    titles = _select_titles(categories, {"weight_share": "by weight: Σ α", "norm_sum": "by norm: Σ ‖α f(x)‖"})
    for axis, (column, title) in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles.items(), strict=True):
        for number, category in enumerate(categories["category"].unique()):
            line = means.loc[category, column].sort_index()
            style = {"marker": MARKERS[number % 5], "color": OKABE_ITO[number % 7], "markersize": 4}
            axis.plot(line.index, line, DASHES[number % 4], label=escape_dollars(category), **style)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("layer (from 0)")
        axis.set_ylim(bottom=min(0.0, float(means[column].min())))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axis.legend(fontsize=8, title="keys")
    return figure


def draw_head_maps(categories: pd.DataFrame, category: str) -> Figure:
    """Draw Fig. 4: for each head, the weight on tokens of one category, and the mean norm of their vectors.

    Norms that are all NaN are left out.
    """
    part = categories[categories["category"] == category]
    figure = Figure(figsize=(9.0, 0.9 + 0.22 * max(part["layer"].nunique(), 8)), layout="constrained")
    titles = {"weight_share": f"weight on {category}: Σ α", "norm_mean": f"mean ‖f(x)‖ of {category}"}
    titles = _select_titles(part, titles)
    for axis, (column, title) in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles.items(), strict=True):
        grid = part.pivot(index="layer", columns="head", values=column).sort_index()
        low = min(0.0, float(grid.min().min()))
        image = axis.imshow(grid.to_numpy(), cmap=SEQUENTIAL, vmin=low, aspect="auto", interpolation="nearest")
        axis.set_title(escape_dollars(title), fontsize=11)
        axis.set_xlabel("head (from 0)")
        axis.set_xticks(range(len(grid.columns)), grid.columns, fontsize=7)
        axis.set_yticks(range(len(grid.index)), grid.index, fontsize=7)
        figure.colorbar(image, ax=axis)
    figure.axes[0].set_ylabel("layer (from 0)")
    return figure


def draw_text_maps(
    layers: Sequence[str], weights: Sequence[Tensor], norms: Sequence[Tensor | None], rows: Sequence[str],
    columns: Sequence[str], hidden: Sequence[Tensor], labels: tuple[str, str],
) -> Figure:  # fmt: skip
    """Draw one text: the weights (i,j) of each layer, mean over heads, above the norms ‖Σ_h α f‖; hidden cells grey.

    norms    None for a layer that has none
    labels   what rows and columns are
    """
    side = min(3.4, max(1.9, 0.16 * max(len(rows), len(columns))))
    lines = [(weights, "mean α"), *([(norms, "‖Σ α f(x)‖")] if any(x is not None for x in norms) else [])]
    figure = Figure(figsize=(1.0 + side * len(layers), 0.9 + 1.05 * side * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines), len(layers), squeeze=False)
    for line, (maps, what) in enumerate(lines):
        for axis, name, cells, masked in zip(axes[line], layers, maps, hidden, strict=True):
            if cells is None:
                axis.set_axis_off()
                continue
            signed = bool((cells < 0).any())
            most = max(float(cells.abs().max()), 1e-12)
            colours = {"cmap": choose_colormap(signed=signed), "vmin": -most if signed else 0.0, "vmax": most}
            axis.imshow(
                cells.masked_fill(masked, torch.nan).cpu().numpy(), **colours, aspect="auto", interpolation="nearest"
            )
            axis.set_title(f"{name}: {what}, to {most:.2g}", fontsize=8)
            _label_axis(axis.set_xticks, columns if line == len(lines) - 1 else (), rotation=90)
            _label_axis(axis.set_yticks, rows if axis is axes[line][0] else ())
    figure.supylabel(labels[0], fontsize=9)
    figure.supxlabel(labels[1], fontsize=9)
    return figure


def _select_titles(table: pd.DataFrame, titles: dict[str, str]) -> dict[str, str]:
    """Return the titles of the columns that have a number."""
    return {column: title for column, title in titles.items() if table[column].notna().any()}


def _label_axis(set_ticks: Callable[..., object], names: Sequence[str], **options: int) -> None:
    """Label an axis with tokens if they fit."""
    shown = names if len(names) <= LABELLED else ()
    set_ticks(range(len(shown)), [escape_dollars(name) for name in shown], fontsize=6, **options)
