"""The third narrow waist: the Ledger, an append-only JSON-lines file of measured runs.

A row is one run: the resolved recipe and its digest, the seed, the measure and its edition, every value it measured,
the wall time, and where it was measured. A failed run is a row with the reason. Tables, figures and pages are
functions of a ledger, so a corrected analysis reads the rows again and trains nothing.

    key = (digest of the recipe, seed, measure, edition)        of several rows with one key the newest counts

A line is appended under a lock and flushed to disk. A torn last line, left by a killed writer, is reported and ignored.
"""

import json
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock

from attnlab.config import suggest_nearest
from attnlab.files import explain_errors, write_text
from attnlab.files.user_files import parse_json

FILE = "ledger.jsonl"
FORMAT = 1  # of a row
MACHINE_KEYS = ("seconds", "run")  # values that tell of the machine, not of the run


class Key(NamedTuple):
    """What tells one measured run from another."""

    digest: str
    seed: int | None
    measure: str
    edition: int

    def __str__(self) -> str:
        return f"recipe {self.digest}, seed {self.seed}, measure {self.measure} (edition {self.edition})"


def digest_recipe(recipe: Mapping[str, Any]) -> str:
    """Return twelve hexadecimal digits that name a recipe; the order of its keys does not matter."""
    return sha256(json.dumps(recipe, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run, or one that failed."""

    recipe: Mapping[str, Any]  # resolved: every value, none left to a default, without the seed
    seed: int | None  # None: no seed changes it
    measure: str
    edition: int
    values: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""  # the reason
    final: bool = False  # a failure that would come again, such as a loss that is not finite
    wall_s: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)  # hardware, versions, commit, command, time
    note: str = ""  # such as: only cell values survive
    digest: str = ""

    def __post_init__(self) -> None:
        plain = json.loads(json.dumps(self.recipe, ensure_ascii=False))  # tuples as lists, as a file has them
        object.__setattr__(self, "recipe", plain)
        if self.digest and self.digest != digest_recipe(plain):
            raise ValueError(f"the digest {self.digest} is not that of the recipe, {digest_recipe(plain)}")
        object.__setattr__(self, "digest", digest_recipe(plain))

    @property
    def key(self) -> Key:
        return Key(self.digest, self.seed, self.measure, self.edition)

    def as_line(self) -> str:
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps(content | {"crc32": _compute_checksum(content)}, ensure_ascii=False)

    @classmethod
    def from_line(cls, line: str, where: str = "the row") -> "Row":
        stored = parse_json(line, where)
        checksum = stored.pop("crc32", None)  # rows from before there were checksums have none
        if checksum is not None and checksum != _compute_checksum(stored):
            raise ValueError("the line was changed: its crc32 does not match; remove crc32 if you changed it")
        if stored.pop("format", None) != FORMAT:
            raise ValueError(f"not a row of format {FORMAT}")
        return cls(**stored)

    def supersedes(self, other: "Row") -> bool:
        """Return whether this later row replaces an earlier one: a value is never replaced by a failure."""
        return bool(self.values) or not other.values


class Ledger:
    """The rows of one file. What other processes append is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[Key, Row] = {}
        self._read_bytes = self._lines = 0

    def rows(self) -> list[Row]:
        """Return the newest row of each key, in the order of the file."""
        self._refresh()
        return list(self._rows.values())

    def find(self, key: Key) -> Row | None:
        self._refresh()
        return self._rows.get(key)

    def find_older(self, key: Key, recipe: Mapping[str, Any], defaults: Mapping[str, Any]) -> Row | None:
        """Return the row of a recipe from before it had all its keys: those that the row lacks are at their default."""
        rows = [row for row in self.rows() if row.key[1:] == key[1:]]
        wanted, known = (json.loads(json.dumps(values)) for values in (recipe, defaults))  # tuples as lists, as in rows
        return next((row for row in reversed(rows) if _covers(row.recipe, wanted, known)), None)

    def append(self, row: Row) -> None:
        """Write one row; other processes may write to the same file."""
        line = row.as_line().encode() + b"\n"
        with explain_errors(self.path), self._lock(), open(self.path, "a+b") as file:
            tail = _read_last_line(file)
            if _is_torn(tail):
                file.truncate(file.seek(0, os.SEEK_END) - len(tail))
            elif tail:  # a whole row whose line end is missing
                line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def select(self, values: Mapping[str, str]) -> list[Row]:
        """Return the rows whose recipe, seed, measure or edition has these values, given as text."""
        chosen, keys = [], set[str]()
        for row in self.rows():
            known = dict(_list_values(row.recipe)) | {"seed": row.seed, "measure": row.measure, "edition": row.edition}
            keys |= known.keys()
            if all(key in known and str(known[key]) == text for key, text in values.items()):
                chosen.append(row)
        if unknown := [key for key in values if key not in keys]:
            raise ValueError(f"no row of {self.path} has the key {unknown[0]!r}{suggest_nearest(unknown[0], keys)}")
        return chosen

    def _lock(self) -> FileLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{self.path}.lock")

    def _refresh(self) -> None:
        """Read the lines that are new. A torn last line is a warning, any other bad line an error with its number."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._read_bytes:  # another file has taken its place
            self._rows, self._read_bytes, self._lines = {}, 0, 0
        if size == self._read_bytes:
            return
        data = self._read_new()
        if _is_torn(data.rpartition(b"\n")[2]) and os.access(self.path.parent, os.W_OK):
            with self._lock():  # another process may just be writing this line
                data = self._read_new()
        if _is_torn(tail := data.rpartition(b"\n")[2]):
            warnings.warn(
                f"{self.path}: the last line is incomplete and is ignored; reproduce measures its run again",
                stacklevel=4,
            )
            data = data[: -len(tail)]
        for line in data.removesuffix(b"\n").split(b"\n"):  # not splitlines: values may hold other line separators
            self._lines += 1
            row = self._parse(line) if line.strip() else None
            if row is not None and ((before := self._rows.get(row.key)) is None or row.supersedes(before)):
                self._rows.pop(row.key, None)
                self._rows[row.key] = row
        self._read_bytes += len(data)

    def _read_new(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self._read_bytes)
            return file.read()

    def _parse(self, line: bytes) -> Row:
        place = f"{self.path}:{self._lines}"
        try:
            return Row.from_line(line.decode("utf-8"), place)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place} is not a row ({error}); correct the line, or move it out of the file") from None


def _compute_checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, ensure_ascii=False).encode())


def merge_ledgers(paths: Iterable[Path], out: Path) -> int:
    """Join the rows of several files into one, with those that it has already, and return their number.

    Equal rows count once, and a value replaces a failure. Two rows of one key with different values are an error,
    unless they differ only in times and folders.
    """
    with FileLock(f"{out}.lock"):
        return _merge([*([out] if out.is_file() else []), *paths], out)


def _merge(paths: Sequence[Path], out: Path) -> int:
    kept: dict[Key, tuple[Row, Path]] = {}
    conflicts = []
    for path in paths:
        for row in Ledger(path).rows():
            before, where = kept.get(row.key, (None, path))
            if before is not None and before.values and row.values and not _is_same(before, row):
                conflicts.append(f"{row.key} in {where} and {path}")
            elif before is None or (row.supersedes(before) and not before.values):
                kept[row.key] = (row, path)
    if conflicts:
        more = f" (and {len(conflicts) - 3} more)" if len(conflicts) > 3 else ""
        raise ValueError(f"the same run has different values: {'; '.join(conflicts[:3])}{more}; remove one of each")
    write_text(out, "".join(row.as_line() + "\n" for row, _ in kept.values()))
    return len(kept)


def _is_same(a: Row, b: Row) -> bool:
    """Return whether two rows have the same values, apart from facts about the machine."""
    one, two = ({key: x for key, x in row.values.items() if key not in MACHINE_KEYS} for row in (a, b))
    return a.measure == "speed" or one == two


def _covers(stored: Any, wanted: Any, defaults: Any) -> bool:
    if not isinstance(stored, Mapping) or not isinstance(wanted, Mapping):
        return bool(stored == wanted)
    known = defaults if isinstance(defaults, Mapping) else {}
    same = all(key in wanted and _covers(x, wanted[key], known.get(key)) for key, x in stored.items())
    return same and all(key in known and known[key] == x for key, x in wanted.items() if key not in stored)


def _read_last_line(file: BinaryIO) -> bytes:
    """Return what follows the last line end of an open file."""
    size, tail, step = file.seek(0, os.SEEK_END), b"", 1 << 16
    while b"\n" not in tail and len(tail) < size:
        start = file.seek(max(0, size - len(tail) - step))
        tail, step = file.read(size - start), 2 * step
    return tail.rpartition(b"\n")[2]


def _is_torn(tail: bytes) -> bool:
    """Return whether a last line without a line end is only a part of a row."""
    try:
        return bool(tail) and json.loads(tail.decode("utf-8")) is None
    except (ValueError, RecursionError):
        return True


def _list_values(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            yield from _list_values(value)
        else:
            yield key, value
