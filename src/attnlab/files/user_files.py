"""Read the files that a user gives, within budgets.

Every file that a user gives is read here: text, bytes and JSON, decompressed if the name ends in .gz. Damage is a
ValueError that names the file and the line. Budgets keep a small file from filling the memory:

    size 8 GiB      expansion of a .gz file: 100 times its size, or 64 MiB      line 16 MiB      JSON 100 levels deep

ATTNLAB_BUDGET=10 allows ten times as much of each.
"""

import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 8 * 2**30  # of a file, decompressed
MOST_EXPANSION = 100  # decompressed bytes for each byte of a .gz file
FREE_EXPANSION = 2**26  # decompressed bytes that every .gz file may have
MOST_LINE = 2**24  # bytes
MOST_NESTING = 100  # lists and objects of JSON inside one another
CHUNK = 2**20
BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.S)  # or a string, whose brackets do not count
KINDS: dict[type, str] = {dict: "object", list: "list"}  # what JSON calls them


def apply_budget(limit: int) -> int:
    """Return a limit multiplied by ATTNLAB_BUDGET."""
    text = os.environ.get("ATTNLAB_BUDGET", "1")
    try:
        return int(limit * float(text))
    except (ValueError, OverflowError):
        raise ValueError(f"ATTNLAB_BUDGET must be a number, for example 10, got {text!r}") from None


def exceed_budget(problem: str) -> ValueError:
    """Return the error of a file that exceeds a budget; it says how to raise the budget."""
    return ValueError(f"{problem}; if you trust it, set ATTNLAB_BUDGET=10 to read ten times as much")


class BoundedStream(io.RawIOBase):
    """A stream of bytes whose errors name the file, and that ends with an error at a limit."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, name: str, limit: int, limit_name: str) -> None:
        self.stream, self.name, self.limit, self.limit_name = stream, name, limit, limit_name
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        try:
            piece = self.stream.read(len(view))
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{self.name}: cannot be read ({error}); is the file damaged?") from None
        self.count += len(piece)
        if self.count > self.limit:
            raise exceed_budget(f"{self.name} has more than {self.limit:,} bytes{self.limit_name}")
        view[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self.stream.close()
        super().close()


def open_bytes(path: Path) -> io.BufferedReader:
    """Open a file for reading, decompressing it if its name ends in .gz."""
    limit, limit_name, is_packed = apply_budget(MOST_BYTES), "", path.suffix == ".gz"
    try:
        size = path.stat().st_size
        if is_packed and (unpacked := apply_budget(max(FREE_EXPANSION, MOST_EXPANSION * size))) < limit:
            limit, limit_name = unpacked, f" unpacked, for {size:,} packed ones"
        stream: IO[bytes] | gzip.GzipFile = gzip.open(path) if is_packed else path.open("rb")  # noqa: SIM115
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; give a file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    return io.BufferedReader(BoundedStream(stream, str(path), limit, limit_name), CHUNK)


def read_bytes(path: Path) -> bytes:
    """Read a file, decompressing it if its name ends in .gz."""
    with open_bytes(path) as file:
        return b"".join(iter(lambda: file.read(CHUNK), b""))


def read_text(path: Path) -> str:
    """Read a UTF-8 file without its byte order mark."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _describe_encoding(f"{path}:{line}", data[error.start]) from None


def iterate_lines(path: Path, *, ends: bool = False) -> Iterator[str]:
    """Yield the lines of a UTF-8 file; see `decode_lines`. Memory holds one line."""
    with open_bytes(path) as file:
        yield from decode_lines(file, str(path), ends=ends)


def decode_lines(file: IO[bytes], name: str, *, ends: bool = False) -> Iterator[str]:
    """Yield the lines of an open UTF-8 file without its byte order mark; `name` names it in errors.

    Only \\n and \\r\\n end a line; a sentence may contain other Unicode separators. ends: keep the line ends
    """
    limit, number = apply_budget(MOST_LINE), 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise exceed_budget(f"{name}:{number}: the line has more than {limit:,} bytes")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _describe_encoding(f"{name}:{number}", line[error.start]) from None
        if "\0" in text:
            raise ValueError(
                f"{name}:{number}: binary data (byte 0x00); if it is UTF-16, convert it with iconv -t utf-8"
            )
        yield text if ends else text.removesuffix("\n").removesuffix("\r")


def read_standard_input() -> Iterator[str]:
    """Yield the lines of standard input. On a terminal, say how to end the input."""
    if sys.stdin.isatty():
        print("reading lines from the terminal; end with Ctrl-D", file=sys.stderr)
    return decode_lines(sys.stdin.buffer, "standard input")


def _describe_encoding(where: str, byte: int) -> ValueError:
    return ValueError(f"{where}: not UTF-8 (byte 0x{byte:02x}); convert it, for example with iconv -t utf-8")


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file whose value is of this kind, dict or list."""
    return parse_json(read_text(path), str(path), kind)


def parse_json(text: str, where: str, kind: type = dict) -> Any:
    """Parse JSON whose value is of this kind; `where` names the file and the line in errors."""
    limit = apply_budget(MOST_NESTING)
    if text.count("[") + text.count("{") > limit and _measure_nesting(text) > limit:
        raise exceed_budget(f"{where}: the JSON is nested more than {limit} levels deep")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: the JSON is nested more deeply than Python can read") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({str(error).partition(';')[0]})") from None
    if not isinstance(value, kind):
        raise ValueError(f"{where}: must be a JSON {KINDS[kind]}, got {type(value).__name__}")
    return value


def _measure_nesting(text: str) -> int:
    depth = deepest = 0
    for match in BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        deepest = max(deepest, depth)
    return deepest
