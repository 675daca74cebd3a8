"""What is compared: attentions in rows with everything else equal, and the runs that follow from it.

A row is an attention or a control (controls.py). Keys with a list of values make a grid. Every row is tried at every
point of the grid with the first seed; the point with the lowest validation loss is then run with all seeds. Runs of one
seed see the same batches in the same order, whatever the attention.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, get_args, get_origin, get_type_hints

from attnlab.config import compute_digest, parse_value, split_list, suggest_nearest
from attnlab.mechanisms import MECHANISMS, read_option_types
from attnlab.mechanisms.per_layer import split_options
from attnlab.training.recipe import Recipe, resolve_recipe

PARTS = ("data", "model", "training", "decoding")
SEEDS = 3  # by default
PLAN_KEYS = ("effect", "measure")  # of --plan


@dataclass(frozen=True)
class ComparisonRow:
    """An attention as the user names it, or a control."""

    label: str
    settings: Mapping[str, str]
    by_point: tuple[Mapping[str, str], ...] = ()  # of a control: its settings at each point of the grid
    description: str = ""  # of a control

    @property
    def is_control(self) -> bool:
        return bool(self.description)


@dataclass(frozen=True)
class Plan:
    """Rows that are compared with the first of them, points of the grid (one if there is no grid), and seeds."""

    task: str
    rows: tuple[ComparisonRow, ...]
    points: tuple[Mapping[str, str], ...]
    seeds: tuple[int, ...]
    shared: Mapping[str, str] = field(default_factory=dict)  # settings of every row
    notes: tuple[str, ...] = ()

    def recipe(self, row: ComparisonRow, point: int, seed: int | None = None) -> Recipe:
        """Return the recipe of a run, by default with the first seed."""
        settings = {
            **self.shared,
            **self.points[point],
            **row.settings,
            **(row.by_point[point] if row.by_point else {}),
        }
        return resolve_recipe(self.task, {**settings, "seed": str(self.seeds[0] if seed is None else seed)})

    @property
    def name(self) -> str:
        """Name of the folder for the results: the same for the same question."""
        return f"{self.task.rpartition(':')[2]}-{compute_digest(self, without=('notes',))}"


def plan_comparison(task: str, given: Mapping[str, str]) -> Plan:
    """Return the plan of the command line's keys, without controls; ValueError for a bad key or value."""
    values = dict(given)
    if "attention" not in values:
        raise ValueError("attention= is missing: name what to compare, such as attention=softmax,coda,./mine.py:Mine")
    labels = _expand_all(split_list(values.pop("attention"), "attention"))
    count = parse_value(values.pop("seeds", str(SEEDS)), int, "seeds")
    if count < 1:
        raise ValueError(f"seeds must be at least 1, got {count}; intervals need 3 or more")
    lists = {key: split_list(text, key) for key, text in values.items()}
    named = {label: _read_label(label, labels) for label in labels}
    options = {label: set(read_option_types(name)) for label, (name, _) in named.items()}
    base = resolve_recipe(task, {"model": given["model"]} if "model" in given else {})
    owners = {each.name: part for part in reversed(PARTS) for each in fields(getattr(base, part))}
    for key, parts in lists.items():
        if key not in owners and key not in set().union(*options.values()) and key != "model":
            if key in PLAN_KEYS:
                raise ValueError(f"{key}= belongs to --plan, such as attnlab compare {task} … --plan effect=0.5")
            nearest = suggest_nearest(key, ["attention", "seeds", "model", *owners, *set().union(*options.values())])
            raise ValueError(f"unknown key {key!r}{nearest}; attnlab list {task} lists all keys")
        if len(parts) > 1:
            _check_grid(key, parts, owners.get(key, ""), base)
    for label, (_, own) in named.items():
        _check_options(label, own, owners, lists)
    single = {key: parts[0] for key, parts in lists.items() if len(parts) == 1}
    rows = []
    for label, (name, own) in named.items():
        taken = {key: text for key, text in single.items() if key in options[label] and key not in owners}
        rows.append(ComparisonRow(label, {"attention": name} | taken | own))
    grid = {key: parts for key, parts in lists.items() if len(parts) > 1}
    points = tuple(dict(zip(grid, point, strict=True)) for point in product(*grid.values()))
    shared = {key: text for key, text in single.items() if key in owners or key == "model"}
    first = parse_value(shared.pop("seed"), int, "seed") if "seed" in shared else base.training.seed
    plan = Plan(task, tuple(rows), points, tuple(range(first, first + count)), shared)
    for row, point in product(rows, range(len(points))):
        plan.recipe(row, point)  # refuses a bad value before anything is trained
    return plan


def _expand_all(labels: Sequence[str]) -> list[str]:
    """Return the labels with every mechanism of the lab, softmax first, in the place of `all`."""
    every = sorted(MECHANISMS, key=lambda name: name != "softmax")  # a stable sort keeps the order of the registry
    return list(dict.fromkeys(name for label in labels for name in (every if label == "all" else [label])))


def _read_label(label: str, labels: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the attention of a label and its options; those of a per-layer text stay in the text."""
    if label.startswith(("{", "(")):
        return (label[1:-1] if label.startswith("(") and label.endswith(")") else label), {}
    if re.search(r"\*\d*$", label):
        advice = f"write ({','.join(labels)}) for one model with different layers, or ({label}) for one row"
        raise ValueError(f"attention={','.join(labels)}: a comma separates rows of the comparison; {advice}")
    attention = split_options(label)
    return attention.name, dict(attention.options)


def _check_grid(key: str, parts: Sequence[str], owner: str, base: Recipe) -> None:
    """Refuse a list that does not make a fair grid."""
    text = f"{key}={','.join(parts)}"
    if owner and not all(part.startswith("(") for part in parts) and _is_tuple(getattr(base, owner), key):
        raise ValueError(f"{text}: a value of {key} contains commas; put it in parentheses, {key}=(…)")
    if not owner and key != "model":
        rows = ",".join(f"NAME({key}={part})" for part in parts[:2])
        raise ValueError(f"{text}: a grid over an option would give some attentions more trials; use attention={rows}")
    if key == "seed":
        raise ValueError(f"{text}: give the number of seeds, --seeds {len(parts)}; seed= is the first of them")
    if key == "model" or owner in ("data", "decoding"):
        raise ValueError(
            f"{text}: validation loss cannot choose a value of {key}; run one comparison for each value, or put a "
            "value that contains a comma in double quotes"
        )


def _check_options(
    label: str, own: Mapping[str, str], owners: Mapping[str, str], lists: Mapping[str, Sequence[str]]
) -> None:
    """Refuse options of one row that all rows must share, or that are also a grid."""
    for key in own:
        if owners.get(key) == "data" or key in ("seed", "model"):
            raise ValueError(f"attention={label}: {key} must be the same for all rows; move it out of the parentheses")
        if len(lists.get(key, ())) > 1:
            raise ValueError(
                f"attention={label}: {key} is also a grid, {key}={','.join(lists[key])}; remove one of them"
            )


def _is_tuple(config: Any, key: str) -> bool:
    hint = get_type_hints(type(config))[key]
    return any(get_origin(kind) is tuple for kind in (hint, *get_args(hint)))


def format_settings(settings: Mapping[str, str]) -> str:
    """Return settings as the command line has them."""
    return " ".join(f"{key}={value}" for key, value in settings.items())
