"""Checks of a Hugging Face model's files before transformers loads them. Nothing here imports transformers.

A config.json can name attention that transformers would fetch from the hub and run, attn_implementation="owner/kernel".
An index of safetensors files can name a pickle. Both would run code that the user did not allow.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from attnlab.files.user_files import read_json

PLAIN = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")  # implementations inside transformers and torch
PICKLE = "loading pickled weights can run code; if you trust them, pass --allow-pickle (allow_pickle=True)"
OWN_CODE = "contains its own code; if you trust it, pass --trust-remote-code (trust_remote_code=True) to run it"
INDEX = "model.safetensors.index.json"


class RefusedError(ValueError):
    """Files of a model that would run code, or are damaged."""


def check_config(values: Any, name: str, *, trust_remote_code: bool) -> None:
    """Raise RefusedError if the values of a config.json, at any depth, name code that transformers would run.

    Without trust_remote_code, transformers ignores an auto_map at the top, but not always one inside.
    """
    if not isinstance(values, Mapping):
        raise RefusedError(f"cannot read the config.json of {name}: it holds no JSON object")
    for key, value, depth in _walk(values):
        if "_implementation" in key:
            for choice in value.values() if isinstance(value, Mapping) else [value]:
                if choice is not None and not isinstance(choice, bool) and choice not in PLAIN:
                    raise RefusedError(
                        f"the config.json of {name} sets {key} to {choice!r}, which can fetch code and run it: "
                        f"remove {key}, or set it to eager or sdpa"
                    )
        if key == "auto_map" and depth and not trust_remote_code:
            raise RefusedError(f"{name} {OWN_CODE}")


def check_weights_file(file: Any, name: str) -> None:
    """Raise RefusedError if transformers_weights of a config.json names a file outside the folder, or a pickle."""
    if not _is_plain_name(file, (".safetensors", ".safetensors.index.json")):
        what = f"the config.json of {name} sets transformers_weights to {file!r}"
        raise RefusedError(f"{what}, which is no safetensors file of this folder: remove it; {PICKLE}")


def check_index(path: Path, name: str) -> None:
    """Raise RefusedError if an index of weights names anything but safetensors files beside it."""
    try:
        files = set(read_json(path)["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RefusedError(f"{path} is damaged ({type(error).__name__}: {error}); get the file again") from None
    for file in files:
        if not _is_plain_name(file, (".safetensors",)):
            raise RefusedError(f"{path} names {file!r}, which is no safetensors file of {name}; {PICKLE}")


@contextmanager
def forbid_pickle(name: str) -> Iterator[None]:
    """Make torch.load an error while the context is open, whatever way transformers finds to it."""
    load = torch.load

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise RefusedError(f"{name} has pickled files, and {PICKLE}")

    torch.load = refuse
    try:
        yield
    finally:
        torch.load = load


def _is_plain_name(file: Any, ends: tuple[str, ...]) -> bool:
    return isinstance(file, str) and file.endswith(ends) and PurePosixPath(file).name == file and "\\" not in file


def _walk(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield (key, value, depth) of every mapping inside, the top at depth 0. It does not recurse, however deep."""
    waiting: list[tuple[Any, int]] = [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, Mapping):
            yield from ((str(key), inner, depth) for key, inner in value.items())
        if isinstance(value, Mapping | list):
            inside = value.values() if isinstance(value, Mapping) else value
            waiting += [(inner, depth + 1) for inner in inside]
