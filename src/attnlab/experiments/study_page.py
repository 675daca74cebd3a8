"""What a study found, as it is read: results.json, cells.csv and one page."""

import csv
import io
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.experiments.reproduction import FORMAT, ItemResult
from attnlab.experiments.study import Study
from attnlab.experiments.verdicts import VERDICTS, Cell, tally
from attnlab.files import write_bytes
from attnlab.report.page import Command, Facts, Part, Picture, Table, Text, render_page

CSV_COLUMNS = (
    "item", "row", "column", "published", "published_low", "published_high", "mean", "low", "high", "seeds", "values",
    "verdict", "group", "tags", "note", "not_run",
)  # fmt: skip
DIFFERS = "what differs"  # from what the paper ran: a column


def write(study: Study, outcomes: Sequence[ItemResult], out: Path) -> Path:
    """The three files of these outcomes; returns where the page is."""
    cells = [cell for outcome in outcomes for cell in outcome.cells]
    missing = [name for name in study.items if name not in {outcome.config.item for outcome in outcomes}]
    whole = {
        "format": FORMAT,
        "study": study.name,
        "title": study.title,
        "tally": tally(cells),
        "items_without_result": missing,
        "items": [outcome.as_json() for outcome in outcomes],
    }
    write_bytes(out / "results.json", (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode())
    write_bytes(out / "cells.csv", _csv(cells).encode())
    report = out / "report.html"
    write_bytes(report, _page(study, outcomes, missing, out).encode())
    return report


def tally_table(cells: Sequence[Cell]) -> Table:
    rows = [[group, *counts.values(), sum(counts.values())] for group, counts in tally(cells).items()]
    return Table(["cells", *VERDICTS, "in all"], rows)


def cell_table(cells: Sequence[Cell]) -> Table:
    """The cells that were run."""
    columns = ["row", "column", "published", "ours", "95 % interval", "seeds", "verdict", DIFFERS]
    rows = [
        [c.row, c.column, _published(c), _ours(c), _range(c.interval) if not c.exact else "exact", len(c.values) or "–",
         c.verdict, ", ".join(c.tags)]
        for c in cells
        if not c.not_run
    ]  # fmt: skip
    return Table(columns, rows, verdicts="verdict")


def outcome_table(cells: Sequence[Cell]) -> Table:
    """The cells that were run; where none was, why."""
    table = cell_table(cells)
    return table if table.rows else remarks_table(cells) or table


def brief(title: str, table: Table) -> tuple[str, Table]:
    """The same without a last column that is the same in every row: its text goes into the title."""
    last = {row[-1] for row in table.rows}
    if len(last) != 1 or len(table.rows) < 2 or table.columns[-1] != DIFFERS:
        return title, table
    said = f"{title} ({last.pop()})" if any(last) else title
    return said, Table(list(table.columns)[:-1], [list(row)[:-1] for row in table.rows], verdicts=table.verdicts)


def remarks_table(cells: Sequence[Cell]) -> Table | None:
    """Each note and each reason why something was not run, once, with the rows it is about."""
    about: dict[str, list[Cell]] = {}
    for cell in cells:
        if text := f"not run: {cell.not_run}" if cell.not_run else cell.note:
            about.setdefault(text, []).append(cell)
    rows = [["; ".join(dict.fromkeys(c.row for c in some)), len(some), text] for text, some in about.items()]
    return Table(["row", "cells", "what is to be said"], rows) if rows else None


def _page(study: Study, outcomes: Sequence[ItemResult], missing: Sequence[str], out: Path) -> str:
    cells = [cell for outcome in outcomes for cell in outcome.cells]
    summary: list[Part] = [Text(study.title), tally_table(cells)]
    if missing:
        summary.append(Text(f"Items that have no result in this folder: {', '.join(missing)}."))
    sections = [("In short", summary)]
    made = [_made(outcome) for outcome in outcomes]
    first = made[0] if made else {}
    same = {key: value for key, value in first.items() if all(key in each and each[key] == value for each in made)}
    for outcome, facts in zip(outcomes, made, strict=True):
        own = {key: value for key, value in facts.items() if key not in same}
        parts = [*_found(outcome, out), Command(_command(outcome))]
        sections.append((outcome.title, [*parts, Facts(own)] if own else parts))
    if same:
        sections.append(("How all of it was run", [Facts(same)]))
    return render_page(f"attnlab reproduce {study.name}", sections)


def _found(outcome: ItemResult, out: Path) -> list[Part]:
    tables = [cell_table(outcome.cells)] if any(not cell.not_run for cell in outcome.cells) else []
    pictures = [Picture((out / file).read_bytes(), says) for file, says in outcome.figures]
    said = remarks_table(outcome.cells)
    return [*map(Text, outcome.remarks), *tables, *pictures, *([said] if said else [])]


def _made(outcome: ItemResult) -> dict[str, Any]:
    """How an item was run, but for the command."""
    config = outcome.config
    facts = {"scale": config.scale, "seeds": config.seeds, **config.options, **outcome.about}
    return {key: value for key, value in facts.items() if key != "command"}


def _command(outcome: ItemResult) -> str:
    """What makes this item again, and no other."""
    words = [word for word in shlex.split(outcome.about["command"]) if not word.startswith("--only=")]
    return shlex.join([*words, f"--only={outcome.config.item}"])


def _csv(cells: Sequence[Cell]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for c in cells:
        low, high = c.interval or ("", "")
        published_low, published_high = c.published_interval or ("", "")
        writer.writerow(
            [c.item, c.row, c.column, "" if c.published is None else c.published, published_low, published_high,
             "" if c.mean is None else c.mean, low, high, len(c.values), " ".join(map(repr, c.values)), c.verdict,
             c.group, "; ".join(c.tags), c.note, c.not_run]
        )  # fmt: skip
    return text.getvalue()


def _published(cell: Cell) -> str:
    if cell.published is None and cell.published_interval is None:
        return {1: "above 0", -1: "below 0", 0: "–"}[cell.sign]
    value = "" if cell.published is None else number(cell.published)
    return f"{value} {_range(cell.published_interval)}".strip() if cell.published_interval else value


def _ours(cell: Cell) -> str:
    if cell.interval is None:
        return ", ".join(map(number, cell.values)) or "–"
    return number(cell.mean or 0.0)


def _range(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"[{number(interval[0])}, {number(interval[1])}]"


def number(x: float) -> str:
    """Four figures; whole numbers as they are; what is not finite by its name."""
    if not math.isfinite(x):
        return str(x)
    return f"{x:,.0f}" if x == round(x) and abs(x) < 1e12 else f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"
