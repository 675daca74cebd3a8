"""User-defined mechanisms, named by file and class: `./mine.py:Mine`.

To load one executes its file. A name that the user typed may do that. A name that a folder stores may do it only if the
user allows it, and only if the file still has the hash that the folder stores (`check_code`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.config import describe_error, suggest_nearest

if TYPE_CHECKING:
    from attnlab.mechanisms.mechanism import Mechanism


PREFIX = "attnlab_own_"  # of the names of imported modules


def is_own(name: str) -> bool:
    """Whether a name refers to a file."""
    return ".py:" in name or name.endswith(".py")


def hash_files(names: Iterable[str | None]) -> dict[str, str]:
    """Return a hash of each file that these names refer to, by the file as it is written there.

    A file that does not exist has none.
    """
    files = [name.rpartition(":")[0] for name in names if name and is_own(name)]
    paths = {file: Path(file).expanduser() for file in files}
    return {file: hashlib.sha256(p.read_bytes()).hexdigest()[:12] for file, p in paths.items() if p.is_file()}


def check_code(names: Iterable[Any], stored: Any, where: Path, *, allow: bool) -> None:
    """Raise ValueError unless the files of these names may be executed: the user allows it, and none was changed.

    names    the mechanisms that a folder names; those of attnlab need no permission
    stored   the hashes that the folder stores, by file
    where    the file that holds the names
    """
    for name in names:
        if name is not None and not isinstance(name, str):
            raise ValueError(f"{where}: an attention must be a name, got {name!r}")
        if name is None or not is_own(name):
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


def load_mechanism(name: str) -> type[Mechanism]:
    """Import the class from its file. Each file is executed once. Raises ValueError or FileNotFoundError."""
    from attnlab.mechanisms.mechanism import Mechanism

    file, _, wanted = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not file or not wanted:
        raise ValueError(f"{name} does not name a class; write {name.rstrip(':')}:Mine")
    if not path.is_file():
        raise FileNotFoundError(f"no file {file} ({path})")
    key = f"{PREFIX}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[key] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[key]
            if not isinstance(error, Exception | SystemExit):
                raise
            raise ValueError(f"{path} cannot be imported: {describe_error(error)}") from error
    classes = {n: c for n, c in vars(sys.modules[key]).items() if isinstance(c, type) and issubclass(c, Mechanism)}
    if wanted not in vars(sys.modules[key]):
        there = ", ".join(n for n in classes if n != "Mechanism") or "none"
        raise ValueError(f"{path} has no {wanted!r}{suggest_nearest(wanted, classes)}; its mechanisms: {there}")
    if wanted not in classes:
        raise ValueError(f"{wanted} in {path} is not a subclass of attnlab.Mechanism")
    if missing := classes[wanted].__abstractmethods__:
        raise ValueError(f"{wanted} in {path} does not define {', '.join(sorted(missing))}")
    return classes[wanted]


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
