"""A corpus as a stream: each line is one text, or in a .tsv file a pair. Memory holds only a window of it.

It is read twice: first to count its tokens and compute its SHA-256, then for the model. Empty lines are skipped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from attnlab.files.user_files import iterate_lines
from attnlab.tasks.text import get_suffix


@dataclass(frozen=True)
class TextExample:
    """One text or two: a source and its target, or the two segments of one input."""

    text: str
    second: str | None = None
    where: str = "the text"  # its name in errors

    @property
    def content(self) -> bytes:
        return f"{self.text}\0{self.second or ''}\1".encode()


@dataclass(frozen=True)
class TextCorpus:
    """Given examples, or the examples of a file. limit is the maximum number of examples."""

    given: tuple[TextExample, ...] = ()
    file: Path | None = None
    limit: int | None = None

    def __iter__(self) -> Iterator[TextExample]:
        return islice(self.given if self.file is None else read_examples(self.file), self.limit)


def read_examples(path: Path) -> Iterator[TextExample]:
    """Yield the examples of a text file, which may end in .gz. Errors name the line."""
    paired, is_empty = get_suffix(path) == ".tsv", True
    for number, line in enumerate(iterate_lines(path), start=1):
        if not line.strip():
            continue
        is_empty, where = False, f"{path}:{number}"
        if not paired:
            yield TextExample(line, None, where)
            continue
        sides = line.split("\t")
        if len(sides) != 2 or not (sides[0].strip() and sides[1].strip()):
            raise ValueError(f"{where}: each line of a .tsv file must be a text, a tab and a second text")
        yield TextExample(sides[0], sides[1], where)
    if is_empty:
        raise ValueError(f"{path}: the file is empty or has only blank lines")
