"""Read archives safely: no member is written under its own name, and the unpacked size is bounded.

Raises ValueError for a member name that leads outside the archive, for a link in place of a file, and for more bytes or
members than any data set has. Nothing is kept then.
"""

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from attnlab.files.user_files import CHUNK, MOST_BYTES, apply_budget, exceed_budget

MOST_MEMBERS = 250_000

# RuntimeError: an encrypted member, or a compression that zipfile does not know; OSError: also gzip and bz2
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)

Wanted = Callable[[str], bool]


def read_members(archive: Path, wanted: Wanted) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the wanted members of a tar or zip file, each with its content in pieces.

    A .gz file has one member, named like the file without .gz. Read the pieces before requesting the next member.
    """
    budget = _Budget(archive)
    archive.open("rb").close()  # raises its own errors for a file that is missing or unreadable
    try:
        if archive.name.endswith((".tar.gz", ".tgz", ".tar")):
            yield from _read_tar(archive, wanted, budget)
        elif archive.suffix == ".zip":
            yield from _read_zip(archive, wanted, budget)
        else:
            is_gzip = archive.suffix == ".gz"
            with gzip.open(archive) if is_gzip else archive.open("rb") as stream:
                yield archive.stem if is_gzip else archive.name, budget.read_pieces(stream)
    except DAMAGE as error:
        raise ValueError(f"{archive.name}: damaged or encrypted ({error}); fetch it again") from None


class _Budget:
    """The bytes and members that an archive may still yield."""

    def __init__(self, archive: Path) -> None:
        self.archive, self.members = archive, MOST_MEMBERS
        self.limit = self.bytes = apply_budget(MOST_BYTES)

    def count_member(self, name: str, *, size: int) -> None:
        """Count a member, wanted or not, and check its name and the size it declares."""
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or PureWindowsPath(name).drive:
            raise ValueError(f"{self.archive.name}: member {name!r} leads outside the archive")
        self.members -= 1
        if self.members < 0:
            raise ValueError(f"{self.archive.name} has more than {MOST_MEMBERS:,} members")
        if size > self.bytes:
            raise exceed_budget(f"{self.archive.name} unpacks to more than {self.limit:,} bytes")

    def read_pieces(self, stream: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
        """Yield the content of a stream, counting the real bytes whatever size the archive declares."""
        try:
            while piece := stream.read(CHUNK):
                self.bytes -= len(piece)
                if self.bytes < 0:
                    raise exceed_budget(f"{self.archive.name} unpacks to more than {self.limit:,} bytes")
                yield piece
        except DAMAGE as error:
            raise ValueError(f"{self.archive.name}: damaged or encrypted ({error}); fetch it again") from None


def _read_tar(archive: Path, wanted: Wanted, budget: _Budget) -> Iterator[tuple[str, Iterator[bytes]]]:
    with tarfile.open(archive, "r:*" if archive.suffix == ".tar" else "r:gz") as tar:
        for member in tar:
            budget.count_member(member.name, size=member.size)
            if not wanted(member.name):
                budget.bytes -= member.size  # tarfile unpacks skipped members too
                continue
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is None:
                raise ValueError(f"{archive.name}: member {member.name!r} is a link or special file")
            yield member.name, budget.read_pieces(stream)


def _read_zip(archive: Path, wanted: Wanted, budget: _Budget) -> Iterator[tuple[str, Iterator[bytes]]]:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            budget.count_member(member.filename, size=member.file_size)
            if wanted(member.filename):
                if (member.external_attr >> 16) & 0o170000 == 0o120000:
                    raise ValueError(f"{archive.name}: member {member.filename!r} is a link")
                with file.open(member) as stream:
                    yield member.filename, budget.read_pieces(stream)
