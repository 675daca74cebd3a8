"""Run a study's items and write what came out: each item once, its result in a file of its own.

    OUT/items/ITEM-DIGEST.json    cells, remarks and where they were measured; the digest is of all that fixes them
    OUT/figures/ITEM-DIGEST-NAME.png
    OUT/work/ITEM-DIGEST/         what an item keeps to go on after an interruption
    OUT/results.json, cells.csv, report.html    of all items that OUT holds of one scale

An item whose file is there is not run again. Every file is written whole or not at all, an item's JSON last.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from attnlab.config import compute_digest
from attnlab.experiments.schedulers import Scheduler
from attnlab.experiments.study import Findings, Item, Scale, Setting, Study
from attnlab.experiments.verdicts import Cell
from attnlab.files import write_bytes
from attnlab.provenance import collect_provenance
from attnlab.report.figures import render_files

FORMAT = "attnlab-study-1"


@dataclass(frozen=True)
class ItemConfig:
    """What fixes an item's result."""

    study: str
    item: str
    scale: Scale
    seeds: tuple[int, ...]
    edition: int
    options: dict[str, str] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        return f"{self.item}-{compute_digest(self, without=() if self.options else ('options',))}"


@dataclass(frozen=True)
class ItemResult:
    """A finished item, as its file has it."""

    config: ItemConfig
    title: str
    cells: tuple[Cell, ...]
    figures: tuple[tuple[str, str], ...]  # file, what one sees in it
    remarks: tuple[str, ...]
    about: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "config": vars(self.config),
            "title": self.title,
            "about": self.about,
            "remarks": self.remarks,
            "figures": self.figures,
            "cells": [cell.as_json() for cell in self.cells],
        }

    @classmethod
    def read(cls, path: Path) -> "ItemResult":
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            config = ItemConfig(**stored["config"] | {"seeds": tuple(stored["config"]["seeds"])})
            cells = tuple(Cell.from_json(cell) for cell in stored["cells"])
            figures = tuple((file, says) for file, says in stored["figures"])
            return cls(config, stored["title"], cells, figures, tuple(stored["remarks"]), stored["about"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not the result of an item ({error!r}); delete it, and it is made again"
            ) from None


@dataclass(frozen=True)
class StudyTerms:
    """How a study is to be run; seeds None: as many as each item says."""

    scale: Scale
    device: torch.device
    seeds: int | None = None
    data_dir: str | None = None
    command: str = ""
    options: dict[str, str] = field(default_factory=dict)
    on: Scheduler | None = None  # where runs go that do not need each other; None: one after another, here

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, not {self.seeds}")

    def config(self, study: Study, name: str) -> ItemConfig:
        item = study.items[name]
        count = item.seeds[self.scale] if self.seeds is None else self.seeds
        options = {key: value for key, value in self.options.items() if key in item.options}
        return ItemConfig(study.name, name, self.scale, tuple(range(count)), item.edition, options)


def reproduce(
    study: Study,
    terms: StudyTerms,
    out: Path,
    *,
    only: Iterable[str] = (),
    again: bool = False,
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[ItemResult]:
    """Run the items asked for that are not there yet, or again; every outcome of the folder, in the study's order."""
    items = study.chosen(only := tuple(only))
    study.check_options(terms.options, only)
    if out.is_file():
        raise ValueError(f"--out {out} is a file; give a folder")
    (out / "items").mkdir(parents=True, exist_ok=True)
    asked: dict[str, ItemResult] = {}
    for name, item in items.items():
        config = terms.config(study, name)
        path = out / "items" / f"{config.stem}.json"
        if path.exists() and not again:
            asked[name] = ItemResult.read(path)
            note(f"{name}: already there, not run again")
            continue
        asked[name] = _run(item, config, terms, out, progress)
        write_bytes(path, _json(asked[name].as_json()))
        note(f"{name}: done in {asked[name].about['wall_s']:.0f} s")
    for name in study.items.keys() - asked.keys():
        if found := _newest(out, name, terms.scale):
            asked[name] = found
    return [asked[name] for name in study.items if name in asked]


def _run(
    item: Item, config: ItemConfig, terms: StudyTerms, out: Path, progress: Callable[[int, int, str], None]
) -> ItemResult:
    begun, clock = datetime.now(UTC), time.perf_counter()
    folder = out / "work" / config.stem
    setting = Setting(
        config.scale, config.seeds, terms.device, folder, terms.data_dir, config.options, progress, terms.on
    )
    findings = item.run(setting)
    about: dict[str, Any] = {"command": terms.command, "begun": begun.isoformat(timespec="seconds")}
    about |= {"wall_s": round(time.perf_counter() - clock, 1)} | collect_provenance(terms.device)
    return ItemResult(
        config, item.title, _own_cells(findings, config.item), _draw(findings, config, out), findings.remarks, about
    )


def _own_cells(findings: Findings, name: str) -> tuple[Cell, ...]:
    """The cells of an item, each of its own place."""
    cells = tuple(findings.cells)
    if not cells:
        raise ValueError(f"the item {name} has no cell")
    places = set()
    for cell in cells:
        if cell.item != name or str(cell) in places:
            raise ValueError(f"the item {name} has the cell ({cell}) of another item, or twice")
        places.add(str(cell))
    return cells


def _draw(findings: Findings, config: ItemConfig, out: Path) -> tuple[tuple[str, str], ...]:
    files = []
    for name, (figure, says) in findings.figures.items():
        stem = f"figures/{config.stem}-{name}"
        for suffix, drawn in render_files(figure).items():
            write_bytes(out / f"{stem}{suffix}", drawn)
        files.append((f"{stem}.png", says))
    return tuple(files)


def _newest(out: Path, name: str, scale: Scale) -> ItemResult | None:
    """The latest result at this scale of an item that was not asked for now."""
    found = [ItemResult.read(path) for path in (out / "items").glob(f"{name}-{'[0-9a-f]' * 12}.json")]
    same = [outcome for outcome in found if outcome.config.scale == scale]
    return max(same, key=lambda outcome: outcome.about["begun"], default=None)


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
