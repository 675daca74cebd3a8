"""A corpus as a stream: one text a line, or in a .tsv file a pair, of which only a window is ever held.

It is read twice: once to count its tokens and to know it again (SHA-256), once for the model. Empty lines are left out.
"""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from attnlab.tasks.text import get_suffix


@dataclass(frozen=True)
class TextExample:
    """A text, or two: a source and its target, or the two segments of one input."""

    text: str
    second: str | None = None
    where: str = "the text"  # what it is called in errors

    @property
    def content(self) -> bytes:
        return f"{self.text}\0{self.second or ''}\1".encode()


@dataclass(frozen=True)
class TextCorpus:
    """Examples given, or those of a file; limit: only the first so many."""

    given: tuple[TextExample, ...] = ()
    file: Path | None = None
    limit: int | None = None

    def __iter__(self) -> Iterator[TextExample]:
        found = iter(self.given) if self.file is None else read(self.file)
        return islice(found, self.limit)

    def windows(self, size: int) -> Iterator[list[TextExample]]:
        """The examples, so many at a time."""
        remaining = iter(self)
        while some := list(islice(remaining, size)):
            yield some


def read(path: Path) -> Iterator[TextExample]:
    """The examples of a text file (.gz too), line by line; what is wrong is named by its line."""
    paired, found = get_suffix(path) == ".tsv", False
    for number, line in _lines(path):
        if not line.strip():
            continue
        found, where = True, f"{path}:{number}"
        if not paired:
            yield TextExample(line, None, where)
            continue
        sides = line.split("\t")
        if len(sides) != 2 or not (sides[0].strip() and sides[1].strip()):
            raise ValueError(f"{where}: a line of a .tsv file is a text, a tab and a second text")
        yield TextExample(sides[0], sides[1], where)
    if not found:
        raise ValueError(f"{path}: the file is empty, or has blank lines alone")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; a corpus is a text file")
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if b"\0" in line:
                    raise ValueError(f"{path}:{number}: binary data, not text")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path}:{number}: not UTF-8 (byte 0x{byte:02x}); convert it with iconv -t utf-8") from None
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
