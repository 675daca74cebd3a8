"""Tasks by name: the data a model trains on. To add a task, add a file beside these and a line below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlab.registry import Registry

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
