"""A study: one paper's tables and figures as items, each a function from a Setting to Findings.

An item reads measured runs from the ledger: `setting.rows.read_plan(plan)`. To add an item: a function, and a line in
its study. To add a study: a module with a STUDY, and a line in STUDIES.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from matplotlib.figure import Figure

from attnlab.config import suggest_nearest
from attnlab.experiments.engine import RowReader
from attnlab.experiments.plan import Workplace
from attnlab.experiments.verdicts import Cell

Scale = Literal["smoke", "small", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)
T = TypeVar("T")


def parse_scale(name: str) -> Scale:
    for scale in SCALES:
        if scale == name:
            return scale
    raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {name!r}")


@dataclass(frozen=True)
class Setting:
    """How an item is run.

    smoke   about a minute for the whole study: it runs and shows its effect        small   minutes per item on a CPU
    full    what the paper ran
    """

    scale: Scale
    seeds: tuple[int, ...]
    place: Workplace
    rows: RowReader
    options: Mapping[str, str] = field(default_factory=dict)  # the options that the item takes and the user gave

    @property
    def folder(self) -> Path:
        """Where runs and vocabularies are kept."""
        return self.place.folder

    @property
    def running(self) -> bool:
        """Whether missing rows may be measured now; else the item only draws what the ledger has."""
        return self.rows.running

    @property
    def tags(self) -> tuple[str, ...]:
        """The tag of a cell that was not run at full scale."""
        return () if self.scale == "full" else ("smaller scale",)

    def at(self, *, smoke: T, small: T, full: T) -> T:
        """Return the value for this scale."""
        return {"smoke": smoke, "small": small, "full": full}[self.scale]


@dataclass(frozen=True)
class Findings:
    """The result of an item: cells, figures by name with their captions, and remarks."""

    cells: Iterable[Cell]
    figures: Mapping[str, tuple[Figure, str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @classmethod
    def join(cls, parts: Iterable["Findings"]) -> "Findings":
        """Join the findings of several corpora; a remark that they share is kept once."""
        parts = list(parts)
        figures = {name: figure for part in parts for name, figure in part.figures.items()}
        remarks = dict.fromkeys(remark for part in parts for remark in part.remarks)
        return cls([cell for part in parts for cell in part.cells], figures, tuple(remarks))


def _default_seeds() -> dict[Scale, int]:
    return {"smoke": 3, "small": 3, "full": 5}


@dataclass(frozen=True)
class Item:
    """A table or figure."""

    title: str
    run: Callable[[Setting], Findings]
    seeds: Mapping[Scale, int] = field(default_factory=_default_seeds)
    edition: int = 1  # raised when its cells mean something else than before
    options: tuple[str, ...] = ()  # keys that it takes as key=value


@dataclass(frozen=True)
class Study:
    """A paper, or a question of our own: its items, and where to find what is not an item."""

    name: str
    title: str
    items: Mapping[str, Item]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    unimplemented: Mapping[str, int] = field(default_factory=dict)  # published numbers without a cell, by reason
    from_paper: bool = True  # False: a study of attnlab's own, whose cells have nothing published beside them

    def select_items(self, only: Iterable[str]) -> dict[str, Item]:
        """Return the named items in the study's order, or all of them; an unknown name suggests the nearest."""
        names = list(only)
        for name in names:
            if name not in self.items:
                known = ", ".join(self.items)
                hint = f" ({self.elsewhere[name]})" if name in self.elsewhere else suggest_nearest(name, self.items)
                raise ValueError(f"{self.name} has no item {name!r}{hint}; available: {known}")
        return {name: item for name, item in self.items.items() if not names or name in names}

    def check_options(self, options: Iterable[str], only: Iterable[str]) -> None:
        """Refuse an option that none of these items takes."""
        known = list(dict.fromkeys(key for item in self.select_items(only).values() for key in item.options))
        for key in options:
            if key not in known:
                known = known or list(dict.fromkeys(key for item in self.items.values() for key in item.options))
                if takers := [name for name, item in self.items.items() if key in item.options]:
                    asked = ", ".join(self.select_items(only))
                    raise ValueError(f"{asked} of {self.name} has no option {key!r}; {', '.join(takers)} have it")
                there = ", ".join(known) or "none"
                raise ValueError(f"{self.name} has no option {key!r}{suggest_nearest(key, known)}; available: {there}")
