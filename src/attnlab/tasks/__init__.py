"""Tasks by name: the data a model trains on. To add a task, add a file beside these and a line below."""

from attnlab.tasks.classification import Classification
from attnlab.tasks.language import Language
from attnlab.tasks.synthetic import Synthetic
from attnlab.tasks.task import Task
from attnlab.tasks.translation import Translation

TASKS: dict[str, type[Task]] = {
    "translation": Translation,
    "language": Language,
    "classification": Classification,
    "synthetic": Synthetic,
}
