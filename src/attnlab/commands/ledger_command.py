"""`attnlab ledger`: list the rows of ledgers, and merge those of several machines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.config import split_pairs
from attnlab.experiments.ledger import FILE, Ledger, Row, merge_ledgers
from attnlab.terminal import show_table

SHOWN = ("task", "attention", "item", "corpus", "role", "experiment")  # recipe keys that tell rows apart for a reader


def find_ledger(path: Path) -> Path:
    """Return a ledger file, given it or its folder."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no ledger there; a ledger is a file named {FILE}")
    return file


def show_ledger(path: Path, settings: Sequence[str], *, limit: int | None) -> None:
    """Print the rows of a ledger that have these recipe values."""
    ledger = Ledger(find_ledger(path))
    rows = ledger.select(split_pairs(settings))
    shown = rows if limit is None else rows[:limit]
    columns = ["recipe", "what", "seed", "measure", "edition", "values", "s", "hardware", "commit"]
    show_table(f"{len(rows)} of {len(ledger.rows())} rows in {ledger.path}", columns, [_list_columns(x) for x in shown])
    if len(shown) < len(rows):
        print(f"{len(rows) - len(shown)} more rows; --limit shows more, key=value selects")


def merge_files(paths: Sequence[Path], out: Path) -> None:
    """Join ledgers into one file."""
    out = out / FILE if out.is_dir() else out
    count = merge_ledgers([find_ledger(path) for path in paths], out)
    print(f"{out}: {count} rows")


def _list_columns(row: Row) -> list[Any]:
    known = {key: value for part in (row.recipe, *_list_parts(row)) for key, value in part.items()}
    what = ", ".join(str(known[key]) for key in SHOWN if key in known)
    values = f"failed: {row.failed[:60]}" if row.failed else ", ".join(list(row.values)[:4])
    about = row.provenance
    return [row.digest, what, "–" if row.seed is None else row.seed, row.measure, row.edition, values, row.wall_s,
            about.get("hardware", "–"), about.get("commit", "–")]  # fmt: skip


def _list_parts(row: Row) -> list[dict[str, Any]]:
    return [part for part in row.recipe.values() if isinstance(part, dict)]
