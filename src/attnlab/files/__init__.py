"""Durable, atomic writes: after a crash, a path holds either the old file or the new one, never a part of it.

A file is written in a scratch folder beside it, `.NAME.*.part`, flushed to disk, and renamed. Its process locks the
scratch folder. One without a lock was left by a killed process; the next write in that place removes it.
"""

import csv
import errno
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from attnlab.files import locking

SUFFIX = ".part"  # of scratch folders
LOCK = ".attnlab-lock"  # in a scratch folder
RESUME = "then run the same command again"
REASONS = {
    errno.ENOSPC: f"the disk is full; free some space, {RESUME}",
    errno.EDQUOT: f"your disk quota is used up; delete some files, {RESUME}",
    errno.EFBIG: f"the file is larger than allowed (see ulimit -f); raise the limit, {RESUME}",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; change the folder's permissions, or choose another folder",
    errno.EPERM: "permission denied; change the folder's permissions, or choose another folder",
}


class StorageError(OSError):
    """A file that cannot be written: the disk is full, or the folder is read-only."""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or folder to; after the block, flush it to disk and rename it to `path`.

    If the block raises, `path` stays as it was. Raises StorageError for a full disk or a read-only folder.
    """
    with explain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path.parent)
        with _make_scratch(path) as scratch:
            yield scratch / path.name
            sync_tree(scratch / path.name)
            (scratch / path.name).replace(path)
        with suppress(OSError):  # not every file system can flush a folder
            _sync(path.parent)


@contextmanager
def explain_errors(path: Path | str) -> Iterator[None]:
    """Turn the error of a full disk or a read-only folder into a StorageError that names the file and what to do."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)", str(error))  # in the errors of safetensors
        code = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if code not in REASONS:
            raise
        raise StorageError(f"cannot write {path}: {REASONS[code]}") from error


def refuse_link(path: Path) -> None:
    """Raise ValueError for a symbolic link, before a file in a folder of ours is opened for writing.

    Others may have made the folder, and its links may lead to any file of the user. A renamed file replaces a link.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link to {path.readlink()}, which is not written to: remove the link")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with replace_file(path) as scratch:
        scratch.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV file atomically; the first row has the names of the columns."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with all it holds, to disk."""
    for each in (*path.rglob("*"), path) if path.is_dir() else (path,):
        _sync(each)


def remove_stale(folder: Path) -> None:
    """Remove the scratch folders that killed processes left here. A living process has locked its own."""
    for scratch in folder.glob(f".*{SUFFIX}"):
        with suppress(OSError), (scratch / LOCK).open("r+") as lock:
            if lock_file(lock):
                locking.close_before_removal(lock)
                shutil.rmtree(scratch, ignore_errors=True)


def lock_file(file: IO[str], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock."""
    try:
        locking.lock(file, shared=shared, wait=False)
    except OSError:
        return False
    return True


@contextmanager
def _make_scratch(path: Path) -> Iterator[Path]:
    """Yield a new scratch folder, locked; remove it after the block."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.", suffix=SUFFIX, dir=path.parent))
        lock = (scratch / LOCK).open("w")
        with suppress(OSError):  # not every file system has locks; without them, nothing is stale
            locking.lock(lock, wait=True)
        if scratch.exists():  # else another process removed it just before it was locked
            break
        lock.close()
    try:
        yield scratch
    finally:
        locking.close_before_removal(lock)
        shutil.rmtree(scratch, ignore_errors=True)
        lock.close()


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk. Windows flushes no folders, and only files that are open for writing."""
    if locking.fcntl is None and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if locking.fcntl else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
