"""Figures with matplotlib, readable in print and for colour-blind readers."""

import io
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from matplotlib import get_data_path, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from attnlab.files import write_bytes
from attnlab.report.colours import choose_colormap
from attnlab.report.page import Picture

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES, MARKERS = ("-", "--", "-.", ":"), "os^Dv"
Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # x values and y values by name


def draw_attention_maps(maps: Mapping[str, Tensor], rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """Draw weights (i,j) side by side with one colour scale; a diverging one if some are negative."""
    signed = any(bool((weights < -1e-3).any()) for weights in maps.values())
    most = max(float(weights.abs().max()) for weights in maps.values())
    norm, colours = Normalize(-most if signed else 0.0, most), choose_colormap(signed=signed)
    figure = Figure(figsize=(3.1 * len(maps) + 0.6, 3.4), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, (title, weights) in zip(axes, maps.items(), strict=True):
        image = axis.imshow(weights.numpy(), norm=norm, cmap=colours)
        axis.set_title(title, fontsize=11)
        axis.set_xticks(range(len(columns)), columns, fontsize=7)
        axis.set_yticks(range(len(rows)), rows, fontsize=7)
        axis.set_xlabel("key (attended to)")
    axes[0].set_ylabel("query (attending)")
    figure.colorbar(image, ax=list(axes), shrink=0.8, label="weight")
    return figure


def draw_curves(lines: Lines, *, x: str, y: str) -> Figure:
    """Draw one line for each name: (x values, y values). Lines differ in colour, dash and marker."""
    figure = Figure(figsize=(6.2, 3.2), layout="constrained")
    axis = figure.subplots()
    _plot_lines(axis, lines, x)
    if all(float(at).is_integer() for xs, _ in lines.values() for at in xs):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_ylabel(y)
    axis.legend(fontsize=8)
    return figure


def draw_panels(panels: Mapping[str, Lines], *, x: str, y: str) -> Figure:
    """Draw one panel for each title, with one line for each name. A name has the same colour in all panels."""
    figure = Figure(figsize=(2.9 * len(panels) + 0.6, 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        _plot_lines(axis, lines, x)
        axis.set_title(title, fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes[0].set_ylabel(y)
    named = axes[0].get_legend_handles_labels()
    figure.legend(*named, fontsize=8, ncols=min(5, len(named[1])), loc="outside upper center")
    return figure


def _plot_lines(axis: Axes, lines: Lines, x: str) -> None:
    for number, (name, (xs, ys)) in enumerate(lines.items()):
        marker, color, size = MARKERS[number % 5], OKABE_ITO[number % 7], 7 if len(xs) == 1 else 3
        axis.plot(xs, ys, DASHES[number % 4], label=name, marker=marker, markersize=size, color=color)
    axis.set_xlabel(x)
    axis.grid(alpha=0.3)


def draw_seed_curves(cases: Mapping[str, tuple[Sequence[float], Tensor]], *, x: str, y: str) -> Figure:
    """Draw one panel for each case: (x values, y values (s,n)). Thin lines are seeds, the thick one their mean."""
    figure = Figure(figsize=(2.9 * len(cases) + 0.4, 2.8), layout="constrained")
    axes = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    for number, (axis, (name, (xs, ys))) in enumerate(zip(axes, cases.items(), strict=True)):
        colour = OKABE_ITO[number % 7]
        marker = "o" if len(xs) == 1 else ""  # a line of one point is invisible
        axis.plot(xs, ys.T.numpy(), color=colour, alpha=0.45, linewidth=0.9, marker=marker, markersize=3)
        axis.plot(xs, ys.mean(0).numpy(), color="black", linewidth=1.6, linestyle="--", marker=marker, label="mean")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(x)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(y)
    axes[0].legend(fontsize=8)
    return figure


def draw_scatter(groups: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str) -> Figure:
    """Draw points (x, y) with a colour and a marker for each group."""
    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axis = figure.subplots()
    for number, (name, points) in enumerate(groups.items()):
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        colour = OKABE_ITO[number % 7]
        axis.plot(xs, ys, MARKERS[number % 5], color=colour, alpha=0.7, markersize=5, label=name)
    axis.legend(fontsize=8)
    axis.set(xlabel=x, ylabel=y)
    axis.grid(alpha=0.3)
    return figure


def render_png(figure: Figure) -> bytes:
    return _render(figure, "png", {"Software": None})


def render_files(figure: Figure) -> dict[str, bytes]:
    """Render the figure by suffix: .png for pages, .svg and .pdf for papers. The bytes are reproducible."""
    formats = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None, "Producer": None}}
    files = {}
    for suffix, metadata in formats.items():
        files[suffix] = _render(figure, suffix[1:], metadata)
        figure.set_layout_engine(None)  # all formats use the same layout
    return files


def save_figure(stem: Path, figure: Figure, caption: str) -> Picture:
    """Write stem.png, stem.svg and stem.pdf. Returns the picture for a page."""
    files = render_files(figure)
    for suffix, data in files.items():
        write_bytes(stem.with_name(stem.name + suffix), data)
    return Picture(files[".png"], caption)


def _render(figure: Figure, form: str, metadata: Mapping[str, None]) -> bytes:
    buffer = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_fontfamily(list(dict.fromkeys([*text.get_fontfamily(), *find_fonts(text.get_text())])))
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "attnlab"}):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box replaces a glyph that no font has
        figure.savefig(buffer, format=form, dpi=160, metadata=metadata)
    return buffer.getvalue()


def find_fonts(text: str) -> list[str]:
    """Find system fonts for the characters of a text that matplotlib's default font lacks."""
    missing, needed = {ord(letter) for letter in text} - _list_letters(findfont("DejaVu Sans")), []
    for font in fontManager.ttflist if missing else ():
        own = font.fname.startswith(get_data_path())  # matplotlib's fonts for formulas
        if not own and font.style == "normal" and "Emoji" not in font.name and missing & _list_letters(font.fname):
            needed.append(font.name)
            missing -= _list_letters(font.fname)
    return needed


def escape_dollars(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as formulas."""
    return text.replace("$", r"\$")


@cache
def _list_letters(file: str) -> frozenset[int]:
    """Return the code points of a font."""
    return frozenset(get_font(file).get_charmap())
