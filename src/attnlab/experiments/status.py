"""How much of each paper is published, implemented, run and decided, from the ledgers alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnlab.experiments.ledger import FILE, Ledger
from attnlab.experiments.reproduction import StudyTerms, draw_study, plan_cells
from attnlab.experiments.study import Study
from attnlab.experiments.verdicts import VERDICTS, Cell, list_numbers
from attnlab.report.page import Table

COLUMNS = ("study", "numbers", "measured", "cells", "run", "impossible", "official", *VERDICTS[:-1])


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
    terms = StudyTerms("full")
    for study in studies:
        folder = root / study.name
        if not (folder / FILE).is_file():
            commands.append(suggest_command(study, (), ()))
            continue
        results = {result.config.item: result.cells for result in draw_study(study, "full", folder, save=False)}
        ledger = Ledger(folder / FILE)
        absent = {
            name: plan_cells(item, terms.configure(study, name), ledger)
            for name, item in study.items.items()
            if name not in results
        }
        cells = [cell for some in (*results.values(), *absent.values()) for cell in some if cell.has_claim]
        ran = [cell for some in results.values() for cell in some if cell.has_claim and not cell.not_run]
        numbers = len(list_numbers(cells)) + sum(study.unimplemented.values())
        verdicts = [sum(cell.verdict == verdict for cell in ran) for verdict in VERDICTS[:-1]]
        official = sum(cell.group == "official" for cell in ran)
        impossible = sum(cell.is_impossible for cell in cells)
        counts = [numbers, len(list_numbers(ran)), len(cells), len(ran), impossible, official]
        rows.append([study.name, *counts, *verdicts])
        if command := suggest_command(study, results.keys(), cells):
            commands.append(command)
    totals = ["all", *(sum(row[place] for row in rows) for place in range(1, len(COLUMNS)))]
    return Table(list(COLUMNS), [*rows, totals]), commands


def suggest_command(study: Study, known: Iterable[str], cells: Sequence[Cell]) -> str:
    """Return the command for the first item without a result, else for the item with most cells that were not run."""
    names = [name for name in study.items if name not in set(known)]
    if not names:
        counts = {name: sum(bool(cell.not_run) for cell in cells if cell.item == name) for name in study.items}
        names = [name for name, count in sorted(counts.items(), key=lambda pair: -pair[1]) if count]
    return f"attnlab reproduce {study.name} --scale full --only {names[0]}" if names else ""
