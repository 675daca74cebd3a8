"""A study's results for readers: cells.csv and one page."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.experiments.cell_text import format_interval, format_number, format_ours, format_published
from attnlab.experiments.reproduction import ItemResult
from attnlab.experiments.study import Scale, Study
from attnlab.experiments.study_findings import list_findings, select_clearest
from attnlab.experiments.verdicts import VERDICTS, Cell, count_verdicts
from attnlab.files import write_csv, write_text
from attnlab.report.page import Bars, Command, Facts, Part, Picture, Table, Text, render_page

CSV_COLUMNS = (
    "item", "row", "column", "published", "published_low", "published_high", "mean", "low", "high", "seeds", "values",
    "margin_low", "margin_high", "p", "holm_p", "verdict", "seeds_needed", "group", "tags", "note", "not_run",
)  # fmt: skip
NAMES = {"wall_s": "wall time (s)"}  # of facts
DIFFERS = "what differs"  # from what the paper ran: a column
HOLM = "Holm's p"  # a column
BARS = (
    "One bar for each table or figure of the paper: how many comparisons with its published numbers and directions "
    "have each verdict. The number at the right is their total."
)
CLEAREST = (
    "The numbers and directions that agree most clearly with the paper, then those that depart most clearly. "
    "Directions come before numbers; among each, cells of the paper's own data come first."
)


def write_study(study: Study, scale: Scale, results: Sequence[ItemResult], out: Path) -> Path:
    """Write OUT/SCALE/cells.csv and report.html; return the path of the page."""
    folder = out / scale
    write_csv(folder / "cells.csv", [CSV_COLUMNS, *(_list_fields(cell) for result in results for cell in result.cells)])
    report = folder / "report.html"
    write_text(report, _render_study(study, results, folder))
    return report


def tabulate_verdicts(cells: Sequence[Cell]) -> Table:
    """Return the number of comparisons, cells with a claim of the paper, of each group with each verdict."""
    counted = count_verdicts(cell for cell in cells if cell.has_claim)
    rows = [[group, *counts.values(), sum(counts.values())] for group, counts in counted.items()]
    return Table(["comparisons", *VERDICTS, "in all"], rows)


def tabulate_cells(cells: Sequence[Cell], *, with_item: bool = False) -> Table:
    """Return the cells that were run; with_item: also the item that each belongs to."""
    ran = [cell for cell in cells if not cell.not_run]
    tested = [HOLM] if any(cell.holm is not None for cell in ran) else []
    columns = ["row", "column", "published ± margin", "ours", "95 % interval", "seeds", *tested, "verdict", DIFFERS]
    columns = ["item", *columns] if with_item else columns
    rows = [
        [*([c.item] if with_item else []), c.row, c.column, format_published(c), format_ours(c),
         format_interval(c.interval) if not c.exact else "exact", len(c.values),
         *(["–" if c.holm is None else f"{c.holm:.2g}"] if tested else []), c.outcome, ", ".join(c.tags)]
        for c in ran
    ]  # fmt: skip
    return Table(columns, rows, verdicts="verdict")


def tabulate_result(cells: Sequence[Cell]) -> Table:
    """Return the cells that were run, or why none was."""
    table = tabulate_cells(cells)
    return table if table.rows else tabulate_notes(cells) or table


def tabulate_wide(cells: Sequence[Cell]) -> Table:
    """Return a line per row and a column per column, with mean ± half of the interval, of cells with nothing published.

    A row without any value is left out; `tabulate_notes` says why.
    """
    by_row: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if not cell.not_run:
            by_row.setdefault(cell.row, {})[cell.column] = cell
    columns = list(dict.fromkeys(column for row in by_row.values() for column in row))
    rows = [[name, *(_format_mean(row.get(column)) for column in columns)] for name, row in by_row.items()]
    return Table(["row", *columns], rows)


def _format_mean(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    if cell.interval is None or cell.share or cell.correlation:  # or an interval that is not symmetric
        return ", ".join(map(format_number, cell.values)) if cell.interval is None else format_number(cell.mean or 0.0)
    half = (cell.interval[1] - cell.interval[0]) / 2
    return format_number(cell.mean or 0.0) + (f" ± {half:.2g}" if half else "")


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
    counted: list[Part] = [Bars(_count_by_item(results), BARS), tabulate_verdicts(cells)] if study.from_paper else []
    summary: list[Part] = [Text(study.title), *counted]
    if missing:
        summary.append(Text(f"Items without a result in this ledger: {', '.join(missing)}."))
    clearest = tabulate_clearest(cells)
    heading = "What was reproduced" if study.from_paper else "What was measured"
    visible = [(heading, summary), *([("The clearest cells", clearest)] if clearest else [])]
    folded: list[tuple[str, list[Part]]] = []
    facts = [_list_facts(result) for result in results]
    first = facts[0] if facts else {}
    same = {key: value for key, value in first.items() if all(key in each and each[key] == value for each in facts)}
    for result, each in zip(results, facts, strict=True):
        own = {key: value for key, value in each.items() if key not in same}
        parts = [*_render_result(result, folder, wide=not study.from_paper), Command(_write_command(study, result))]
        where = folded if study.from_paper else visible
        where.append((result.title, [*parts, Facts(own)] if own else parts))
    if same:
        folded.append(("How all items were run", [Facts(same)]))
    return render_page(f"attnlab reproduce {study.name}", visible, findings=list_findings(results), folded=folded)


def tabulate_clearest(cells: Sequence[Cell]) -> list[Part]:
    """Return the cells that agree and depart most clearly as one table, or nothing if no cell is decided."""
    agreeing, against = select_clearest(cells)
    if not (agreeing or against):
        return []
    return [Text(CLEAREST), tabulate_cells([*agreeing, *against], with_item=True)]


def _count_by_item(results: Sequence[ItemResult]) -> dict[str, dict[str, int]]:
    """Return the number of claims with each verdict, by the title of the item; items without a claim are left out."""
    rows: dict[str, dict[str, int]] = {}
    for result in results:
        claims = [cell.verdict for cell in result.cells if cell.has_claim]
        if claims:
            rows[result.title] = {verdict: claims.count(verdict) for verdict in VERDICTS}
    return rows


def _render_result(result: ItemResult, folder: Path, *, wide: bool) -> list[Part]:
    tabulate = tabulate_wide if wide else tabulate_cells
    tables = [tabulate(result.cells)] if any(not cell.not_run for cell in result.cells) else []
    pictures = [
        Picture((folder / file).read_bytes(), caption) for file, caption in result.figures if (folder / file).is_file()
    ]
    notes = tabulate_notes(result.cells)
    return [*map(Text, result.remarks), *tables, *pictures, *([notes] if notes else [])]


def _list_facts(result: ItemResult) -> dict[str, Any]:
    config = result.config
    facts = {"scale": config.scale, "seeds": config.seeds, **config.options, **result.about}
    return {NAMES.get(key, key): value for key, value in facts.items() if key != "command"}


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
