"""Studies: one room per paper or question. To add one, write a module with a STUDY, and a line in STUDIES."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlab.config import suggest_nearest
from attnlab.registry import Registry
from attnlab.registry.module_source import open_source
from attnlab.registry.own_files import is_own, load_value

if TYPE_CHECKING:
    from attnlab.experiments.study import Study

STUDIES: Registry[Study] = Registry(
    {
        "snell2021": "attnlab.studies.snell2021:STUDY",
        "kobayashi2020": "attnlab.studies.kobayashi2020:STUDY",
        "zheng2021": "attnlab.studies.zheng2021:STUDY",
        "heo2024": "attnlab.studies.heo2024:STUDY",
        "convert": "attnlab.studies.convert:STUDY",
    }
)


def open_study(name: str) -> Study:
    """Import a study by its name or from its file (`./mine.py:STUDY`). Raises ValueError for an unknown name."""
    if is_own(name):
        from attnlab.experiments.study import Study

        return load_value(name, Study)
    if name not in STUDIES:
        known = f"{', '.join(STUDIES)}, or ./file.py:STUDY"
        raise ValueError(f"unknown study {name!r}{suggest_nearest(name, STUDIES)}; available: {known}")
    return STUDIES[name]


@dataclass(frozen=True)
class StudyOutline:
    """The title of a study, and the titles of its items by name."""

    title: str
    items: dict[str, str]


def outline_study(name: str) -> StudyOutline:
    """Read the outline of a study from its source, without importing it."""
    source = open_source(STUDIES.get_place(name).partition(":")[0])
    titles = [
        node.args[1]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Study"
    ]
    items = {item: source.evaluate(call.args[0]) for item, call in source.list_calls("Item")}
    return StudyOutline(source.evaluate(titles[0]), items)
