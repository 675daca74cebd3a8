"""attnlab list: print everything that has a name, or the keys of one task."""

import inspect

from attnlab.mechanisms import MECHANISMS, read_option_types
from attnlab.models.presets import PRESETS
from attnlab.studies import STUDIES, open_study
from attnlab.tasks import TASKS
from attnlab.tasks.sources import SETS
from attnlab.terminal import show_table
from attnlab.training.recipe import list_keys


def print_keys(task: str) -> None:
    """Print every key of `attnlab train TASK` with its default."""
    rows = [[name, default, part] for name, default, part in list_keys(task)]
    show_table(f"attnlab train {task}", ["key", "default", "of the"], rows)


def print_all() -> None:
    """Print the mechanisms, model presets, tasks, data sets and studies."""
    shared = set(read_option_types("softmax"))
    rows = []
    for name, kind in MECHANISMS.items():
        summary = (inspect.getdoc(inspect.getmodule(kind)) or "").split("\n")[0].rstrip(".:")
        rows.append([name, summary, " ".join(option for option in read_option_types(name) if option not in shared)])
    show_table("mechanisms (all of them also take layer, scale, dropout)", ["attention=", "summary", "options"], rows)
    sizes = [[name, c.model, c.layers, c.width, c.heads, c.vocabulary] for name, c in PRESETS.items()]
    show_table("model presets", ["model=", "kind", "layers", "width", "heads", "words"], sizes)
    sets = [[s.name, s.task, s.licence] for s in SETS.values()]
    show_table(f"tasks: {', '.join(TASKS)}; data sets", ["data=", "task", "licence"], sets)
    studies = [[study.name, study.title, " ".join(study.items)] for study in map(open_study, STUDIES)]
    show_table("studies", ["reproduce", "title", "items"], studies)
