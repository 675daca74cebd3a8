"""How much of each paper is published, implemented, run and decided, from the ledgers alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnlab.experiments.engine import RowReader
from attnlab.experiments.plan import Workplace
from attnlab.experiments.reproduction import draw_study
from attnlab.experiments.study import Setting, Study
from attnlab.experiments.verdicts import VERDICTS, Cell
from attnlab.report.page import Table

COLUMNS = ("study", "published", "implemented", "run", "official", *VERDICTS[:-1])


def tabulate_status(studies: Sequence[Study], root: Path) -> tuple[Table, list[str]]:
    """Return a row per study with its numbers of cells, and the command that runs the next missing item of each.

    published     cells with a number or a direction from the paper; a number that several rows are compared with
                  (official data and a stand-in, as printed and as corrected) counts once per row
    implemented   those that some item of ours has
    run           those with a value in ROOT/STUDY/ledger.jsonl at full scale; official: on the paper's own data
    """
    rows: list[list[Any]] = []
    commands = []
    for study in studies:
        results = {
            result.config.item: result.cells for result in draw_study(study, "full", root / study.name, save=False)
        }
        absent = {name: plan_cells(study, name, root / study.name) for name in study.items if name not in results}
        cells = [cell for some in (*results.values(), *absent.values()) for cell in some if has_claim(cell)]
        ran = [cell for cell in cells if not cell.not_run]
        missing = sum(study.unimplemented.values())
        verdicts = [sum(cell.verdict == verdict for cell in ran) for verdict in VERDICTS[:-1]]
        official = sum(cell.group == "official" for cell in ran)
        rows.append([study.name, len(cells) + missing, len(cells), len(ran), official, *verdicts])
        if command := suggest_command(study, results.keys(), cells):
            commands.append(command)
    totals = ["all", *(sum(row[place] for row in rows) for place in range(1, len(COLUMNS)))]
    return Table(list(COLUMNS), [*rows, totals]), commands


def plan_cells(study: Study, name: str, out: Path) -> Sequence[Cell]:
    """Return the cells that an item would have, all of them not run."""
    item, place = study.items[name], Workplace.at(out)
    rows = RowReader(place.open_ledger(), running=False)
    try:
        return list(item.run(Setting("full", tuple(range(item.seeds["full"])), place, rows)).cells)
    except ValueError:  # an item whose cells are known only from its rows
        return []


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
