"""What the shell offers to complete: names of tasks, mechanisms, models, runs and studies, keys and their values.

Everything is read from the registries and the source, so that a key press never waits for torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attnlab.config import describe_type
from attnlab.terminal.spelling import SETTINGS, name_option

if TYPE_CHECKING:
    from attnlab.training.key_notes import KeyNote

PRESET = "a preset, or the folder of a Hugging Face model"
LISTS = ("compare", "demo", "reproduce")  # commands that take several values, separated by commas
RUN_COMMANDS = ("evaluate", "translate", "predict", "export")


def complete_task() -> list[tuple[str, str]]:
    from attnlab.registry.module_source import read_summary
    from attnlab.tasks import TASKS

    return [(name, read_summary(TASKS.get_place(name))) for name in TASKS]


def complete_mechanism() -> list[tuple[str, str]]:
    from attnlab.mechanisms import MECHANISMS
    from attnlab.registry.module_source import read_summary

    return [(name, read_summary(MECHANISMS.get_place(name))) for name in MECHANISMS]


def complete_model() -> list[tuple[str, str]]:
    from attnlab.models.presets import PRESETS

    return [(name, f"{config.model}, {config.layers} layers") for name, config in PRESETS.items()]


def complete_run(incomplete: str) -> list[str]:
    """Return the runs in runs/, by their names or as paths."""
    from attnlab.training import iterate_runs

    return [str(folder) if incomplete.startswith("runs/") else folder.name for folder in iterate_runs(Path("runs"))]


def complete_study() -> list[tuple[str, str]]:
    from attnlab.studies import STUDIES, outline_study

    return [(name, outline_study(name).title) for name in STUDIES]


def complete_item(ctx: typer.Context) -> list[tuple[str, str]]:
    from attnlab.studies import STUDIES, outline_study

    study = str(ctx.params.get("study"))
    return list(outline_study(study).items.items()) if study in STUDIES else []


def complete_setting(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield keys as `key=` and with their defaults; after `key=`, its values."""
    from attnlab.training.key_notes import write_value

    given = list(ctx.params.get(SETTINGS) or [])
    key, equals, text = incomplete.partition("=")
    prefix = f"{key}=" if equals else ""
    if not equals and given and given[-1].endswith("="):  # the shell completes the value alone
        key, equals, text = given[-1][:-1], "=", incomplete
    pairs = dict(word.split("=", 1) for word in given if "=" in word)
    notes = list_keys(ctx, {name: value for name, value in pairs.items() if name != key})
    if equals:
        before, comma, _ = text.rpartition(",") if ctx.info_name in LISTS else ("", "", "")
        for value, sentence in list_values(ctx, key, notes):
            yield f"{prefix}{before}{comma}{value}", sentence
        return
    for note in notes.values():
        yield f"{note.name}=", note.sentence
        if note.default is not None:  # two candidates keep the shell from adding a space behind =
            yield f"{note.name}={write_value(note.default)}", f"{note.sentence} (default)"


def list_keys(ctx: typer.Context, given: Mapping[str, str]) -> dict[str, "KeyNote"]:
    """Return the keys of a command that are not given yet, without its options."""
    from attnlab.mechanisms import MECHANISMS
    from attnlab.models.presets import PRESETS
    from attnlab.registry.module_source import list_options, open_source
    from attnlab.tasks import TASKS
    from attnlab.training import key_notes

    command, task, model = ctx.info_name, str(ctx.params.get("task")), ctx.params.get("model")
    notes: list[KeyNote] = []
    if command in ("train", "compare") and task in TASKS:
        notes = [key_notes.KeyNote("model", "text", None, PRESET, "model"), *key_notes.list_keys(task)]
    elif command == "demo":
        notes = key_notes.read_notes("attnlab.commands.demo.settings:DemoConfig", "demo")
    elif command == "describe" and model in PRESETS:
        kind = type(PRESETS[model])
        notes = key_notes.read_notes(f"{kind.__module__}:{kind.__name__}", "model")
    elif command in RUN_COMMANDS:
        types = open_source(f"attnlab.commands.{command}").get_value("TYPES")
        notes = [key_notes.KeyNote(name, "", None, describe_type(hint), "run") for name, hint in types.items()]
    mechanism = str(ctx.params.get("mechanism") or given.get("attention"))
    if mechanism in MECHANISMS:
        options = list_options(MECHANISMS.get_place(mechanism))
        notes += [key_notes.KeyNote(name, "", None, f"option of {mechanism}", "attention") for name in options]
    taken = {name for parameter in ctx.command.params for name in parameter.opts}
    return {note.name: note for note in notes if note.name not in given and name_option(note.name) not in taken}


def list_values(ctx: typer.Context, key: str, notes: Mapping[str, "KeyNote"]) -> list[tuple[str, str]]:
    """Return the values of a key, or of an option that is written as one."""
    from attnlab.tasks.sources import SETS

    if key in ("attention", "cross_attention"):
        return complete_mechanism()
    if key == "model":
        return complete_model()
    if key == "data" and not (key in notes and notes[key].choices):
        task = ctx.params.get("task")
        return [(name, each.licence) for name, each in SETS.items() if task in (None, each.task)]
    for option in ctx.command.params:
        if name_option(key) in option.opts:
            return [(item.value, item.help or "") for item in option.shell_complete(ctx, "")]
    return [(choice, "") for choice in notes[key].choices] if key in notes else []
