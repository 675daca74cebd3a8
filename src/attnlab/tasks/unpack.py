"""Reading archives that may be hostile: no member is written by its own name, and what comes out is bounded.

A member whose name leads outside, a link where a file is wanted, or more bytes or members than a data set can have are
refused before anything is kept.
"""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Protocol

CHUNK = 2**20
MOST_MEMBERS = 250_000
MOST_BYTES = 8 * 2**30  # of everything unpacked

DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile)

Wanted = Callable[[str], bool]


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_members(archive: Path, wanted: Wanted) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The wanted members of a tar or zip file, each with its content in pieces; a .gz has one, its own name less .gz.

    Content must be used before the next member is asked for.
    """
    budget = _Budget(archive)
    try:
        if archive.name.endswith((".tar.gz", ".tgz", ".tar")):
            yield from _read_tar(archive, wanted, budget)
        elif archive.suffix == ".zip":
            yield from _read_zip(archive, wanted, budget)
        elif archive.suffix == ".gz":
            with gzip.open(archive) as unzipped:
                yield archive.stem, budget.pieces(unzipped)
        else:
            with archive.open("rb") as stream:
                yield archive.name, budget.pieces(stream)
    except DAMAGE as error:
        raise ValueError(f"{archive.name}: damaged ({error})") from None


class _Budget:
    """How much may still come out of an archive."""

    def __init__(self, archive: Path) -> None:
        self.archive, self.bytes, self.members = archive, MOST_BYTES, MOST_MEMBERS

    def admit(self, name: str, *, size: int) -> None:
        """Count a member, wanted or not, by the size it claims, and refuse a name that leads outside."""
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or PureWindowsPath(name).drive:
            raise ValueError(f"{self.archive.name}: member {name!r} leads outside the archive; refused")
        self.members -= 1
        if self.members < 0:
            raise ValueError(f"{self.archive.name}: more than {MOST_MEMBERS:,} members; refused")
        if size > self.bytes:
            raise ValueError(f"{self.archive.name}: unpacks to more than is allowed; refused")

    def pieces(self, stream: Readable) -> Iterator[bytes]:
        """What a stream holds; refused where it is more than is left, whatever its size was said to be."""
        while piece := self._read(stream):
            self.bytes -= len(piece)
            if self.bytes < 0:
                raise ValueError(f"{self.archive.name}: unpacks to more than is allowed; refused")
            yield piece

    def _read(self, stream: Readable) -> bytes:
        try:
            return stream.read(CHUNK)
        except DAMAGE as error:
            raise ValueError(f"{self.archive.name}: damaged ({error})") from None


def _read_tar(archive: Path, wanted: Wanted, budget: _Budget) -> Iterator[tuple[str, Iterator[bytes]]]:
    with tarfile.open(archive, "r:*" if archive.suffix == ".tar" else "r:gz") as tar:
        for member in tar:
            budget.admit(member.name, size=member.size)
            if not wanted(member.name):
                budget.bytes -= member.size  # skipping unpacks it too
                continue
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is None:
                raise ValueError(f"{archive.name}: member {member.name!r} is a link or no file; refused")
            yield member.name, budget.pieces(stream)


def _read_zip(archive: Path, wanted: Wanted, budget: _Budget) -> Iterator[tuple[str, Iterator[bytes]]]:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            budget.admit(member.filename, size=member.file_size)
            if wanted(member.filename):
                if (member.external_attr >> 16) & 0o170000 == 0o120000:
                    raise ValueError(f"{archive.name}: member {member.filename!r} is a link; refused")
                with file.open(member) as stream:
                    yield member.filename, budget.pieces(stream)
