"""Read text files strictly: lines, sentence pairs and labelled examples. Errors name the file and the line."""

import csv
import gzip
import html
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

Pairs = tuple[list[str], list[str]]
Labelled = tuple[list[str], list[str]]  # texts and their labels
Reader = Callable[[], tuple[list[str], list[str]]]

PAIR_FILES, LABELLED_FILES = (".tsv", ".tmx"), (".csv", ".tsv", ".jsonl")


def read_bytes(path: Path) -> bytes:
    """Read a file, decompressing it if its name ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def read_text(path: Path) -> str:
    """Read a UTF-8 file without its byte order mark."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{data[error.start]:02x}"
        raise ValueError(f"{path}:{line}: not UTF-8 ({byte}); convert it, for example with iconv -t utf-8") from None


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file. Only \\n and \\r\\n end a line; a sentence may contain other Unicode separators."""
    lines = read_text(path).replace("\r\n", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    if not any(line.strip() for line in lines):
        raise ValueError(f"{path}: the file is empty or has only blank lines")
    return lines


def read_parallel(source: Path, target: Path) -> Pairs:
    """Read two files in which line k of one translates line k of the other."""
    left, right = read_lines(source), read_lines(target)
    if len(left) != len(right):
        raise ValueError(
            f"{source} has {len(left):,} lines and {target} {len(right):,}: "
            f"line {min(len(left), len(right)) + 1:,} has no partner"
        )
    return left, right


def read_pairs(path: Path, languages: Sequence[str]) -> Pairs:
    """Read pairs from a TSV file (source, target; further columns are ignored) or a TMX file (by language)."""
    kind = get_suffix(path)
    if kind == ".tsv":
        rows = [line.split("\t") for line in read_lines(path)]
        for number, row in enumerate(rows, start=1):
            if len(row) < 2:
                raise ValueError(f"{path}:{number}: no tab; a line must be source, tab, target")
        return [row[0] for row in rows], [row[1] for row in rows]
    if kind == ".tmx":
        return _read_tmx(path, languages)
    raise ValueError(f"{path}: sentence pairs must be in a {' or '.join(PAIR_FILES)} file (optionally .gz)")


def _read_tmx(path: Path, languages: Sequence[str]) -> Pairs:
    pairs: Pairs = ([], [])
    try:
        for _, unit in ElementTree.iterparse(io.BytesIO(read_bytes(path))):
            if _strip_namespace(unit.tag) != "tu":
                continue
            texts = {language: _find_segment(unit, language) for language in languages}
            if all(text is not None for text in texts.values()):
                for side, language in zip(pairs, languages, strict=True):
                    side.append(texts[language] or "")
            unit.clear()
    except ElementTree.ParseError as error:
        raise ValueError(f"{path}:{error.position[0]}: not well-formed XML ({error})") from None
    if not pairs[0]:
        raise ValueError(f"{path}: no unit has both {' and '.join(languages)}; set pair= to two languages of the file")
    return pairs


def _find_segment(unit: ElementTree.Element, language: str) -> str | None:
    """Return the text of a translation unit in a language ("de" matches "de-AT"), without markup and line breaks."""
    for variant in unit:
        code = variant.get("{http://www.w3.org/XML/1998/namespace}lang") or variant.get("lang") or ""
        if _strip_namespace(variant.tag) == "tuv" and re.split("[-_]", code.lower())[0] == language:
            segment = next((child for child in variant if _strip_namespace(child.tag) == "seg"), None)
            return None if segment is None else " ".join("".join(segment.itertext()).split())
    return None


def _strip_namespace(tag: str) -> str:
    return tag.rpartition("}")[2]


def read_sgm(path: Path) -> list[str]:
    """Read the segments of a WMT test set."""
    return [" ".join(html.unescape(s).split()) for s in re.findall(r"<seg[^>]*>(.*?)</seg>", read_text(path), re.S)]


def read_labelled(path: Path, text: str, label: str) -> Labelled:
    """Read texts and labels from the named fields of a CSV or TSV file with a header, or of a JSON-lines file."""
    kind = get_suffix(path)
    if kind not in LABELLED_FILES:
        raise ValueError(f"{path}: labelled text must be in a {', '.join(LABELLED_FILES)} file (optionally .gz)")
    rows = _read_json_rows(path) if kind == ".jsonl" else _read_csv_rows(path, "\t" if kind == ".tsv" else ",")
    texts, labels = [], []
    for number, row in rows:
        for field in (text, label):
            if row.get(field) in (None, ""):
                filled = ", ".join(str(key) for key in row if row[key] not in (None, "")) or "none"
                name = "label" if field == label else "text"
                raise ValueError(f"{path}:{number}: no {name} (field {field!r}); fields with a value: {filled}")
        texts.append(str(row[text]))
        labels.append(str(row[label]))
    if not texts:
        raise ValueError(f"{path}: no examples")
    return texts, labels


def _read_json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: a line must be a JSON object, got {type(row).__name__}")
        yield number, row


def _read_csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(2**27)
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    first = 1
    try:
        while reader.fieldnames is not None:
            first = reader.line_num + 1
            yield first, next(reader)
    except StopIteration:
        return
    except csv.Error as error:
        raise ValueError(f"{path}:{first}: {error}") from None


def get_suffix(path: Path) -> str:
    """Return the lower-case suffix without .gz: ".tsv" for both x.tsv and x.tsv.gz."""
    return path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def draw_held_out(keys: Sequence[str], share: float, seed: int) -> np.ndarray:
    """Return a mask that holds out about a share of the examples, drawn by key: equal keys stay together."""
    numbers: dict[str, int] = {}
    group = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    order = np.random.default_rng(seed).permutation(len(numbers))
    before = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=len(numbers))[order])[:-1]])
    return np.isin(group, order[before < share * len(keys)])


def draw_mask(count: int, limit: int | None, seed: int) -> np.ndarray:
    """Return a mask (count,) that keeps a random `limit` of `count` examples, or all of them if limit is None."""
    order = np.random.default_rng(seed).permutation(count)
    return order < (count if limit is None else limit)


def pick_rows(columns: Pairs, mask: np.ndarray) -> Pairs:
    """Return two columns without the rows where mask (rows,) is False."""
    return list(compress(columns[0], mask)), list(compress(columns[1], mask))


def hold_out(read_all: Reader, column: int, share: float, seed: int, limit: int | None = None) -> dict[str, Reader]:
    """Split one text into readers of "train" and "valid"; rows with an equal entry in the column stay together.

    The validation part has about a share of the rows, at most `limit`. Its reader raises ValueError if a part is empty.
    """

    @lru_cache(maxsize=1)
    def read_parts() -> tuple[Pairs, Pairs]:
        rows = read_all()
        count = len(rows[column])
        part = share if limit is None else min(share, limit / count)
        out = draw_held_out(rows[column], part, seed)
        if out.all() or not out.any():
            raise ValueError(f"{count} examples are too few to hold out {part:.0%} of them; give validation data")
        return pick_rows(rows, ~out), pick_rows(rows, out)

    return {"train": lambda: read_parts()[0], "valid": lambda: read_parts()[1]}


def is_numeric(line: str) -> bool:
    """Return whether a line has digits but no letters."""
    kinds = {unicodedata.category(character)[0] for character in line}
    return "N" in kinds and "L" not in kinds


def load_moses(language: str) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Load the Moses tokenizer and detokenizer of a language (sacremoses), without escaping."""
    from sacremoses import MosesDetokenizer, MosesTokenizer

    tokenizer, detokenizer = MosesTokenizer(lang=language), MosesDetokenizer(lang=language)
    return (
        lambda line: tokenizer.tokenize(line, escape=False, return_str=True),
        lambda line: detokenizer.detokenize(line.split(), unescape=False),
    )
