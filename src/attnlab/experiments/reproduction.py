"""Run a study's items, and draw them again from the ledger alone.

    OUT/ledger.jsonl            every measured run, and a row for each item that was completed
    OUT/SCALE/cells.csv, report.html, figures/ITEM-NAME.png
    OUT/work/                   runs, vocabularies and populations, to resume after an interruption

An item is a pure function of the ledger. What it asks for and the ledger lacks is run first (engine.py).
"""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from attnlab.config import check_fields
from attnlab.experiments.deadline import Deadline, OutOfTimeError
from attnlab.experiments.engine import Progress, RowReader, complete
from attnlab.experiments.jobs import Scheduler
from attnlab.experiments.ledger import FILE, Ledger, Row
from attnlab.experiments.plan import Workplace
from attnlab.experiments.study import Findings, Item, Scale, Setting, Study
from attnlab.experiments.verdicts import Cell, correct_claims
from attnlab.files import write_bytes
from attnlab.provenance import collect_provenance
from attnlab.report.figures import render_files

ITEM = "item"  # the measure of rows that say with which seeds and options an item was completed
OLD_CELLS = "item cells"  # the measure of rows that hold the cells of an item from before there was a ledger
CELLS_ONLY = "The ledger has only the cell values of this item, because its runs are older than the ledger."
LISTS = ("data", "attention", "form")  # options that select rows of a table


@dataclass(frozen=True)
class ItemConfig:
    """What an item was run with."""

    study: str
    item: str
    scale: Scale
    seeds: tuple[int, ...]
    edition: int
    options: dict[str, str] = field(default_factory=dict)

    def as_recipe(self) -> dict[str, Any]:
        return {"study": self.study, "item": self.item, "scale": self.scale, "seeds": list(self.seeds),
                "options": self.options}  # fmt: skip


@dataclass(frozen=True)
class ItemResult:
    """An item as its page shows it."""

    config: ItemConfig
    title: str
    cells: tuple[Cell, ...]
    figures: tuple[tuple[str, str], ...]  # file below OUT/SCALE, caption
    remarks: tuple[str, ...]
    about: dict[str, Any]


@dataclass(frozen=True)
class StudyTerms:
    """How a study is run; seeds None: as many as each item wants."""

    scale: Scale
    device: str = "cpu"
    seeds: int | None = None
    data_dir: str | None = None
    command: str = ""
    options: dict[str, str] = field(default_factory=dict)
    until: Deadline | None = None
    again: bool = False  # measure again what the ledger has
    population: bool = True  # whether to train runs as one on a GPU

    def __post_init__(self) -> None:
        check_fields(self)

    def configure(self, study: Study, name: str) -> ItemConfig:
        item = study.items[name]
        count = item.seeds[self.scale] if self.seeds is None else self.seeds
        options = {key: value for key, value in self.options.items() if key in item.options}
        return ItemConfig(study.name, name, self.scale, tuple(range(count)), item.edition, options)


def reproduce(
    study: Study,
    terms: StudyTerms,
    out: Path,
    on: Scheduler,
    *,
    only: Iterable[str] = (),
    note: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total, what: None,
) -> list[ItemResult]:
    """Run what the asked items need and the ledger lacks; return every item that the ledger has at this scale."""
    items = study.select_items(only := tuple(only))
    study.check_options(terms.options, only)
    if out.is_file():
        raise ValueError(f"--out {out} is a file; give a folder")
    place = Workplace.at(
        out, device=terms.device, data_dir=terms.data_dir, command=terms.command, population=terms.population
    )
    results: dict[str, ItemResult] = {}
    reader = RowReader(place.open_ledger(), running=True, again=terms.again)
    for name, item in items.items():
        config, clock, began = terms.configure(study, name), time.perf_counter(), datetime.now(UTC)
        function = partial(_run_item, item, config, place)
        try:
            findings = complete(function, place, on, reader=reader, progress=progress, until=terms.until)
        except OutOfTimeError as error:
            later = [other for other in items if other not in results and other != name]
            more = f"; items not begun: {', '.join(later)}" if later else ""
            raise OutOfTimeError(f"{name}: {error}{more}") from None
        about: dict[str, Any] = {"command": terms.command, "began": began.isoformat(timespec="seconds")}
        about |= collect_provenance(torch.device(terms.device))
        seconds = round(time.perf_counter() - clock, 1)
        row = Row(recipe=config.as_recipe(), seed=None, measure=ITEM, edition=item.edition,
                  values={"completed": True}, wall_s=seconds, provenance=about)  # fmt: skip
        before = place.open_ledger().find(row.key)  # drawn again, an item keeps the time of its first completion
        facts = {**(before or row).provenance, "wall_s": (before or row).wall_s}
        results[name] = _finish(findings, config, item, out, facts)
        if before is None:
            place.open_ledger().append(row)
        note(f"{name}: done in {seconds:.0f} s")
    for run, reason in reader.failures.items():
        note(f"{run} failed: {reason}")
    others = [name for name in study.items if name not in results]
    results |= {result.config.item: result for result in draw_study(study, terms.scale, out, only=others)}
    return correct_results([results[name] for name in study.items if name in results])


def _run_item(item: Item, config: ItemConfig, place: Workplace, rows: RowReader) -> Findings:
    return item.run(Setting(config.scale, config.seeds, place, rows, config.options))


