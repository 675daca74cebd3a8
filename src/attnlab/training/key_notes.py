"""The keys of `attnlab train TASK`: allowed values, default and one sentence each, read from the configurations.

The sentence of a key is the comment behind its field. Reading the source takes milliseconds; importing it, seconds.
"""

import ast
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin

from attnlab.config import describe_type
from attnlab.registry import own_files
from attnlab.registry.module_source import list_fields, open_source
from attnlab.tasks import TASKS, check_task

RECIPE = "attnlab.training.recipe"
PARTS = {
    "model": "attnlab.models.transformer_config:TransformerConfig",
    "training": "attnlab.training.loop:TrainConfig",
    "decoding": f"{RECIPE}:DecodeConfig",
}


@dataclass(frozen=True)
class KeyNote:
    """A key of a command. `choices` are its values if they have names; `part` is what it belongs to."""

    name: str
    values: str
    default: Any
    sentence: str
    part: str
    choices: tuple[str, ...] = ()


def list_keys(task: str) -> list[KeyNote]:
    """Return every key of `attnlab train TASK`, without the options of attentions."""
    check_task(task)
    recipe = open_source(RECIPE)
    hidden, small = recipe.get_value("FROM_TASK"), recipe.get_value("SMALL")
    notes: dict[str, KeyNote] = {}
    for part, place in {"data": _find_config(task), **PARTS}.items():
        for note in read_notes(place, part):
            if part != "model":
                notes.setdefault(note.name, note)
            elif note.name not in hidden and not note.name.endswith("_options"):
                notes.setdefault(note.name, replace(note, default=small.get(note.name, note.default)))
    return list(notes.values())


def read_notes(place: str, part: str) -> list[KeyNote]:
    """Return a key for each field of the configuration at "module:Class"."""
    return [
        KeyNote(field.name, describe_type(field.hint), field.default, field.sentence, part, _list_choices(field.hint))
        for field in list_fields(place)
    ]


def write_value(value: object) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(write_value, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _find_config(task: str) -> str:
    """Return the place of the configuration of a task: what its class assigns to config_type."""
    module, name = (own_files.get_place(task) if own_files.is_own(task) else TASKS.get_place(task)).split(":")
    here, node = open_source(module).find_class(name)
    for part in node.body:
        match part:
            case (
                ast.Assign(targets=[ast.Name(id="config_type")], value=ast.Name(id=config))
                | ast.AnnAssign(target=ast.Name(id="config_type"), value=ast.Name(id=config))
            ):
                return f"{here.find_class(config)[0].module}:{config}"
    raise ImportError(f"{module}:{name} must assign config_type on a line of its own")


def _list_choices(hint: Any) -> tuple[str, ...]:
    """Return the named values of a Literal type, of true and false, and of unions with them."""
    if hint is bool:
        return ("true", "false")
    if get_origin(hint) is Annotated:
        return ()
    return tuple(x for part in get_args(hint) for x in ((part,) if isinstance(part, str) else _list_choices(part)))
