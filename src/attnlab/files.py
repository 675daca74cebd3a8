"""Durable, atomic writes: after a crash, a path holds either the old file or the new one, never a part of it."""

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: write a scratch file, flush it to disk, then rename it."""
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
    """Write a UTF-8 text file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV file atomically; the first row has the names of the columns."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())
