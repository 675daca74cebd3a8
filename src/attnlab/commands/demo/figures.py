"""The figures of the demo, each with what one sees in it."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnlab.commands.compare.figures import plain
from attnlab.commands.demo import learners as r
from attnlab.commands.demo.learners import DemoResults, Learner, Values
from attnlab.experiments.significance import compute_interval
from attnlab.report.colours import GOLD, choose_colormap
from attnlab.report.figures import OKABE_ITO
from attnlab.report.view import ViewGold

MARKERS, DASHES = "os^Dv", ("-", "--", "-.", ":")
COLUMNS = 5  # moments of a figure of maps
CURVES: dict[str, Callable[[Values, int], float | None]] = {
    "accuracy of the next word": lambda values, n: values["at"][n]["accuracy"],
    "AER of the best head": lambda values, n: r.at_head(values, "aer_weight", n),
    "agreement A(α, β)": lambda values, n: values["at"][n]["agreement"],
}


def all_of(results: DemoResults, gold: ViewGold) -> dict[str, tuple[Figure, str]]:
    """By name."""
    first = results.learners[0].moments
    seeds = len(results.config.all_seeds)
    lines = "The mean over seeds is thick, each seed thin." if seeds > 1 else "One seed."
    return {
        "maps": (maps(results.learners, gold), _says_maps(results, _columns(first))),
        "learning": (learning(results.learners), f"Accuracy, error rate and agreement against steps. {lines}"),
        "inside": (inside(results.learners), "Seeds (small), their mean and, from 3 seeds on, its 95 % interval."),
    }


def maps(learners: Sequence[Learner], gold: ViewGold) -> Figure:
    """The best head of each attention at some moments, on the first sentence; true links are framed."""
    moments = _columns(learners[0].moments)
    drawn = [[_map(learner, step, gold) for step in moments] for learner in learners]
    signed = any(bool((x < -1e-3).any()) for row in drawn for x in row)
    norm, colours = Normalize(-1.0 if signed else 0.0, 1.0), choose_colormap(signed=signed)
    source, target = (learners[0].records[moments[-1]].words[side][0] for side in ("source", "target"))
    rows, columns = drawn[0][0].shape
    figure = Figure(figsize=(2.0 * len(moments) + 0.9, 2.1 * len(learners) + 0.5), layout="constrained")
    axes = figure.subplots(len(learners), len(moments), squeeze=False)
    for line, learner, of_learner in zip(axes, learners, drawn, strict=True):
        for axis, weights in zip(line, of_learner, strict=True):
            image = axis.imshow(weights.numpy(), norm=norm, cmap=colours, aspect="auto")
            for word, place in gold.sure:
                axis.add_patch(Rectangle((word - 0.5, place - 0.5), 1, 1, fill=False, edgecolor=GOLD, linewidth=1.1))
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_yticks(range(rows), target[:rows], fontsize=6)
        line[0].set_ylabel(plain(learner.name), fontsize=10)
    for step, first, last in zip(moments, axes[0], axes[-1], strict=True):
        first.set_title(f"step {step}", fontsize=10)
        last.set_xticks(range(columns), source[:columns], fontsize=6, rotation=90)
    beyond: Any = "both" if signed else "neither"
    figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.6, label="weight", pad=0.01, extend=beyond)
    return figure


def learning(learners: Sequence[Learner]) -> Figure:
    figure = Figure(figsize=(10.4, 3.1), layout="constrained")
    axes = figure.subplots(1, len(CURVES))
    for axis, (name, of) in zip(axes, CURVES.items(), strict=True):
        for place, learner in enumerate(learners):
            style: Any = {"color": OKABE_ITO[place % 7]}
            lines = learner.curves(of)
            for line in lines if len(lines) > 1 else []:
                axis.plot(learner.moments, line, linewidth=0.7, alpha=0.35, **style)
            if lines:
                means = [statistics.fmean(at) for at in zip(*lines, strict=True)]
                style |= {"marker": MARKERS[place % 5], "markersize": 3.5, "label": plain(learner.name)}
                axis.plot(learner.moments, means, DASHES[place % 4], linewidth=1.7, **style)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("training steps", fontsize=9)
        axis.set_ylim(0, 1)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure


def inside(learners: Sequence[Learner]) -> Figure:
    """A panel a measure, a line an attention."""
    figure = Figure(figsize=(10.4, 0.9 + 0.34 * len(learners)), layout="constrained")
    chosen = (r.JSD, r.RESIDUAL, r.COSINE, r.GRADIENT)
    axes = figure.subplots(1, len(chosen), sharey=True)
    for axis, measure in zip(axes, chosen, strict=True):
        for place, learner in enumerate(learners):
            values = list(learner.values(measure).values())
            if not values:
                continue
            style: Any = {"color": OKABE_ITO[place % 7]}
            axis.plot(values, [place] * len(values), "o", markersize=3, alpha=0.5, **style)
            if (spread := compute_interval(values)) is not None:
                axis.plot(spread, [place, place], linewidth=1.5, **style)
            axis.plot(statistics.fmean(values), place, MARKERS[place % 5], markersize=6, **style)
        axis.set_title(measure.name, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3, axis="x")
    axes[0].set_yticks(range(len(learners)), [plain(learner.name) for learner in learners], fontsize=9)
    axes[0].set_ylim(len(learners) - 0.5, -0.5)
    return figure


def _columns(moments: Sequence[int]) -> list[int]:
    """Some of the moments, with the first and the last."""
    last = len(moments) - 1
    return [moments[place] for place in sorted({last * k // (COLUMNS - 1) for k in range(COLUMNS)})]


def _map(learner: Learner, step: int, gold: ViewGold) -> Any:
    """The weights of the best head on the first sentence, words alone: (words of the target, words of the source)."""
    layer, head = learner.first["head"]
    return learner.records[step].kind("cross")[layer].weights[0, head, : len(gold.rows) - 1, : gold.words].float()


def _says_maps(results: DemoResults, moments: Sequence[int]) -> str:
    heads = ", ".join(f"{learner.name}: {learner.head}" for learner in results.learners)
    steps = ", ".join(map(str, moments))
    return (
        f"Weights of the head that aligns best, on one held-out sentence, at steps {steps}. As in the viewer, a row is "
        f"named by the word that is read, columns are the words of the source, and the true source of the word to be "
        f"written next is framed. {heads}."
    )
