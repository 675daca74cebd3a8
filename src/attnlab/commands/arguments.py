"""The arguments and options that commands share, with their help and what the shell completes."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from attnlab.commands import completion as complete


def choose(*values: str) -> Callable[[], list[str]]:
    """Return a function that lets the shell complete these values."""
    return lambda: list(values)


def take(help: str, complete: Callable[..., Any]) -> Any:
    """Return an argument with its help and what the shell completes."""
    return Argument(help=help, autocompletion=complete)


KINDS = "translation, language, classification or synthetic."
SEVERAL = "Hugging Face id or folder, folder of a run, or its name in runs/."

Pairs = Annotated[
    list[str] | None,
    Argument(metavar="[KEY=VALUE]…", help="Settings of this command.", autocompletion=complete.complete_setting),
]
TaskName = Annotated[str, take(KINDS, complete.complete_task)]
ListedTask = Annotated[str | None, take("Explain every key of `attnlab train TASK` instead.", complete.complete_task)]
RunName = Annotated[str, take("Folder of a run, or its name in runs/.", complete.complete_run)]
ReadModel = Annotated[str, take(SEVERAL, complete.complete_run)]
Aligner = Annotated[
    str, take("A run, a Hugging Face encoder-decoder, fertility, hmm, ibm1 or eflomal.", complete.complete_run)
]
Teacher = Annotated[str, take("A run that translates, or a Hugging Face translator or encoder.", complete.complete_run)]
Preset = Annotated[
    str, take("Model preset: iwslt14, wmt14, wikitext103, tiny, lstm, lstm-copy, …", complete.complete_model)
]
MechanismName = Annotated[
    str, take("Name of a mechanism, or a file and a class: ./mine.py:Mine.", complete.complete_mechanism)
]
StudyName = Annotated[
    str | None, take("Name of a paper; `attnlab list` shows all and their items.", complete.complete_study)
]
Items = Annotated[
    list[str] | None,
    Option(metavar="ITEM", help="Item to run; may be repeated; default: all.", autocompletion=complete.complete_item),
]
Scaled = Annotated[
    str | None,
    Option(
        help="smoke (tiny; default), small or full (the paper's size).", autocompletion=choose("smoke", "small", "full")
    ),
]
Files = tuple[str, str] | None
Device = Annotated[str, Option(help="auto, cpu or cuda.", autocompletion=choose("auto", "cpu", "cuda"))]
AllowCode = Annotated[bool, Option("--allow-code", help="Run the .py file of a mechanism that the folder names.")]
Seeds = Annotated[str | None, Option(metavar="N", help="Number of seeds.")]
Together = Annotated[bool, Option("--population/--no-population", help="Train runs of one shape as one, on a GPU.")]
Until = Annotated[str | None, Option(help="Stop at checkpoints 20 s before this: 9m, 1h30m, or 14:30.")]
On = Annotated[
    str,
    Option(help="Where to train: local, or ray: the cluster at RAY_ADDRESS.", autocompletion=choose("local", "ray")),
]
Jobs = Annotated[int | None, Option(help="Largest number of models at a time; default: as many as fit.")]
Root = Annotated[Path, Argument(help="Folder that holds the runs.")]
