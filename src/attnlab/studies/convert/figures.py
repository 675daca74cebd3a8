"""Figures: the learning curve of each mechanism beside the original's, and the tokens until each is back."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from attnlab.report.figures import OKABE_ITO, escape_dollars
from attnlab.studies.convert.recovery import Recovery

ACROSS = 6  # panels in a line
Curves = Mapping[str, Sequence[Recovery]]  # the seeds of each mechanism


def draw_recoveries(curves: Curves) -> Figure:
    """Draw a panel for each mechanism, all with the same horizontal axis; the vertical axes differ."""
    across = min(ACROSS, len(curves))
    lines = -(-len(curves) // across)
    figure = Figure(figsize=(1.75 * across + 0.5, 1.45 * lines + 0.4), layout="constrained")
    axes = list(figure.subplots(lines, across, squeeze=False, sharex=True).flat)
    for axis, (name, seeds) in zip(axes, curves.items(), strict=False):
        for one in seeds:
            axis.plot(one.tokens, one.original, color="0.6", linewidth=1)
            axis.plot(one.tokens, one.losses, color=OKABE_ITO[0], linewidth=1)
        axis.set_title(escape_dollars(name), fontsize=8)
        axis.tick_params(labelsize=6)
        axis.grid(alpha=0.3)
    for axis in axes[len(curves) :]:
        axis.axis("off")
    figure.supxlabel("tokens of training", fontsize=8)
    figure.supylabel("log-perplexity (nats per token)", fontsize=8)
    return figure


def draw_tokens(curves: Curves) -> Figure:
    """Draw a row for each mechanism, the soonest back on top, with a mark for each seed."""
    budget = next(iter(curves.values()))[0].budget

    def rank(seeds: Sequence[Recovery]) -> tuple[float, float]:
        tokens = [budget if one.back is None else one.back for one in seeds]
        return sum(tokens) / len(seeds), sum(one.ratio for one in seeds) / len(seeds)

    order = sorted(curves.items(), key=lambda pair: rank(pair[1]))
    figure = Figure(figsize=(6.2, 0.8 + 0.19 * len(order)), layout="constrained")
    axis = figure.subplots()
    for place, (_, seeds) in enumerate(order):
        back = [one.back for one in seeds if one.back is not None]
        late = len(seeds) - len(back)
        axis.plot(back, [place] * len(back), "o", color=OKABE_ITO[0], markersize=4, alpha=0.7)
        axis.plot([budget] * late, [place] * late, ">", color=OKABE_ITO[1], markerfacecolor="none", markersize=5)
    axis.set_yticks(range(len(order)), [escape_dollars(name) for name, _ in order], fontsize=7)
    axis.set_ylim(len(order) - 0.5, -0.5)
    axis.set_xlim(-0.03 * budget, 1.05 * budget)
    axis.set_xlabel("tokens until back (circle); not back within the budget (triangle)", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(alpha=0.3)
    return figure
