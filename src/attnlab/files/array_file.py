"""Arrays that are too large for memory, in a temporary file."""

import math
from contextlib import suppress
from tempfile import SpooledTemporaryFile, TemporaryFile, gettempdir
from typing import IO, Any
from weakref import finalize

import numpy as np

from attnlab.files import StorageError, explain_errors


class ArrayFile:
    """Arrays one after another in a temporary file, which disappears with this object and with the process.

    A full disk and a folder that cannot be written raise StorageError, which names the folder and what to do.
    """

    def __init__(self, in_memory: int = 0) -> None:
        """in_memory: number of bytes that need no file on disk."""
        try:
            self._name = f"a temporary file in {gettempdir()} (TMPDIR=FOLDER chooses another folder)"
        except FileNotFoundError as error:
            raise StorageError("no folder for temporary files can be written: set TMPDIR=FOLDER to one") from error
        with explain_errors(self._name):
            self._file: IO[Any] = SpooledTemporaryFile(max_size=in_memory) if in_memory else TemporaryFile()  # noqa: SIM115 (closed by finalize)
        finalize(self, _close, self._file)

    def write(self, array: np.ndarray) -> None:
        with explain_errors(self._name):
            self._file.write(np.ascontiguousarray(array))

    def read(self, dtype: type[np.generic], *shape: int) -> np.ndarray:
        """Return the next array."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(self._file.read(size), dtype=dtype).reshape(shape)

    def tell(self) -> int:
        """Return the place of the next array."""
        return self._file.tell()

    def seek(self, place: int) -> None:
        """Go to the place of an array."""
        with explain_errors(self._name):  # the last writes reach the disk here
            self._file.seek(place)


def _close(file: IO[Any]) -> None:
    with suppress(OSError):  # on a full disk, what is still in memory cannot be written and is not needed
        file.close()
