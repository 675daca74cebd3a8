"""Tasks by name: the data a model trains on. To add a task, add a file beside these and a line below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlab.config import suggest_nearest
from attnlab.registry import Registry
from attnlab.registry.own_files import is_own, load_class

if TYPE_CHECKING:
    from attnlab.tasks.task import Task

TASKS: Registry[type[Task]] = Registry(
    {
        "translation": "attnlab.tasks.translation:Translation",
        "language": "attnlab.tasks.language:Language",
        "classification": "attnlab.tasks.classification:Classification",
        "synthetic": "attnlab.tasks.synthetic:Synthetic",
    }
)


def find_task(name: str) -> type[Task]:
    """Return the class of a task, by its name or from its file (`./mine.py:MyTask`). Raises ValueError if unknown."""
    if is_own(name):
        from attnlab.tasks.task import Task

        return load_class(name, Task)  # type: ignore[type-abstract]
    check_task(name)
    return TASKS[name]


def check_task(name: str) -> None:
    """Raise ValueError if a task is neither known nor a file; nothing is imported."""
    if not is_own(name) and name not in TASKS:
        known = f"{', '.join(TASKS)}, or ./file.py:Class"
        raise ValueError(f"unknown task {name!r}{suggest_nearest(name, TASKS)}; the tasks are {known}")
