"""Durable files: a name never holds half a file, whatever happens while it is written."""

import os
from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file, or leave the old one: into a scratch file, flushed to disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file as UTF-8, or leave the old one."""
    write_bytes(path, text.encode("utf-8"))
