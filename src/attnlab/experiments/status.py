"""How much of each paper is published, implemented, run and decided, from the ledgers alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnlab.experiments.reproduction import draw_study
from attnlab.experiments.study import Study
from attnlab.experiments.verdicts import VERDICTS, Cell
from attnlab.report.page import Table

COLUMNS = ("study", "published", "implemented", "run", "official", *VERDICTS[:-1])


def tabulate_status(studies: Sequence[Study], root: Path) -> tuple[Table, list[str]]:
    """Return a row per study with its numbers of cells, and the command that runs the next missing item of each.

    published     numbers and directions that the paper prints and that are known
    implemented   those that some item of ours has a cell for
    run           those with a value in ROOT/STUDY/ledger.jsonl at full scale; official: on the paper's own data
    """
    rows: list[list[Any]] = []
    commands = []
    for study in studies:
        results = {result.config.item: result for result in draw_study(study, "full", root / study.name)}
        cells = [cell for result in results.values() for cell in result.cells if has_claim(cell)]
        ran = [cell for cell in cells if not cell.not_run]
        missing = sum(study.unimplemented.values())
        verdicts = [sum(cell.verdict == verdict for cell in ran) for verdict in VERDICTS[:-1]]
        official = sum(cell.group == "official" for cell in ran)
        rows.append([study.name, len(cells) + missing, len(cells), len(ran), official, *verdicts])
        if command := suggest_command(study, results.keys(), cells):
            commands.append(command)
    totals = ["all", *(sum(row[place] for row in rows) for place in range(1, len(COLUMNS)))]
    return Table(list(COLUMNS), [*rows, totals]), commands


def has_claim(cell: Cell) -> bool:
    """Return whether the paper says something about a cell."""
    return cell.published is not None or cell.published_interval is not None or bool(cell.sign)


def suggest_command(study: Study, known: Iterable[str], cells: Sequence[Cell]) -> str:
    """Return the command for the first item without a result, else for the item with most cells that were not run."""
    names = [name for name in study.items if name not in set(known)]
    if not names:
        counts = {name: sum(bool(cell.not_run) for cell in cells if cell.item == name) for name in study.items}
        names = [name for name, count in sorted(counts.items(), key=lambda pair: -pair[1]) if count]
    return f"attnlab reproduce {study.name} --scale full --only {names[0]}" if names else ""
