"""Check the files that a command will write, before it works for hours."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from attnlab.files import StorageError, explain_errors


def check_outputs(outputs: Mapping[str, Path], inputs: Mapping[Path, str]) -> None:
    """Raise ValueError or OSError for a file that cannot be written, or that would replace one that is read.

    A file has the name that the user knows it by, such as --out or SRC.
    """
    taken = {path.resolve(): name for path, name in inputs.items()}
    for name, path in outputs.items():
        if (other := taken.setdefault(path.resolve(), name)) != name:
            raise ValueError(f"{name} {path} is the same file as {other}, and would replace it: pass another name")
        _check_place(name, path)


def _check_place(name: str, path: Path) -> None:
    """Raise an error if no file can be put here; nothing is left behind."""
    if path.is_dir():
        raise ValueError(f"{name} {path} is a folder: pass the name of a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{name} {path} is not a regular file: pass another name")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"{name} {path} cannot be written: {parent} is not a folder")
    try:
        with explain_errors(path), tempfile.TemporaryFile(dir=parent):
            pass
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write {path}: {parent} takes no new files ({error.strerror})") from None
