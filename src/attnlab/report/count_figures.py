"""Figures of co-occurrence counts: the table for the words of a sentence, and the scores of every output word."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from attnlab.report.colours import SEQUENTIAL
from attnlab.report.figures import OKABE_ITO, escape_dollars

LIMIT = 40  # words on an axis


def draw_count_tables(tables: Mapping[str, np.ndarray], rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """Draw tables (source words, target words) side by side, each with its own scale (Snell et al. Fig. 1, 4)."""
    rows, columns = rows[:LIMIT], columns[:LIMIT]
    width, height = 1.6 + 0.28 * len(columns), 1.4 + 0.2 * len(rows)
    figure = Figure(figsize=(max(3.2, width) * len(tables), max(2.4, height)), layout="constrained")
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    for axis, (title, table) in zip(axes, tables.items(), strict=True):
        cells = table[: len(rows), : len(columns)]
        image = axis.imshow(cells, cmap=SEQUENTIAL, vmin=0.0, vmax=max(float(cells.max()), 1e-12), aspect="auto")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(columns)), [escape_dollars(word) for word in columns], fontsize=7, rotation=90)
        axis.set_yticks(range(len(rows)), [escape_dollars(word) for word in rows], fontsize=7)
        figure.colorbar(image, ax=axis, shrink=0.8)
    return figure


def draw_word_scores(count: np.ndarray, gain: np.ndarray, common: np.ndarray) -> Figure:
    """Draw gain and common (nats) of every output word against its number of occurrences."""
    figure = Figure(figsize=(6.2, 3.4), layout="constrained")
    axis = figure.subplots()
    for name, values, marker, colour in (("gain", gain, "o", OKABE_ITO[0]), ("common", common, "^", OKABE_ITO[1])):
        axis.scatter(count, values, s=7, alpha=0.5, marker=marker, color=colour, linewidths=0, label=name)
    axis.axhline(0.0, color="black", linewidth=0.8)
    if count.max() > 10 * count.min():
        axis.set_xscale("log")
    axis.set(xlabel="occurrences of the output word", ylabel="nats")
    axis.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    return figure
