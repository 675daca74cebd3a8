"""Read text files strictly: lines, sentence pairs and labelled examples. Errors name the file and the line."""

import csv
import html
import io
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress, zip_longest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from attnlab.files.user_files import (
    CHUNK,
    MOST_LINE,
    apply_budget,
    exceed_budget,
    iterate_lines,
    open_bytes,
    parse_json,
    read_text,
)

Pairs = tuple[list[str], list[str]]
Labelled = tuple[list[str], list[str]]  # texts and their labels
Reader = Callable[[], tuple[list[str], list[str]]]

SURROGATE = re.compile("[\ud800-\udfff]")  # which JSON can write, but UTF-8 cannot
PAIR_FILES, LABELLED_FILES = (".tsv", ".tmx"), (".csv", ".tsv", ".jsonl")


def iterate_sentences(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Raises ValueError if it has none or only blank lines."""
    is_blank = True
    for line in iterate_lines(path):
        is_blank = is_blank and not line.strip()
        yield line
    if is_blank:
        raise ValueError(f"{path}: the file is empty or has only blank lines")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file. Raises ValueError if it has none or only blank lines."""
    return list(iterate_sentences(path))


def iterate_parallel(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs of two files in which line k of one translates line k of the other. Memory holds one pair."""
    sides = (iterate_sentences(source), iterate_sentences(target))
    for count, (left, right) in enumerate(zip_longest(*sides)):
        if left is None or right is None:
            more = count + 1 + sum(1 for side in sides for _ in side)
            counts = (count, more) if left is None else (more, count)
            raise ValueError(
                f"{source} has {counts[0]:,} lines and {target} {counts[1]:,}: line {count + 1:,} has no partner"
            )
        yield left, right


def read_parallel(source: Path, target: Path) -> Pairs:
    """Read two files in which line k of one translates line k of the other."""
    left, right = zip(*iterate_parallel(source, target), strict=True)
    return list(left), list(right)


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
    for unit in _iterate_elements(path, "tu"):
        texts = {language: _find_segment(unit, language) for language in languages}
        if all(text is not None for text in texts.values()):
            for side, language in zip(pairs, languages, strict=True):
                side.append(texts[language] or "")
        unit.clear()
    if not pairs[0]:
        raise ValueError(f"{path}: no unit has both {' and '.join(languages)}; set pair= to two languages of the file")
    return pairs


def _iterate_elements(path: Path, tag: str) -> Iterator[ElementTree.Element]:
    """Yield the elements of an XML file with a tag, each when it is complete. expat refuses entities that explode."""
    parser: Any = ElementTree.XMLPullParser()
    with open_bytes(path) as file:
        while piece := file.read(CHUNK):
            try:
                parser.feed(piece)
                elements = [element for _, element in parser.read_events()]
            except (ElementTree.ParseError, LookupError, ValueError) as error:
                raise _describe_xml(path, error) from None
            yield from (element for element in elements if _strip_namespace(element.tag) == tag)
    try:
        parser.close()
    except ElementTree.ParseError as error:
        raise _describe_xml(path, error) from None


def _describe_xml(path: Path, error: Exception) -> ValueError:
    if isinstance(error, ElementTree.ParseError):
        return ValueError(f"{path}:{error.position[0]}: not well-formed XML ({error})")
    return ValueError(f"{path}: {error}; save the file as UTF-8")


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
    texts, labels = zip(*iterate_labelled(path, text, label), strict=True)
    return list(texts), list(labels)


def iterate_labelled(path: Path, text: str, label: str) -> Iterator[tuple[str, str]]:
    """Yield the texts and labels that `read_labelled` reads. Memory holds one row."""
    kind, is_empty = get_suffix(path), True
    if kind not in LABELLED_FILES:
        raise ValueError(f"{path}: labelled text must be in a {', '.join(LABELLED_FILES)} file (optionally .gz)")
    rows = _read_json_rows(path) if kind == ".jsonl" else _read_csv_rows(path, "\t" if kind == ".tsv" else ",")
    for number, row in rows:
        for field in (text, label):
            if row.get(field) in (None, ""):
                filled = ", ".join(f"{key!s:.40}" for key in row if key is not None and row[key] not in (None, ""))
                name, cause = "label" if field == label else "text", _guess_cause(kind, field, row)
                raise ValueError(
                    f"{path}:{number}: no {name} (field {field!r}); fields with a value: {filled or 'none'}{cause}"
                )
            if SURROGATE.search(str(row[field])):
                raise ValueError(f"{path}:{number}: field {field!r} has half of a surrogate pair (\\ud800 … \\udfff)")
        is_empty = False
        yield str(row[text]), str(row[label])
    if is_empty:
        raise ValueError(f"{path}: no examples")


def _guess_cause(kind: str, field: str, row: Mapping[str, Any]) -> str:
    """Return a question about a CSV or TSV file whose header lacks a field."""
    if kind == ".jsonl" or field in row:
        return ""
    names = [name for name in row if name is not None]  # cells beyond the header have the name None
    other = next((mark for mark in ";\t,|" if len(names) == 1 and mark in names[0]), None)
    return f"; is it separated by {other!r}?" if other else "; has it a header line?"


def _read_json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(iterate_sentences(path), start=1):
        if not line.strip():
            continue
        yield number, parse_json(line, f"{path}:{number}")


def _read_csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(min(apply_budget(MOST_LINE), 2**31 - 1))
    lines = (part for line in iterate_lines(path, ends=True) for part in io.StringIO(line, newline=""))  # also at \r
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    first = 1
    try:
        while reader.fieldnames is not None:
            first = reader.line_num + 1
            yield first, next(reader)
    except StopIteration:
        return
    except csv.Error as error:
        cause = "a quote is not closed" if "unexpected end" in str(error) else str(error)
        problem = f"{path}:{first}: {cause}"
        raise exceed_budget(problem) if "limit" in str(error) else ValueError(problem) from None


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
