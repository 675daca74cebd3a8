"""User-defined mechanisms, named by file and class: `./mine.py:Mine`."""

import hashlib
import importlib.util
import sys
from pathlib import Path

from attnlab.config import suggest_nearest
from attnlab.mechanisms.mechanism import Mechanism


def is_own(name: str) -> bool:
    """Whether a name refers to a file."""
    return ".py:" in name or name.endswith(".py")


def load_mechanism(name: str) -> type[Mechanism]:
    """Import the class from its file. Each file is executed once. Raises ValueError or FileNotFoundError."""
    file, _, wanted = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not file or not wanted:
        raise ValueError(f"{name} does not name a class; write {name.rstrip(':')}:Mine")
    if not path.is_file():
        raise FileNotFoundError(f"no file {file} ({path})")
    key = f"attnlab_own_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[key] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[key]
            raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    classes = {n: c for n, c in vars(sys.modules[key]).items() if isinstance(c, type) and issubclass(c, Mechanism)}
    if wanted not in vars(sys.modules[key]):
        there = ", ".join(n for n in classes if n != "Mechanism") or "none"
        raise ValueError(f"{path} has no {wanted!r}{suggest_nearest(wanted, classes)}; its mechanisms: {there}")
    if wanted not in classes:
        raise ValueError(f"{wanted} in {path} is not a subclass of attnlab.Mechanism")
    if missing := classes[wanted].__abstractmethods__:
        raise ValueError(f"{wanted} in {path} does not define {', '.join(sorted(missing))}")
    return classes[wanted]
