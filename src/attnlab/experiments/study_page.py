"""A study's results for readers: cells.csv and one page."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.experiments.reproduction import ItemResult
from attnlab.experiments.study import Scale, Study
from attnlab.experiments.verdicts import VERDICTS, Cell, count_verdicts
from attnlab.files import write_csv, write_text
from attnlab.report.page import Command, Facts, Part, Picture, Table, Text, render_page

CSV_COLUMNS = (
    "item", "row", "column", "published", "published_low", "published_high", "mean", "low", "high", "seeds", "values",
    "margin_low", "margin_high", "p", "holm_p", "verdict", "seeds_needed", "group", "tags", "note", "not_run",
)  # fmt: skip
DIFFERS = "what differs"  # from what the paper ran: a column
HOLM = "Holm's p"  # a column


def write_study(study: Study, scale: Scale, results: Sequence[ItemResult], out: Path) -> Path:
    """Write OUT/SCALE/cells.csv and report.html; return the path of the page."""
    folder = out / scale
    write_csv(folder / "cells.csv", [CSV_COLUMNS, *(_list_fields(cell) for result in results for cell in result.cells)])
    report = folder / "report.html"
    write_text(report, _render_study(study, results, folder))
    return report


def tabulate_verdicts(cells: Sequence[Cell]) -> Table:
    """Return the number of cells of each group with each verdict."""
    rows = [[group, *counts.values(), sum(counts.values())] for group, counts in count_verdicts(cells).items()]
    return Table(["cells", *VERDICTS, "in all"], rows)


def tabulate_cells(cells: Sequence[Cell]) -> Table:
    """Return the cells that were run."""
    ran = [cell for cell in cells if not cell.not_run]
    tested = [HOLM] if any(cell.holm is not None for cell in ran) else []
    columns = ["row", "column", "published", "ours", "95 % interval", "seeds", *tested, "verdict", DIFFERS]
    rows = [
        [c.row, c.column, format_published(c), _format_ours(c),
         _format_interval(c.interval) if not c.exact else "exact", len(c.values),
         *(["–" if c.holm is None else f"{c.holm:.2g}"] if tested else []), c.outcome, ", ".join(c.tags)]
        for c in ran
    ]  # fmt: skip
    return Table(columns, rows, verdicts="verdict")


def tabulate_result(cells: Sequence[Cell]) -> Table:
    """Return the cells that were run, or why none was."""
    table = tabulate_cells(cells)
    return table if table.rows else tabulate_notes(cells) or table


def drop_constant_column(title: str, table: Table) -> tuple[str, Table]:
    """Move the last column into the title if all its rows are equal."""
    last = {row[-1] for row in table.rows}
    if len(last) != 1 or len(table.rows) < 2 or table.columns[-1] != DIFFERS:
        return title, table
    longer = f"{title} ({last.pop()})" if any(last) else title
    return longer, Table(list(table.columns)[:-1], [list(row)[:-1] for row in table.rows], verdicts=table.verdicts)


def tabulate_notes(cells: Sequence[Cell]) -> Table | None:
    """Return each note, and each reason why something was not run, once, with its rows."""
    about: dict[str, list[Cell]] = {}
    for cell in cells:
        if text := f"not run: {cell.not_run}" if cell.not_run else cell.note:
            about.setdefault(text, []).append(cell)
    rows = [["; ".join(dict.fromkeys(c.row for c in some)), len(some), text] for text, some in about.items()]
    return Table(["row", "cells", "note"], rows) if rows else None


def _render_study(study: Study, results: Sequence[ItemResult], folder: Path) -> str:
    cells = [cell for result in results for cell in result.cells]
    missing = [name for name in study.items if name not in {result.config.item for result in results}]
    summary: list[Part] = [Text(study.title), tabulate_verdicts(cells)]
    if missing:
        summary.append(Text(f"Items without a result in this ledger: {', '.join(missing)}."))
    sections = [("In short", summary)]
    facts = [_list_facts(result) for result in results]
    first = facts[0] if facts else {}
    same = {key: value for key, value in first.items() if all(key in each and each[key] == value for each in facts)}
    for result, each in zip(results, facts, strict=True):
        own = {key: value for key, value in each.items() if key not in same}
        parts = [*_render_result(result, folder), Command(_write_command(study, result))]
        sections.append((result.title, [*parts, Facts(own)] if own else parts))
    if same:
        sections.append(("How all items were run", [Facts(same)]))
    return render_page(f"attnlab reproduce {study.name}", sections)


def _render_result(result: ItemResult, folder: Path) -> list[Part]:
    tables = [tabulate_cells(result.cells)] if any(not cell.not_run for cell in result.cells) else []
    pictures = [
        Picture((folder / file).read_bytes(), caption) for file, caption in result.figures if (folder / file).is_file()
    ]
    notes = tabulate_notes(result.cells)
    return [*map(Text, result.remarks), *tables, *pictures, *([notes] if notes else [])]


def _list_facts(result: ItemResult) -> dict[str, Any]:
    config = result.config
    facts = {"scale": config.scale, "seeds": config.seeds, **config.options, **result.about}
    return {key: value for key, value in facts.items() if key != "command"}


def _write_command(study: Study, result: ItemResult) -> str:
    """Return the command that runs this item and no other."""
    stored = result.about.get("command") or f"attnlab reproduce {study.name} --scale={result.config.scale}"
    words = [word for word in shlex.split(stored) if not word.startswith("--only=")]
    return shlex.join([*words, f"--only={result.config.item}"])


def _list_fields(c: Cell) -> list[Any]:
    """Return a cell as a row of CSV_COLUMNS."""
    fields = [
        c.item, c.row, c.column, c.published, *(c.published_interval or ("", "")), c.mean, *(c.interval or ("", "")),
        len(c.values), " ".join(map(repr, c.values)), *(c.bounds or ("", "")), c.p, c.holm, c.verdict, c.seeds_needed,
        c.group, "; ".join(c.tags), c.note, c.not_run,
    ]  # fmt: skip
    return ["" if field is None else field for field in fields]


def format_published(cell: Cell) -> str:
    """Return the published number with its margin, or the side of 0 that the paper claims."""
    if cell.published is None and cell.published_interval is None:
        return {1: "above 0", -1: "below 0", 0: "–"}[cell.sign]
    value = "" if cell.published is None else format_number(cell.published)
    if cell.published_interval:
        return f"{value} {_format_interval(cell.published_interval)}".strip()
    if cell.exact or cell.sign or cell.bounds is None:
        return value
    return f"{value} ± {(cell.bounds[1] - cell.bounds[0]) / 2:.2g}"


def _format_ours(cell: Cell) -> str:
    if cell.interval is None:
        return ", ".join(map(format_number, cell.values)) or "–"
    return format_number(cell.mean or 0.0)


def _format_interval(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"[{format_number(interval[0])}, {format_number(interval[1])}]"


def format_number(x: float) -> str:
    """Return a number with four figures; whole numbers as they are."""
    if not math.isfinite(x):
        return str(x)
    return f"{x:,.0f}" if x == round(x) and abs(x) < 1e12 else f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"
