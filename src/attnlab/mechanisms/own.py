"""The files of user-written mechanisms, `./mine.py:Mine`, in a name or in a per-layer text: hashes and permission."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnlab.mechanisms.per_layer import list_names
from attnlab.registry import own_files


def hash_files(texts: Iterable[str | None]) -> dict[str, str]:
    """Return a hash of each file that these attentions refer to, by the file as it is written there."""
    return own_files.hash_files(name for text in texts if text for name in list_names(text))


def check_code(texts: Iterable[Any], stored: Any, where: Path, *, allow: bool) -> None:
    """Raise ValueError unless the files of these attentions may be executed, as `own_files.check_code` does."""
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}: an attention must be a name, got {text!r}")
    names = [name for text in texts if text for name in list_names(text)]
    own_files.check_code(names, stored, where, allow=allow)
