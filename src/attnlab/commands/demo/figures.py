"""The figures of the demo, each with a caption."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnlab.commands.demo import learners as r
from attnlab.commands.demo.learners import DemoResults, Learner
from attnlab.experiments.seed_values import Values, draw_measures
from attnlab.report.colours import GOLD, choose_colormap
from attnlab.report.figures import DASHES, MARKERS, OKABE_ITO, escape_dollars
from attnlab.report.view import ViewGold

COLUMNS = 5  # moments in the figure of maps
CURVES: dict[str, Callable[[Values, int], float | None]] = {
    "accuracy of the next word": lambda values, n: values["at"][n]["accuracy"],
    "AER of the best head": lambda values, n: r.read_head(values, "aer_weight", n),
    "agreement A(α, β)": lambda values, n: values["at"][n]["agreement"],
}


def draw_figures(results: DemoResults, gold: ViewGold, sentence: int = 0) -> dict[str, tuple[Figure, str]]:
    """Return the figures by name; maps are of one sentence, whose true links are `gold`."""
    learners = results.learners
    last = len(learners[0].moments) - 1
    steps = [learners[0].moments[n] for n in sorted({last * k // (COLUMNS - 1) for k in range(COLUMNS)})]
    heads = "; ".join("{}: layer {}, head {}".format(learner.name, *learner.first["head"]) for learner in learners)
    maps = (
        "Weights of the cross-attention head that aligns best, on one held-out sentence, during training. Each row is "
        "the word that the decoder reads, each column a source word. The frame marks the true source of the next word: "
        f"a trained head is dark there. {heads}."
    )
    seeds = " Thick lines are means over seeds, thin lines are seeds." if results.config.seeds > 1 else ""
    inside = "Small dots are seeds, the large mark is their mean, and the line is its 95 % interval (from 3 seeds on)."
    measures = (r.JSD, r.RESIDUAL, r.COSINE, r.GRADIENT)
    return {
        "maps": (_draw_maps(learners, steps, gold, sentence), maps),
        "learning": (_draw_learning(learners), f"Accuracy, alignment error and agreement during training.{seeds}"),
        "inside": (draw_measures({learner.name: learner.measured for learner in learners}, measures), inside),
    }


def _draw_maps(learners: Sequence[Learner], steps: Sequence[int], gold: ViewGold, sentence: int) -> Figure:
    """Draw the best head of each attention at some steps, on one sentence; true links are framed."""
    maps = [[_get_map(learner, step, gold, sentence) for step in steps] for learner in learners]
    signed = any(bool((x < -1e-3).any()) for row in maps for x in row)
    norm, colours = Normalize(-1.0 if signed else 0.0, 1.0), choose_colormap(signed=signed)
    source, target = (learners[0].records[steps[-1]].words[side][sentence] for side in ("source", "target"))
    rows, columns = maps[0][0].shape
    figure = Figure(figsize=(2.0 * len(steps) + 0.9, 2.1 * len(learners) + 0.5), layout="constrained")
    axes = figure.subplots(len(learners), len(steps), squeeze=False)
    for line, learner, of_learner in zip(axes, learners, maps, strict=True):
        for axis, weights in zip(line, of_learner, strict=True):
            image = axis.imshow(weights.numpy(), norm=norm, cmap=colours, aspect="auto")
            for word, place in gold.sure:
                axis.add_patch(Rectangle((word - 0.5, place - 0.5), 1, 1, fill=False, edgecolor=GOLD, linewidth=1.1))
            axis.set(xticks=[], yticks=[])
        line[0].set_yticks(range(rows), target[:rows], fontsize=6)
        line[0].set_ylabel(escape_dollars(learner.name), fontsize=10)
    for step, first, last in zip(steps, axes[0], axes[-1], strict=True):
        first.set_title(f"step {step}", fontsize=10)
        last.set_xticks(range(columns), source[:columns], fontsize=6, rotation=90)
    beyond: Any = "both" if signed else "neither"
    figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.6, label="weight", pad=0.01, extend=beyond)
    return figure


def _get_map(learner: Learner, step: int, gold: ViewGold, sentence: int) -> Any:
    """Return the weights of the best head on one sentence: (target words, source words)."""
    layer, head = learner.first["head"]
    weights = learner.records[step].kind("cross")[layer].weights[sentence, head]
    return weights[: len(gold.rows) - 1, : gold.words].float()


def _draw_learning(learners: Sequence[Learner]) -> Figure:
    figure = Figure(figsize=(10.4, 3.1), layout="constrained")
    axes = figure.subplots(1, len(CURVES))
    for axis, (name, read) in zip(axes, CURVES.items(), strict=True):
        for place, learner in enumerate(learners):
            style: Any = {"color": OKABE_ITO[place % 7]}
            curves = learner.list_curves(read)
            for curve in curves if len(curves) > 1 else []:
                axis.plot(learner.moments, curve, linewidth=0.7, alpha=0.35, **style)
            if curves:
                means = [statistics.fmean(at) for at in zip(*curves, strict=True)]
                style |= {"marker": MARKERS[place % 5], "markersize": 3.5, "label": escape_dollars(learner.name)}
                axis.plot(learner.moments, means, DASHES[place % 4], linewidth=1.7, **style)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("training steps", fontsize=9)
        axis.set_ylim(0, 1)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure
