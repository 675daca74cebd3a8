"""Convert archives with one file per example to one file per part, the layout of ATTNLAB_DATA."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from attnlab.tasks.unpack import read_members

GROUPS = ("rec.sport.baseball", "rec.sport.hockey")


def convert_imdb(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield train.tsv and test.tsv of aclImdb_v1: label (0 or 1), rating, number, text; by label, then number."""
    rows: dict[str, list[tuple[int, int, int, str]]] = {"train": [], "test": []}
    labels = {"neg": 0, "pos": 1}
    for name, pieces in read_members(archive, lambda name: _parse_imdb_name(name) is not None):
        part, label, number, rating = _parse_imdb_name(name) or ("", "", 0, 0)
        text = " ".join(b"".join(pieces).decode("utf-8").split("\t"))
        rows[part].append((labels[label], number, rating, text.replace("\n", " ")))
    for part, examples in rows.items():
        lines = [f"{label}\t{rating}\t{number}\t{text}\n" for label, number, rating, text in sorted(examples)]
        yield f"{part}.tsv", "".join(lines).encode()


def _parse_imdb_name(name: str) -> tuple[str, str, int, int] | None:
    """Return part, label, number and rating of a name such as aclImdb/train/neg/12416_3.txt, or None."""
    parts = PurePosixPath(name).parts
    if len(parts) != 4 or parts[1] not in ("train", "test") or parts[2] not in ("neg", "pos"):
        return None
    number, _, rating = parts[3].removesuffix(".txt").partition("_")
    return (parts[1], parts[2], int(number), int(rating)) if number.isdigit() and rating.isdigit() else None


def convert_newsgroups(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield train.jsonl and test.jsonl of 20news-bydate, only baseball and hockey: label, id, text with its header."""
    rows: dict[str, list[tuple[str, int, str]]] = {"train": [], "test": []}
    for name, pieces in read_members(
        archive, lambda name: _parse_group(name) in GROUPS and name.rpartition("/")[2].isdigit()
    ):
        part = name.partition("/")[0].rpartition("-")[2]
        text = b"".join(pieces).decode("latin-1")
        rows[part].append((_parse_group(name), int(name.rpartition("/")[2]), text))
    for part, examples in rows.items():
        lines = [json.dumps({"label": group, "id": str(k), "text": text}) + "\n" for group, k, text in sorted(examples)]
        yield f"{part}.jsonl", "".join(lines).encode()


def _parse_group(name: str) -> str:
    parts = PurePosixPath(name).parts
    return parts[1] if len(parts) == 3 else ""
