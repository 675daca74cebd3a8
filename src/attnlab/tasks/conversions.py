"""Convert archives with one file per example to one file per part, the layout of ATTNLAB_DATA."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from attnlab.tasks.unpack import read_members

REVIEW = re.compile(r"[^/]+/(train|test)/(neg|pos)/(\d+)_(\d+)\.txt")  # aclImdb/train/neg/12416_3.txt
POST = re.compile(r"[^/]+-(train|test)/(rec\.sport\.(?:baseball|hockey))/(\d+)")  # 20news-bydate-test/…/104


def convert_imdb(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield train.tsv and test.tsv of aclImdb_v1: label (0 or 1), rating, number, text; by label, then number."""
    rows: dict[str, list[tuple[int, int, int, str]]] = {"train": [], "test": []}
    for (part, label, number, rating), data in _match_members(archive, REVIEW):
        text = " ".join(data.decode("utf-8").split("\t")).replace("\n", " ")
        rows[part].append((int(label == "pos"), int(number), int(rating), text))
    for part, examples in rows.items():
        lines = [f"{label}\t{rating}\t{number}\t{text}\n" for label, number, rating, text in sorted(examples)]
        yield f"{part}.tsv", "".join(lines).encode()


def convert_newsgroups(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield train.jsonl and test.jsonl of 20news-bydate, only baseball and hockey: label, id, text with its header."""
    rows: dict[str, list[tuple[str, int, str]]] = {"train": [], "test": []}
    for (part, group, number), data in _match_members(archive, POST):
        rows[part].append((group, int(number), data.decode("latin-1")))
    for part, examples in rows.items():
        lines = [json.dumps({"label": group, "id": str(k), "text": text}) + "\n" for group, k, text in sorted(examples)]
        yield f"{part}.jsonl", "".join(lines).encode()


def _match_members(archive: Path, pattern: re.Pattern[str]) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Yield the groups of the members whose names match, and their content."""
    for name, pieces in read_members(archive, lambda name: bool(pattern.fullmatch(name))):
        if match := pattern.fullmatch(name):
            yield match.groups(), b"".join(pieces)
