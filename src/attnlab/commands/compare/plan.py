"""What is compared: attentions in rows, all else equal, and the runs that this makes.

A row is an attention, or a control (controls.py). A key with a list makes a grid of points; every row is tried at every
point with the first seed, the point with the lowest validation loss is chosen for it, and that one is run with all
seeds. Runs of one seed see the same batches in the same order, whatever the attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, get_args, get_origin, get_type_hints

from attnlab.commands.compare.value_lists import split_list, split_options
from attnlab.config import compute_digest, parse_value, suggest_nearest
from attnlab.mechanisms import find_mechanism, read_option_types
from attnlab.training.recipe import Recipe, resolve_recipe

PARTS = ("data", "model", "training", "decoding")
OWN = ("attention", "seeds")  # keys of the comparison itself
FEWEST, USUAL = 1, 3  # seeds


@dataclass(frozen=True)
class ComparisonRow:
    """An attention as it was said, or a control; `at` has what a control says at each point of the grid."""

    label: str
    values: Mapping[str, str]
    at: tuple[Mapping[str, str], ...] = ()
    says: str = ""  # of a control: what it is

    @property
    def control(self) -> bool:
        return bool(self.says)


@dataclass(frozen=True)
class Plan:
    """The rows, of which the others are compared with the first; the points of the grid, one where there is none."""

    task: str
    rows: tuple[ComparisonRow, ...]
    points: tuple[Mapping[str, str], ...]
    seeds: tuple[int, ...]
    fixed: Mapping[str, str] = field(default_factory=dict)  # said of every row
    notes: tuple[str, ...] = ()

    def recipe(self, row: ComparisonRow, point: int, seed: int) -> Recipe:
        own = row.at[point] if row.at else {}
        return resolve_recipe(self.task, {**self.fixed, **self.points[point], **row.values, **own, "seed": str(seed)})

    @property
    def name(self) -> str:
        """Of the folder for the results: the same for the same question."""
        return f"{self.task}-{compute_digest(self, without=('notes',))}"


def planned(task: str, given: Mapping[str, str]) -> Plan:
    """The plan of a command line's keys, without controls; what is wrong with one of them is said now."""
    values = dict(given)
    if "attention" not in values:
        raise ValueError("say what is compared: attention=softmax,coda,./mine.py:Mine")
    labels = split_list(values.pop("attention"), "attention")
    count = parse_value(values.pop("seeds", str(USUAL)), int, "seeds")
    if count < FEWEST:
        raise ValueError(f"seeds must be at least {FEWEST}, not {count}; from 3 on there are intervals")
    named = {label: split_options(label) for label in labels}
    for name, _ in named.values():
        find_mechanism(name)
    lists = {key: split_list(text, key) for key, text in values.items()}
    base = resolve_recipe(task, {key: given[key] for key in ("model",) if key in given})
    options = {label: set(read_option_types(name)) for label, (name, _) in named.items()}
    _check_keys(task, lists, base, set().union(*options.values()))
    known = _fields(base)
    for label, (_, own) in named.items():
        if key := next((key for key in own if known.get(key) == "data" or key in ("seed", "model")), None):
            raise ValueError(f"attention={label}: {key} must be the same for all; say it outside the parentheses")
        if key := next((key for key in own if len(lists.get(key, ())) > 1), None):
            raise ValueError(
                f"attention={label}: {key} is also a grid, {key}={','.join(lists[key])}; say one of the two"
            )
    single = {key: parts[0] for key, parts in lists.items() if len(parts) == 1}
    shared = {key: text for key, text in single.items() if key in known or key == "model"}
    rows = tuple(
        ComparisonRow(
            label,
            {"attention": name} | {key: x for key, x in single.items() if key in options[label] - known.keys()} | own,
        )
        for label, (name, own) in named.items()
    )
    grid = {key: parts for key, parts in lists.items() if len(parts) > 1}
    points = tuple(dict(zip(grid, point, strict=True)) for point in product(*grid.values()))
    first = parse_value(shared.pop("seed"), int, "seed") if "seed" in shared else base.training.seed
    plan = Plan(task, rows, points, tuple(range(first, first + count)), shared)
    for row, point in product(rows, range(len(points))):
        plan.recipe(row, point, first)  # what is wrong with a value is said before anything is trained
    return plan


def _check_keys(task: str, lists: Mapping[str, Sequence[str]], base: Recipe, options: set[str]) -> None:
    """Refuse keys that nobody has, and lists that make no fair grid."""
    owners = _fields(base)
    for key, parts in lists.items():
        if key not in owners and key not in options and key != "model":
            there = [*OWN, "model", *owners, *options]
            raise ValueError(f"unknown key {key!r}{suggest_nearest(key, there)}; attnlab list {task} lists them")
        if len(parts) == 1:
            continue
        text = f"{key}={','.join(parts)}"
        bare = not all(part.startswith("(") for part in parts)
        if key in owners and bare and _takes_several(getattr(base, owners[key]), key):
            raise ValueError(f"{text}: one value of {key} has commas of its own: put it in parentheses, {key}=(…)")
        if key not in owners and key in options:
            raise ValueError(f"{text}: an option of some attentions would give them more trials than others; "
                             f"make rows of it, attention=NAME({key}={parts[0]}),NAME({key}={parts[1]})")  # fmt: skip
        if key == "seed":
            raise ValueError(f"{text}: say how many, seeds={len(parts)}; seed= is the first of them")
        if key == "model" or owners[key] in ("data", "decoding"):
            raise ValueError(
                f"{text}: a grid is chosen by validation loss, which {key} makes another thing or leaves as it is; "
                'compare one after another, or put a value with a comma in double quotes'
            )  # fmt: skip


def said(settings: Mapping[str, str]) -> str:
    """As on the command line."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _fields(base: Recipe) -> dict[str, str]:
    """The part of a recipe that each key belongs to."""
    found: dict[str, str] = {}
    for part in PARTS:
        for each in fields(getattr(base, part)):
            found.setdefault(each.name, part)
    return found


def _takes_several(config: Any, key: str) -> bool:
    hint = get_type_hints(type(config))[key]
    return any(get_origin(kind) is tuple for kind in (hint, *get_args(hint)))
