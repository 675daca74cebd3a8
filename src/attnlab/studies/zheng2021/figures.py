"""Figures: heat maps of head divergence, the sweep over the number of heads, and divergence against BLEU."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from attnlab.experiments.variants import Variant, Variants
from attnlab.report.figures import OKABE_ITO
from attnlab.studies.zheng2021.coda_models import LABELS

KINDS = ("encoder-self", "decoder-self", "cross")
MARKERS = dict(zip(LABELS, "os^D", strict=True))
COLOURS = dict(zip(LABELS, OKABE_ITO, strict=False))
WIDEST = 12  # maps in a line
Points = tuple[Sequence[float], Sequence[float]]
HeadLines = dict[str, tuple[Sequence[int], np.ndarray]]  # by attention: numbers of heads, values (heads, seeds)


def average_matrices(seeds: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], np.ndarray]:
    """Return the divergence of every two heads (h,h), the mean over seeds, by kind and layer; 0 on the diagonal."""
    sums: dict[tuple[str, int], np.ndarray] = {}
    for seed in seeds:
        heads = 1 + max(pair["head_b"] for pair in seed["jsd"])
        for pair in seed["jsd"]:
            matrix = sums.setdefault((pair["kind"], pair["layer"]), np.zeros((heads, heads)))
            for a, b in ((pair["head_a"], pair["head_b"]), (pair["head_b"], pair["head_a"])):
                matrix[a, b] += pair["jsd"] / len(seeds)
    return sums


def draw_heat_maps(models: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw a block for each model, with a row for each kind and a column for each layer, all in one colour scale."""
    blocks = {attention: average_matrices(seeds) for attention, seeds in models.items()}
    kinds = [kind for kind in KINDS if any(kind == key[0] for maps in blocks.values() for key in maps)]
    layers = 1 + max(layer for maps in blocks.values() for _, layer in maps)
    largest = max(float(map_.max()) for maps in blocks.values() for map_ in maps.values())
    per_line = max(1, min(len(blocks), WIDEST // layers))  # blocks in a line
    lines = -(-len(blocks) // per_line)
    figure = Figure(
        figsize=(0.62 * layers * per_line + 1.6, (0.66 * len(kinds) + 0.4) * lines + 0.3), layout="constrained"
    )
    ratios = ([1.0] * layers + [0.35]) * per_line
    axes = figure.subplots(lines * len(kinds), len(ratios), squeeze=False, width_ratios=ratios)
    for axis in axes.flat:
        axis.axis("off")
    for number, (attention, maps) in enumerate(blocks.items()):
        top, left = number // per_line * len(kinds), number % per_line * (layers + 1)
        for (kind, layer), map_ in maps.items():
            axis = axes[top + kinds.index(kind), left + layer]
            image = axis.imshow(map_, vmin=0.0, vmax=largest, cmap="Blues")
            axis.axis("on")
            axis.set(xticks=[], yticks=[])
            if kind == kinds[0]:
                axis.set_title(f"{LABELS[attention]}\nlayer {layer + 1}" if layer == 0 else f"{layer + 1}", fontsize=7)
            if left == layer == 0:
                axis.set_ylabel(kind.replace("-", "\n"), fontsize=7)
    figure.colorbar(image, ax=axes, shrink=0.8, label="JSD (nats)")
    return figure


def draw_divergence(models: Variants, variants: Sequence[Variant]) -> dict[str, tuple[Figure, str]]:
    """Draw the heat maps of these variants with their caption, by the name of their corpus, if one was measured."""
    corpus = models.ground.corpus
    if not (shown := {each.name: values for each in variants if (values := models.list_values(each))}):
        return {}
    caption = (
        f"{corpus.row}: each map compares every two heads of a layer at the mean logits, mean over seeds. Darker pairs "
        "differ more."
    )
    return {corpus.name: (draw_heat_maps(shown), caption)}


def draw_by_heads(panels: Mapping[str, HeadLines]) -> Figure:
    """Draw a panel for each measure: the seeds of each model and a line of their means."""
    figure = Figure(figsize=(3.2 * len(panels) + 0.4, 3.0), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (measure, lines) in zip(axes, panels.items(), strict=True):
        for attention, (heads, values) in lines.items():
            style = {"color": COLOURS[attention], "marker": MARKERS[attention]}
            axis.plot(heads, values.mean(1), label=LABELS[attention], linewidth=1.5, markersize=5, **style)
            axis.plot(heads, values, linestyle="none", alpha=0.4, markersize=3, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(heads, [str(count) for count in heads])
        axis.minorticks_off()
        axis.set_xlabel("heads")
        axis.set_ylabel(measure)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure


def draw_against(panels: Mapping[str, Mapping[str, Points]], *, x: str, y: str) -> Figure:
    """Draw a panel for each corpus: a small mark for each seed of a model, a large one for their mean."""
    figure = Figure(figsize=(3.3 * len(panels) + 0.5, 3.1), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, models) in zip(axes, panels.items(), strict=True):
        for attention, (across, up) in models.items():
            style = {"color": COLOURS[attention], "marker": MARKERS[attention], "linestyle": "none"}
            axis.plot(across, up, markersize=4, alpha=0.5, **style)
            axis.plot([np.mean(across)], [np.mean(up)], markersize=9, markeredgecolor="black", **style)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(x)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(y)
    shown = list(dict.fromkeys(attention for models in panels.values() for attention in models))
    handles = [
        Line2D([], [], color=COLOURS[name], marker=MARKERS[name], linestyle="none", label=LABELS[name])
        for name in shown
    ]
    figure.legend(handles=handles, fontsize=8, ncols=2 * len(panels), loc="outside upper center")
    return figure
