"""Text files: lines, pairs and labelled examples, read strictly. Whatever is wrong is named by file and line."""

import csv
import gzip
import html
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

Pairs = tuple[list[str], list[str]]
Labelled = tuple[list[str], list[str]]  # texts and their labels

PAIR_FILES, LABELLED_FILES = (".tsv", ".tmx"), (".csv", ".tsv", ".jsonl")


def read_bytes(path: Path) -> bytes:
    """A file's content, decompressed if its name ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file") from None
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def read_text(path: Path) -> str:
    """A file as UTF-8, without a byte order mark; the error names the line that is not."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); convert it, say with iconv -t utf-8"
        ) from None


def read_lines(path: Path) -> list[str]:
    """The lines of a file, ended by \\n or \\r\\n alone: a sentence may hold other Unicode line separators."""
    lines = read_text(path).replace("\r\n", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    if not any(line.strip() for line in lines):
        raise ValueError(f"{path}: the file is empty, or has blank lines alone")
    return lines


def read_parallel(source: Path, target: Path) -> Pairs:
    """Two files, line k of one the translation of line k of the other."""
    left, right = read_lines(source), read_lines(target)
    if len(left) != len(right):
        raise ValueError(
            f"{source} has {len(left):,} lines but {target} has {len(right):,}: line k of one must translate line k "
            f"of the other; line {min(len(left), len(right)) + 1:,} is the first without a partner"
        )
    return left, right


def read_pairs(path: Path, languages: Sequence[str]) -> Pairs:
    """Pairs from a TSV file (source, target, anything more is left out) or a TMX file (by their languages)."""
    kind = get_suffix(path)
    if kind == ".tsv":
        rows = [line.split("\t") for line in read_lines(path)]
        for number, row in enumerate(rows, start=1):
            if len(row) < 2:
                raise ValueError(f"{path}:{number}: no tab; a line is source, tab, target")
        return [row[0] for row in rows], [row[1] for row in rows]
    if kind == ".tmx":
        return _read_tmx(path, languages)
    raise ValueError(f"{path}: pairs are read from {' or '.join(PAIR_FILES)} files (.gz too)")


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
        raise ValueError(f"{path}: no unit has both {' and '.join(languages)}; name the languages with pair=")
    return pairs


def _find_segment(unit: ElementTree.Element, language: str) -> str | None:
    """The text of a translation unit in a language ("de" also takes "de-AT"), without mark-up and line breaks."""
    for variant in unit:
        code = variant.get("{http://www.w3.org/XML/1998/namespace}lang") or variant.get("lang") or ""
        if _strip_namespace(variant.tag) == "tuv" and re.split("[-_]", code.lower())[0] == language:
            segment = next((child for child in variant if _strip_namespace(child.tag) == "seg"), None)
            return None if segment is None else " ".join("".join(segment.itertext()).split())
    return None


def _strip_namespace(tag: str) -> str:
    return tag.rpartition("}")[2]


def read_sgm(path: Path) -> list[str]:
    """The segments of one of WMT's test sets."""
    return [" ".join(html.unescape(s).split()) for s in re.findall(r"<seg[^>]*>(.*?)</seg>", read_text(path), re.S)]


def read_labelled(path: Path, text: str, label: str) -> Labelled:
    """Texts and labels from the named fields of a CSV or TSV file with a header, or of a JSON-lines file."""
    kind = get_suffix(path)
    if kind not in LABELLED_FILES:
        raise ValueError(f"{path}: labelled text is read from {', '.join(LABELLED_FILES)} files (.gz too)")
    rows = _read_json_rows(path) if kind == ".jsonl" else _read_csv_rows(path, "\t" if kind == ".tsv" else ",")
    texts, labels = [], []
    for number, row in rows:
        for field in (text, label):
            if row.get(field) in (None, ""):
                have = ", ".join(str(key) for key in row if row[key] not in (None, ""))
                what = "label" if field == label else "text"
                raise ValueError(f"{path}:{number}: no {what} (field {field!r}); there are {have or 'none'}")
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
            raise ValueError(f"{path}:{number}: a line must be a JSON object, not {type(row).__name__}")
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
    """'.tsv' of both x.tsv and x.tsv.gz."""
    return path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def draw_held_out(keys: Sequence[str], share: float, seed: int) -> np.ndarray:
    """Which examples are held out: about a share of them, drawn by key, so that equal keys stay together."""
    numbers: dict[str, int] = {}
    group = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    order = np.random.default_rng(seed).permutation(len(numbers))
    before = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=len(numbers))[order])[:-1]])
    return np.isin(group, order[before < share * len(keys)])


def draw_mask(count: int, most: int | None, seed: int) -> np.ndarray:
    """Which of so many examples are kept where at most `most` may be: all, or a draw of that many; bool (count,)."""
    order = np.random.default_rng(seed).permutation(count)
    return order < (count if most is None else most)


def is_numeric(line: str) -> bool:
    """No letter at all, but a digit."""
    kinds = {unicodedata.category(character)[0] for character in line}
    return "N" in kinds and "L" not in kinds


def load_moses(language: str) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Moses' tokeniser and detokeniser of a language (sacremoses), without escaping."""
    try:
        from sacremoses import MosesDetokenizer, MosesTokenizer
    except ImportError:
        raise ImportError("moses=true needs sacremoses: pip install sacremoses") from None
    tokenizer, detokenizer = MosesTokenizer(lang=language), MosesDetokenizer(lang=language)
    return (
        lambda line: tokenizer.tokenize(line, escape=False, return_str=True),
        lambda line: detokenizer.detokenize(line.split(), unescape=False),
    )
