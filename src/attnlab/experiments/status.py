"""How much of each paper is published, implemented, run and decided, from the ledgers alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnlab.experiments.ledger import FILE, Ledger
from attnlab.experiments.reproduction import StudyTerms, draw_study, plan_cells
from attnlab.experiments.study import Study
from attnlab.experiments.verdicts import VERDICTS, Cell, list_numbers
from attnlab.report.page import Table

COUNTS = ("cells", "run", "impossible", "official", *VERDICTS[:-1])
COLUMNS = ("study", "numbers", "measured", *COUNTS)
ITEM_COLUMNS = ("item", "fewest seeds", *COUNTS)


def tabulate_status(studies: Sequence[Study], root: Path) -> tuple[Table, list[str]]:
    """Return a row per study, and the command that runs the next missing item of each.

    numbers    distinct numbers that the paper prints; measured: those with a value of ours in some cell
    cells      comparisons with a number or a direction of the paper; a number that several rows are compared with
               (official data and a stand-in, as printed and as corrected) is in as many cells
    run        cells with a value in ROOT/STUDY/ledger.jsonl at full scale; official: with the paper's data,
               vocabulary and model
    impossible cells that no run of ours can fill, each with its reason: the paper's data are not at hand, or the number
               is quoted from elsewhere

    A study without a ledger has no row, because some of its cells are known only from measured runs. A study without
    a paper is left out.
    """
    studies = [study for study in studies if study.from_paper]
    if not any((root / study.name / FILE).is_file() for study in studies):
        raise FileNotFoundError(f"{root} has no STUDY/{FILE}; give the folder of the studies: --from results")
    rows: list[list[Any]] = []
    commands = []
    for study in studies:
        if not (root / study.name / FILE).is_file():
            commands.append(suggest_command(study, (), ()))
            continue
        known, items = _read_cells(study, root / study.name)
        cells = [cell for some in items.values() for cell in some]
        ran = [cell for name in known for cell in items[name] if not cell.not_run]
        numbers = len(list_numbers(cells)) + sum(study.unimplemented.values())
        rows.append([study.name, numbers, len(list_numbers(ran)), *_count_cells(cells, ran)])
        if command := suggest_command(study, known, cells):
            commands.append(command)
    totals = ["all", *(sum(row[place] for row in rows) for place in range(1, len(COLUMNS)))]
    return Table(list(COLUMNS), [*rows, totals]), commands


def tabulate_items(study: Study, root: Path) -> tuple[Table, list[str]]:
    """Return a row per item of one study, and the command of each item with cells that a run can still fill.

    fewest seeds   of the cells that were run and that a seed changes
    """
    if not study.from_paper:
        advice = f"attnlab ledger show {root / study.name} lists its runs"
        raise ValueError(f"{study.name} has no published numbers to count; {advice}")
    folder = root / study.name
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{folder} has no {FILE}; give the folder of the studies: --from results")
    rows: list[list[Any]] = []
    commands = []
    known, items = _read_cells(study, folder)
    for name, cells in items.items():
        ran = [cell for cell in cells if not cell.not_run and name in known]
        seeds = [len(cell.values) for cell in ran if not cell.exact]
        rows.append([name, min(seeds, default="–"), *_count_cells(cells, ran)])
        if name not in known or any(cell.not_run and not cell.is_impossible for cell in cells):
            commands.append(f"attnlab reproduce {study.name} --scale full --only {name}")
    totals = ["all", "", *(sum(row[place] for row in rows) for place in range(2, len(ITEM_COLUMNS)))]
    return Table(list(ITEM_COLUMNS), [*rows, totals]), commands


def _read_cells(study: Study, folder: Path) -> tuple[set[str], dict[str, list[Cell]]]:
    """Return the items with a result in the ledger, and the cells of all items that compare with the paper."""
    results = {result.config.item: result.cells for result in draw_study(study, "full", folder, save=False)}
    terms, ledger = StudyTerms("full"), Ledger(folder / FILE)
    items = {}
    for name, item in study.items.items():
        cells = results[name] if name in results else plan_cells(item, terms.configure(study, name), ledger)
        items[name] = [cell for cell in cells if cell.has_claim]
    return set(results), items


def _count_cells(cells: Sequence[Cell], ran: Sequence[Cell]) -> list[int]:
    """Return the numbers of COUNTS."""
    verdicts = [sum(cell.verdict == verdict for cell in ran) for verdict in VERDICTS[:-1]]
    official = sum(cell.group == "official" for cell in ran)
    return [len(cells), len(ran), sum(cell.is_impossible for cell in cells), official, *verdicts]


def suggest_command(study: Study, known: Iterable[str], cells: Sequence[Cell]) -> str:
    """Return the command for the first item without a result, else for the item with most cells that were not run."""
    names = [name for name in study.items if name not in set(known)]
    if not names:
        counts = {name: sum(bool(cell.not_run) for cell in cells if cell.item == name) for name in study.items}
        names = [name for name, count in sorted(counts.items(), key=lambda pair: -pair[1]) if count]
    return f"attnlab reproduce {study.name} --scale full --only {names[0]}" if names else ""
