"""`attnlab reproduce`: run a paper's items, draw them from a ledger, or show what is left."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlab.config import split_pairs
from attnlab.experiments.deadline import Deadline, stop_at_deadline
from attnlab.experiments.ledger import FILE
from attnlab.experiments.reproduction import ItemResult, StudyTerms, draw_study, list_scales, reproduce
from attnlab.experiments.schedulers import open_scheduler
from attnlab.experiments.status import tabulate_items, tabulate_status
from attnlab.experiments.study import Scale, Study, parse_scale
from attnlab.experiments.study_findings import list_findings
from attnlab.experiments.study_page import (
    drop_constant_column,
    tabulate_clearest,
    tabulate_result,
    tabulate_verdicts,
    tabulate_wide,
    write_study,
)
from attnlab.report.page import Table
from attnlab.studies import STUDIES, open_study
from attnlab.terminal import Bar, command_line, show_table

ROOT = Path("results")


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    only: Sequence[str] = ()
    scale: str | None = None
    device: str = "auto"
    seeds: int | None = None
    out: Path | None = None
    data_dir: str | None = None
    again: bool = False
    on: str = "local"
    jobs: int | None = None
    until: str | None = None
    table: bool = False  # print every cell
    population: bool = True


def show_status(name: str | None, root: Path) -> None:
    """Print how much of each paper, or of each item of one, is run, and the commands for what is next."""
    if name is None:
        table, commands = tabulate_status([open_study(each) for each in STUDIES], root)
        subject = "published numbers"
    else:
        table, commands = tabulate_items(open_study(name), root)
        subject = f"items of {name}"
    _print_table(f"{subject} in {root}/, at full scale", table)
    for command in commands:
        print(f"next: {command}")


def draw_again(name: str, source: Path, request: Request) -> None:
    """Draw every table, figure and page of a study from a ledger; train nothing."""
    study = open_study(name)
    ledger = source / FILE if source.is_dir() else source
    if not ledger.is_file():
        raise FileNotFoundError(f"--from {source}: no {FILE} there")
    out = request.out or ledger.parent
    scales: list[Scale] = [parse_scale(request.scale)] if request.scale else list_scales(study, ledger)
    if not scales:
        raise ValueError(f"{ledger} has no completed item of {name}; attnlab ledger show lists its rows")
    for scale in scales:
        results, names = draw_study(study, scale, out, ledger=ledger), list(study.select_items(request.only))
        if not any(result.config.item in names for result in results):
            known = ", ".join(result.config.item for result in results) or "nothing"
            raise ValueError(f"{ledger} has no completed {' or '.join(names)} at scale {scale}; it has {known}")
        report = write_study(study, scale, results, out)
        _show_results(study, scale, results, names, table=request.table)
        print(f"report: {report}")


def run_study(name: str, settings: Sequence[str], request: Request) -> None:
    """Run what the ledger lacks, then print and write the results."""
    study, scale = open_study(name), parse_scale(request.scale or "smoke")
    out = request.out or ROOT / study.name
    until = Deadline.parse_optional(request.until)
    with stop_at_deadline(command_line()), open_scheduler(request.on, jobs=request.jobs, device=request.device) as on:
        terms = StudyTerms(
            scale, on.device, request.seeds, request.data_dir, _write_command(name, settings, request, scale),
            split_pairs(settings), until, request.again, request.population,
        )  # fmt: skip
        with Bar(1) as bar:
            results = reproduce(study, terms, out, on, only=request.only, note=bar.note, progress=bar.tick)
    report = write_study(study, scale, results, out)
    _show_results(study, scale, results, list(study.select_items(request.only)), table=request.table)
    print(f"report: {report}")


def _show_results(
    study: Study, scale: Scale, results: Sequence[ItemResult], names: Sequence[str], *, table: bool
) -> None:
    """Print the findings, the counts of verdicts and the clearest cells of the asked items; with table, every cell."""
    asked = [result for result in results if result.config.item in names]
    if not study.from_paper:
        for one in asked:
            _print_table(f"{one.title}, scale {scale}", tabulate_wide(one.cells))
            print("\n".join(one.remarks))
        print("\n".join(list_findings(asked)))
        return
    cells = [cell for result in asked for cell in result.cells]
    if table:
        for title, each in (drop_constant_column(one.title, tabulate_result(one.cells)) for one in asked):
            _print_table(title, each)
    elif clearest := [part for part in tabulate_clearest(cells) if isinstance(part, Table)]:
        _print_table("the clearest cells; --table prints all", clearest[0])
    _print_table(f"{study.name} at scale {scale}", tabulate_verdicts(cells))
    print("\n".join(list_findings(asked)))


def _print_table(title: str, table: Table) -> None:
    show_table(title, list(table.columns), [list(row) for row in table.rows])


def _write_command(name: str, settings: Sequence[str], request: Request, scale: Scale) -> str:
    """Return the command without what does not change the values."""
    options = {"seeds": request.seeds, "out": request.out, "data-dir": request.data_dir}
    words = ["attnlab", "reproduce", name, *settings, *(f"--only={item}" for item in request.only), f"--scale={scale}"]
    return shlex.join([*words, *(f"--{key}={value}" for key, value in options.items() if value is not None)])
