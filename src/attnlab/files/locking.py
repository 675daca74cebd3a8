"""Locks of files: flock where the system has it, else a locked byte far behind the end of the file (Windows)."""

from types import ModuleType
from typing import IO, Any

fcntl: ModuleType | Any
msvcrt: ModuleType | Any
try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None
try:
    import msvcrt
except ImportError:  # elsewhere
    msvcrt = None

FAR = 2**30  # the byte that is locked on Windows, where a locked byte cannot be read


def lock(file: IO[str], *, shared: bool = False, wait: bool) -> None:
    """Lock an open file until it is closed. Raises OSError if another process holds the lock, or has no locks.

    shared   allow other shared locks; Windows has none, so the lock is exclusive there
    wait     wait for the lock, on Windows for at most 10 seconds
    """
    if fcntl is not None:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        return
    if msvcrt is None:
        raise OSError("this system has no locks of files")
    at = file.tell()
    file.seek(FAR)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    finally:
        file.seek(at)


def close_before_removal(file: IO[str]) -> None:
    """Close a file whose folder will be removed, on Windows, which removes no open file. Elsewhere it stays locked."""
    if fcntl is None:
        file.close()
