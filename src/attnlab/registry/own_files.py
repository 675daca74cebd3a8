"""Objects in the user's own files, named by file and name: `./mine.py:Mine`.

Loading one executes its file. A name that the user typed may do that. A name that a folder stores may do it only if the
user allows it, and only if the file still has the hash that the folder stores (`check_code`).
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from attnlab.config import describe_error, suggest_nearest

PREFIX = "attnlab_own_"  # of the names of modules; the path of the file follows, in hexadecimal digits
T = TypeVar("T")


def is_own(name: str) -> bool:
    """Whether a name refers to a file."""
    return ".py:" in name or name.endswith(".py")


def is_own_file(name: str) -> bool:
    """Whether a name refers to one object in a file that exists."""
    file, _, wanted = name.rpartition(":")
    return is_own(name) and wanted.isidentifier() and Path(file).expanduser().is_file()


def hash_files(names: Iterable[str | None]) -> dict[str, str]:
    """Return a hash of each file that these names refer to, by the file as it is written there.

    A file that does not exist has none.
    """
    files = [name.rpartition(":")[0] for name in names if name and is_own(name)]
    paths = {file: Path(file).expanduser() for file in files}
    return {file: hashlib.sha256(p.read_bytes()).hexdigest()[:12] for file, p in paths.items() if p.is_file()}


def check_code(names: Iterable[str], stored: Any, where: Path, *, allow: bool) -> None:
    """Raise ValueError unless the files of these names may be executed: the user allows it, and none was changed.

    names    what a folder names; names of attnlab need no permission
    stored   the hashes that the folder stores, by file
    where    the file that holds the names
    """
    for name in names:
        if not is_own(name):
            continue
        file = name.rpartition(":")[0] or name
        path = Path(file).expanduser().resolve()
        if not allow:
            flag = "if you trust it, pass --allow-code (allow_code=True)"
            raise ValueError(f"{where} names {name}, a file that loading would run: {flag}")
        if not path.is_file():
            raise FileNotFoundError(f"{where} names {file}, but there is no file {path}")
        digest = stored.get(file) if isinstance(stored, Mapping) else None
        if digest is None:
            raise ValueError(f"{where} stores no hash of {file}: save the model again with this version")
        if digest != hash_files([name]).get(file):
            raise ValueError(f"{path} is not the file that {where} was made with: its hash differs; restore that file")


def load_class(name: str, base: type[T]) -> type[T]:
    """Import a subclass of `base` from its file. Raises ValueError or FileNotFoundError."""
    found = _load(name, base, is_class=True)
    if missing := getattr(found, "__abstractmethods__", None):
        raise ValueError(f"{_describe_place(name)} does not define {', '.join(sorted(missing))}")
    return cast(type[T], found)


def load_value(name: str, base: type[T]) -> T:
    """Import an object of the class `base` from its file. Raises ValueError or FileNotFoundError."""
    return cast(T, _load(name, base, is_class=False))


def _load(name: str, base: type, *, is_class: bool) -> object:
    noun = base.__name__.lower()
    file, _, wanted = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not file or not wanted:
        what, example = ("class", "Mine") if is_class else (noun, base.__name__.upper())
        raise ValueError(f"{name} does not name a {what}; write {name.rstrip(':')}:{example}")
    if not path.is_file():
        raise FileNotFoundError(f"no file {file} ({path})")
    inside = vars(_import_file(path))
    fitting = {
        key: x for key, x in inside.items()
        if (isinstance(x, type) and issubclass(x, base) and x is not base if is_class else isinstance(x, base))
    }  # fmt: skip
    if wanted not in inside:
        there = ", ".join(fitting) or "none"
        plural = {"study": "studies", "analysis": "analyses"}.get(noun, f"{noun}s")
        raise ValueError(f"{path} has no {wanted!r}{suggest_nearest(wanted, fitting)}; its {plural}: {there}")
    if wanted not in fitting:
        kind = "a subclass of" if is_class else "an instance of"
        raise ValueError(f"{_describe_place(name)} is not {kind} {base.__module__}.{base.__name__}")
    return fitting[wanted]


def get_place(name: str) -> str:
    """Return "module:Name" of a name, without executing its file. Raises FileNotFoundError if there is no file."""
    file, _, wanted = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {file or name} ({path})")
    return f"{_name_module(path)}:{wanted}"


def _import_file(path: Path) -> ModuleType:
    """Execute a file, once in a process."""
    try:
        return importlib.import_module(_name_module(path))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be imported: {describe_error(error)}") from error


def _name_module(path: Path) -> str:
    return f"{PREFIX}{str(path).encode().hex()}"


class OwnFileFinder(MetaPathFinder):
    """Finds the module of a user's file by its name, so that another process can unpickle what the file defines."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith(PREFIX):
            return None
        return importlib.util.spec_from_file_location(name, bytes.fromhex(name.removeprefix(PREFIX)).decode())


sys.meta_path.append(OwnFileFinder())


def _describe_place(name: str) -> str:
    file, _, wanted = name.rpartition(":")
    return f"{wanted} in {Path(file).expanduser().resolve()}"


def explain(error: BaseException) -> str | None:
    """Describe an error that a user's file raised, in one line that names the file; None if no such file did.

    An unexpected error elsewhere, as in a backward pass, is blamed on the file that is loaded, if there is one.
    """
    if isinstance(error, KeyboardInterrupt):
        return None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_globals.get("__file__", "")
        if frame.f_globals.get("__name__", "").startswith(PREFIX):
            return f"{file}{f', line {line}' if frame.f_code.co_filename == file else ''}: {describe_error(error)}"
    files = [str(module.__file__) for key, module in sys.modules.items() if key.startswith(PREFIX)]
    expected = not isinstance(error, Exception) or isinstance(error, ValueError | OSError | ImportError)
    if expected or not files:
        return None
    return f"{', '.join(files)} may have caused this: {describe_error(error)} (ATTNLAB_TRACE=1 shows where)"
