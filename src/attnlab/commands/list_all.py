"""attnlab list: print everything that has a name, or the keys of one task. Nothing here imports torch."""

from attnlab.analysis import ANALYSES
from attnlab.mechanisms import MECHANISMS
from attnlab.models.presets import PRESETS
from attnlab.registry.module_source import list_options, read_summary
from attnlab.studies import STUDIES, outline_study
from attnlab.tasks import TASKS
from attnlab.tasks.sources import SETS
from attnlab.terminal import show_table
from attnlab.training.key_notes import KeyNote, list_keys, write_value

BASE = "attnlab.mechanisms.mechanism:Mechanism"


def print_keys(task: str) -> None:
    """Print every key of `attnlab train TASK` with its default, its allowed values and what it means."""
    keys = list_keys(task)
    for part in dict.fromkeys(key.part for key in keys):
        ours = [key for key in keys if key.part == part]
        rows = [[f"{key.name}={write_value(key.default)}", key.values, write_sentence(key)] for key in ours]
        show_table(f"attnlab train {task}: {part}", ["key=default", "values", "meaning"], rows)


def write_sentence(key: KeyNote) -> str:
    """Return the sentence of a key with a capital and a full stop."""
    return f"{key.sentence[:1].upper()}{key.sentence[1:]}."


def print_all() -> None:
    """Print the mechanisms, model presets, tasks, analyses, data sets and studies."""
    shared = list_options(BASE)
    rows = []
    for name in MECHANISMS:
        options = [option for option in list_options(MECHANISMS.get_place(name)) if option not in shared]
        rows.append([name, read_summary(MECHANISMS.get_place(name)), " ".join(options)])
    show_table("mechanisms (all of them also take layer, scale, dropout)", ["attention=", "summary", "options"], rows)
    sizes = [[name, c.model, c.layers, c.width, c.heads, c.vocabulary] for name, c in PRESETS.items()]
    show_table("model presets", ["model=", "kind", "layers", "width", "heads", "words"], sizes)
    tasks = [[name, read_summary(TASKS.get_place(name))] for name in TASKS]
    show_table("tasks (attnlab list TASK explains the keys of one)", ["train", "summary"], tasks)
    analyses = [[name, read_summary(ANALYSES.get_place(name))] for name in ANALYSES]
    show_table("analyses over a corpus", ["inspect --analysis", "summary"], analyses)
    sets = [[s.name, s.task, s.licence] for s in SETS.values()]
    show_table("data sets", ["data=", "task", "licence"], sets)
    studies = [(name, outline_study(name)) for name in STUDIES]
    show_table("studies", ["reproduce", "title", "items"], [[n, o.title, " ".join(o.items)] for n, o in studies])
