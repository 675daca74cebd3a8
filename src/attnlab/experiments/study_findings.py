"""What a study found, in a few sentences and a few cells, written from its cells.

A cell has a claim if the paper prints a number, an interval or a direction for it. How clear a cell is, is measured in
half widths h of our interval, with 5 % of the published value p added so that a tiny interval does not decide alone:

    contrast (the paper claims a side of 0)     s · mean / h                       above 0: on the side of the paper
    number                                      −|mean − p| / (h + 0.05 |p|)       0: equal to the published number
"""

import re
from collections.abc import Iterable, Sequence

from attnlab.experiments.cell_text import format_interval, format_number, format_published
from attnlab.experiments.reproduction import ItemResult
from attnlab.experiments.verdicts import SHARE, VERDICTS, Cell

AGREEING, AGAINST = ("reproduced", "same direction"), ("opposite", "different")
MINUS = re.compile(r"(?<![\w.])-(?=[\d.])")  # the hyphen of a negative number
EACH, PER_ITEM = 4, 2  # cells of either side in a summary, and of one item


def list_findings(results: Sequence[ItemResult]) -> list[str]:
    """Return three sentences: how many published numbers hold, what holds most clearly, and what departs most."""
    cells = [cell for result in results for cell in result.cells if cell.has_claim]
    if not cells:
        return ["No number or direction is published for these cells, so they have no verdict."]
    agreeing, against = select_clearest(cells)
    others = sum(len(result.cells) for result in results) - len(cells)
    more = (
        f" {others:,} other cell{'s have' if others > 1 else ' has'} no published value; cells.csv lists all."
        if others
        else ""
    )
    sentences = [_describe_counts(cells) + more]
    if agreeing:
        sentences.append(f"Agreement is clearest for {describe_cell(agreeing[0])}.")
    if against:
        sentences.append(f"The results depart most clearly for {describe_cell(against[0])}.")
    elif reasons := _count_reasons(cells):
        reason, count = max(reasons.items(), key=lambda pair: pair[1])
        sentences.append(f"{count:,} comparison{'s were' if count > 1 else ' was'} not run: {reason}.")
    return sentences


def select_clearest(cells: Iterable[Cell], number: int = EACH) -> tuple[list[Cell], list[Cell]]:
    """Return the cells that agree and those that depart most clearly, at most two of an item on either side.

    Contrasts come before numbers, the paper's own data before others, and cells without an erratum before the rest.
    """
    measured = [(cell, clearness) for cell in cells if (clearness := measure_clearness(cell)) is not None]
    agreeing = [(cell, -clearness) for cell, clearness in measured if cell.verdict in AGREEING]
    against = [(cell, clearness) for cell, clearness in measured if cell.verdict in AGAINST]
    return _take_first(agreeing, number), _take_first(against, number)


def _take_first(pairs: Iterable[tuple[Cell, float]], number: int) -> list[Cell]:
    def rank(pair: tuple[Cell, float]) -> tuple[bool, bool, bool, float]:
        return not pair[0].sign, pair[0].group != "official", "erratum" in pair[0].tags, pair[1]

    chosen: list[Cell] = []
    for cell, _ in sorted(pairs, key=rank):
        if len(chosen) < number and sum(other.item == cell.item for other in chosen) < PER_ITEM:
            chosen.append(cell)
    return chosen


def measure_clearness(cell: Cell) -> float | None:
    """Return how clear a cell is, as the module docstring defines; None without an interval or a claim."""
    if cell.interval is None or cell.mean is None or not cell.has_claim:
        return None
    half = (cell.interval[1] - cell.interval[0]) / 2
    if cell.sign:
        return cell.sign * cell.mean / max(half, 1e-12)
    published = cell.published
    if published is None:
        assert cell.published_interval is not None
        published = sum(cell.published_interval) / 2
    return -abs(cell.mean - published) / max(half + SHARE * abs(published), 1e-12)


def describe_cell(cell: Cell) -> str:
    """'IMDB, A(α, β): the paper has 60.35, we have 49.6 [39.57, 59.63]'."""
    has_number = cell.published is not None or cell.published_interval is not None
    published = f"{'' if has_number else 'a value '}{format_published(cell)}"
    interval = "" if cell.exact or cell.interval is None else f" {format_interval(cell.interval)}"
    numbers = f"the paper has {published}, we have {format_number(cell.mean or 0.0)}{interval}"
    return f"{cell.row}, {cell.column}: {MINUS.sub('−', numbers)}"


def _describe_counts(cells: Sequence[Cell]) -> str:
    ran = [cell for cell in cells if not cell.not_run]
    counts = [(verdict, sum(cell.verdict == verdict for cell in ran)) for verdict in VERDICTS[:-1]]
    parts = ", ".join(f"{count:,} {verdict}" for verdict, count in counts if count)
    were = "was" if len(ran) == 1 else "were"
    text = f"Of {len(cells):,} comparisons with published numbers and directions, {len(ran):,} {were} run"
    own = sum(cell.group == "official" for cell in ran)
    return f"{text}, {own:,} of them on the paper's own data and model: {parts}." if ran else f"{text}."


def _count_reasons(cells: Iterable[Cell]) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for cell in cells:
        if cell.not_run:
            reasons[cell.not_run] = reasons.get(cell.not_run, 0) + 1
    return reasons
