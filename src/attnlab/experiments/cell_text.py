"""The numbers of a cell as text."""

import math

from attnlab.experiments.verdicts import Cell


def format_published(cell: Cell) -> str:
    """Return the published number with its margin, or the side of 0 that the paper claims."""
    if cell.published is None and cell.published_interval is None:
        return {1: "above 0", -1: "below 0", 0: "–"}[cell.sign]
    value = "" if cell.published is None else format_number(cell.published)
    if cell.published_interval:
        return f"{value} {format_interval(cell.published_interval)}".strip()
    if cell.exact or cell.sign or cell.bounds is None:
        return value
    return f"{value} ± {(cell.bounds[1] - cell.bounds[0]) / 2:.2g}"


def format_ours(cell: Cell) -> str:
    """Return the mean, or every value if there are too few seeds for an interval."""
    if cell.interval is None:
        return ", ".join(map(format_number, cell.values)) or "–"
    return format_number(cell.mean or 0.0)


def format_interval(interval: tuple[float, float] | None) -> str:
    """Return '[low, high]', or a dash."""
    return "–" if interval is None else f"[{format_number(interval[0])}, {format_number(interval[1])}]"


def format_number(x: float) -> str:
    """Return a number with four figures; whole numbers as they are."""
    if not math.isfinite(x):
        return str(x)
    return f"{x:,.0f}" if x == round(x) and abs(x) < 1e12 else f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"
