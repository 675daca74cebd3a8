"""A study: one paper's tables and figures as items, each one function from a Setting to Findings.

To add an item: a function, and a line in its study. To add a study: a module with a STUDY, and a line in STUDIES.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

import torch
from matplotlib.figure import Figure

from attnlab.config import suggest_nearest
from attnlab.experiments.schedulers import Scheduler
from attnlab.experiments.verdicts import Cell

Scale = Literal["smoke", "small", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)
T = TypeVar("T")


def known_scale(name: str) -> Scale:
    for scale in SCALES:
        if scale == name:
            return scale
    raise ValueError(f"scale must be one of {', '.join(SCALES)}, not {name!r}")


@dataclass(frozen=True)
class Setting:
    """How an item is to be run.

    smoke   a minute for the whole study: it runs, and shows its effect        small   on a CPU, in minutes an item
    full    what the paper ran
    """

    scale: Scale
    seeds: tuple[int, ...]
    device: torch.device
    folder: Path  # the item's own: runs and vocabularies, for it to go on with after an interruption
    data_dir: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)  # of those that the item takes, what was said
    progress: Callable[[int, int, str], None] = lambda done, total, what: None
    on: Scheduler | None = None  # where runs that do not need each other go; None: one after another, here

    def at(self, *, smoke: T, small: T, full: T) -> T:
        """What goes with this scale."""
        return {"smoke": smoke, "small": small, "full": full}[self.scale]


@dataclass(frozen=True)
class Findings:
    """What came out of an item: cells, figures by name, each with what one sees in it, and remarks."""

    cells: Iterable[Cell]
    figures: Mapping[str, tuple[Figure, str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @classmethod
    def joined(cls, parts: Iterable["Findings"]) -> "Findings":
        """Those of several corpora as one, a remark of several once."""
        parts = list(parts)
        figures = {name: figure for part in parts for name, figure in part.figures.items()}
        remarks = dict.fromkeys(remark for part in parts for remark in part.remarks)
        return cls([cell for part in parts for cell in part.cells], figures, tuple(remarks))


def _seeds() -> dict[Scale, int]:
    return {"smoke": 3, "small": 3, "full": 5}


@dataclass(frozen=True)
class Item:
    """A table or figure. Scale, seeds, edition and options fix its result: with the same ones it is reused."""

    title: str
    run: Callable[[Setting], Findings]
    seeds: Mapping[Scale, int] = field(default_factory=_seeds)
    edition: int = 1  # raised when it measures something else than before
    options: tuple[str, ...] = ()  # the keys of what may be said of it as key=value


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    items: Mapping[str, Item]
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # what is no item by itself, and where it is

    def chosen(self, only: Iterable[str]) -> dict[str, Item]:
        """The items named, all where none is, in the study's order; an unknown name names the nearest."""
        names = list(only)
        for name in names:
            if name not in self.items:
                known = ", ".join(self.items)
                hint = f" ({self.elsewhere[name]})" if name in self.elsewhere else suggest_nearest(name, self.items)
                raise ValueError(f"{self.name} has no item {name!r}{hint}; there are {known}")
        return {name: item for name, item in self.items.items() if not names or name in names}

    def check_options(self, options: Iterable[str], only: Iterable[str]) -> None:
        """Refuse an option that none of these items takes."""
        known = list(dict.fromkeys(key for item in self.chosen(only).values() for key in item.options))
        for key in options:
            if key not in known:
                known = known or list(dict.fromkeys(key for item in self.items.values() for key in item.options))
                there = ", ".join(known) or "none"
                if takers := [name for name, item in self.items.items() if key in item.options]:
                    asked = ", ".join(self.chosen(only))
                    raise ValueError(f"{asked} of {self.name} has no option {key!r}; {', '.join(takers)} have it")
                raise ValueError(f"{self.name} has no option {key!r}{suggest_nearest(key, known)}; there are {there}")