def draw_study(
    study: Study,
    scale: Scale,
    out: Path,
    *,
    ledger: Path | None = None,
    only: Iterable[str] | None = None,
    save: bool = True,
) -> list[ItemResult]:
    """Return the items that a ledger has at a scale, in the study's order. Nothing is trained and no data are read.

    save   write their figures below OUT/SCALE
    """
    rows = Ledger(ledger or out / FILE)
    results = []
    for name in study.items if only is None else only:
        known = [row for row in rows.rows() if _is_of(row, study, name, scale)]
        completed = [row for row in known if row.edition == study.items[name].edition]
        if completed:
            results.append(_draw_item(study, name, completed, rows, out, save=save))
        elif known:
            editions = ", ".join(str(row.edition) for row in known)
            warnings.warn(
                f"{rows.path}: {name} has edition {editions}, this version draws edition {study.items[name].edition}; "
                "its rows stay and are not drawn", stacklevel=2,
            )  # fmt: skip
    return correct_results(results)


def correct_results(results: Sequence[ItemResult]) -> list[ItemResult]:
    """Return the items of a study, with the contrasts of all of them as one family of claims."""
    cells = iter(correct_claims(cell for result in results for cell in result.cells))
    return [replace(result, cells=tuple(islice(cells, len(result.cells)))) for result in results]


def list_scales(study: Study, ledger: Path) -> list[Scale]:
    """Return the scales at which a ledger has items of a study."""
    rows = [
        row for row in Ledger(ledger).rows() if row.measure in (ITEM, OLD_CELLS) and row.recipe["study"] == study.name
    ]
    return list(dict.fromkeys(row.recipe["scale"] for row in rows))


def _is_of(row: Row, study: Study, name: str, scale: Scale) -> bool:
    same = {"study": study.name, "item": name, "scale": scale}
    return row.measure in (ITEM, OLD_CELLS) and same.items() <= row.recipe.items()


def _draw_item(
    study: Study, name: str, completed: Sequence[Row], ledger: Ledger, out: Path, *, save: bool
) -> ItemResult:
    """Draw an item with the seeds and options of all its rows; cells that only survive as values fill the gaps."""
    newest, item = completed[-1], study.items[name]
    seeds = tuple(sorted({seed for row in completed for seed in row.recipe["seeds"]}))
    options = _join_options([row.recipe["options"] for row in completed])
    config = ItemConfig(study.name, name, newest.recipe["scale"], seeds, item.edition, options)
    about = dict(newest.provenance) | {"wall_s": newest.wall_s}
    old = [row for row in completed if row.measure == OLD_CELLS]
    drawn = None
    if len(old) < len(completed):
        findings = _run_item(item, config, Workplace.at(out), RowReader(ledger, running=False))
        drawn = _finish(findings, config, item, out, about, save=save)
        if not old:
            return drawn
    values = old[-1].values
    planned = drawn.cells if drawn else plan_cells(item, config, ledger)
    cells = _restate_claims([Cell.from_json(cell) for cell in values["cells"]], planned)
    figures = tuple((file, caption) for file, caption in values["figures"])
    if drawn is None:
        remarks = (*values["remarks"], CELLS_ONLY)
        return ItemResult(config, item.title, cells, figures, remarks, about)
    return replace(drawn, cells=_fill_cells(drawn.cells, cells), figures=(*drawn.figures, *figures))


def plan_cells(item: Item, config: ItemConfig, ledger: Ledger) -> tuple[Cell, ...]:
    """Return the cells that an item would have without new runs; none if they are known only from its rows."""
    try:
        return tuple(_run_item(item, config, Workplace.at(ledger.path.parent), RowReader(ledger, running=False)).cells)
    except ValueError:
        return ()


def _restate_claims(stored: Sequence[Cell], planned: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return stored cells with what this version knows of the paper; only their values are of their time."""
    by_place = {str(cell): cell for cell in planned}
    pairs = [(cell, by_place.get(str(cell), cell)) for cell in stored]
    return tuple(now if cell.not_run and now.is_impossible else cell.restate(now) for cell, now in pairs)


def _fill_cells(drawn: Sequence[Cell], old: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return the drawn cells, with old values where a cell was not run, and old cells that are not drawn any more."""
    by_place = {str(cell): cell for cell in old if cell.values}
    filled = [by_place.get(str(cell), cell) if cell.not_run else cell for cell in drawn]
    known = {str(cell) for cell in drawn}
    return (*filled, *(cell for place, cell in by_place.items() if place not in known))


def _join_options(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the options that cover all rows: the union of lists, else the newest."""
    joined: dict[str, str] = {}
    for key in dict.fromkeys(key for options in each for key in options):
        if key not in LISTS:
            joined[key] = next(options[key] for options in reversed(each) if key in options)
        elif all(key in options for options in each):
            joined[key] = ",".join(dict.fromkeys(name for options in each for name in options[key].split(",")))
    return joined


def _finish(
    findings: Findings, config: ItemConfig, item: Item, out: Path, about: dict[str, Any], *, save: bool = True
) -> ItemResult:
    """Check the cells and write the figures."""
    cells = tuple(findings.cells)
    if not cells:
        raise ValueError(f"the item {config.item} has no cell")
    places = set()
    for cell in cells:
        if cell.item != config.item or str(cell) in places:
            raise ValueError(f"the item {config.item} has a cell of another item, or twice: {cell}")
        places.add(str(cell))
    files = []
    for name, (figure, caption) in findings.figures.items() if save else ():
        stem = f"figures/{config.item}-{name}"
        for suffix, data in render_files(figure).items():
            write_bytes(out / config.scale / f"{stem}{suffix}", data)
        files.append((f"{stem}.png", caption))
    return ItemResult(config, item.title, cells, tuple(files), findings.remarks, about)
