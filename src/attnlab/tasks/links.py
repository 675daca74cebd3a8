"""Read and write word alignments: links (source word, target word), counted from 0 in memory.

pharaoh   one line per sentence pair: 0-0 1-2 2-1        counted from 0; 1p2 and 1?2 are possible links
talp      the same, counted from 1: 1-1 2p3
naacl     one line per link: sentence source target [S|P [confidence]]        counted from 1; word 0 is NULL, no link
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnlab.files.user_files import read_text
from attnlab.tasks.lexicon import Links
from attnlab.tasks.text import get_suffix

Format = Literal["pharaoh", "talp", "naacl"]
FIRST: dict[Format, int] = {"pharaoh": 0, "talp": 1, "naacl": 1}  # number of the first word
SUFFIXES: dict[str, Format] = {".talp": "talp", ".naacl": "naacl", ".wa": "naacl", ".nonullalign": "naacl"}
LINK = re.compile(r"(\d{1,9})([-p?])(\d{1,9})(?::\S+)?")  # optionally with a score, as attnlab align --scores writes it

Lengths = Sequence[tuple[int, int]]  # number of source and target words of each pair


@dataclass(frozen=True)
class Gold:
    """Manual links of each sentence pair. Sure links are also possible links."""

    sure: list[Links]
    possible: list[Links]

    def __len__(self) -> int:
        return len(self.sure)


def format_links(links: Iterable[tuple[int, int]] | Mapping[tuple[int, int], float], *, scores: bool = False) -> str:
    """Format the links of one pair as a Pharaoh line, sorted; with scores=True, add the values of the mapping."""
    ordered = sorted(links)
    if scores and isinstance(links, Mapping):
        return " ".join(f"{s}-{t}:{links[s, t]:.4g}" for s, t in ordered)
    return " ".join(f"{s}-{t}" for s, t in ordered)


def read_gold(path: Path, lengths: Lengths, *, form: str | None = None, base: int | None = None) -> Gold:
    """Read the links of a file for sentence pairs of these lengths.

    form   the format; default: by the file's suffix
    base   the number of the first word, 0 or 1; default: that of the format
    """
    chosen = check_format(form) if form is not None else SUFFIXES.get(get_suffix(path), "pharaoh")
    if base not in (None, 0, 1):
        raise ValueError(f"the number of the first word must be 0 or 1, got {base}")
    first = FIRST[chosen] if base is None else base
    text = read_text(path)
    if not text:
        raise ValueError(f"{path}: the file is empty; write an empty line for a pair without links")
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if chosen == "naacl":
        rows = _read_naacl(path, lines, len(lengths), null=first == 1)
    else:
        if len(lines) != len(lengths):
            raise ValueError(
                f"{path} has {len(lines):,} lines for {len(lengths):,} sentence pairs: write one line of links per pair"
            )
        rows = _read_pharaoh(path, lines)
    gold = Gold([frozenset()] * len(lengths), [frozenset()] * len(lengths))
    for pair, line, source, target, sure in rows:
        link = _count_from_0(path, line, (source, target), first, lengths[pair])
        gold.possible[pair] |= {link}
        if sure:
            gold.sure[pair] |= {link}
    return gold


def check_format(name: str) -> Format:
    """Return the name if it is a format of alignments; otherwise raise ValueError."""
    if name not in FIRST:
        raise ValueError(f"unknown alignment format {name!r}; available: {', '.join(FIRST)}")
    return name


Row = tuple[int, int, int, int, bool]  # pair, line, source, target, sure


def _read_pharaoh(path: Path, lines: Sequence[str]) -> Iterable[Row]:
    for pair, line in enumerate(lines):
        for word in line.split():
            if not (match := LINK.fullmatch(word)):
                raise ValueError(f"{path}:{pair + 1}: {word!r:.60} must be a link such as 3-4 (sure) or 3p4 (possible)")
            yield pair, pair + 1, int(match[1]), int(match[3]), match[2] == "-"


def _read_naacl(path: Path, lines: Sequence[str], pairs: int, *, null: bool) -> Iterable[Row]:
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        if len(words) < 3 or not all(word.isdecimal() and len(word) < 10 for word in words[:3]):
            raise ValueError(
                f"{path}:{number}: a line must be sentence, source word, target word, S or P, got {line!r:.60}"
            )
        mark = next((word.upper() for word in words[3:4] if not word.replace(".", "", 1).isdecimal()), "S")
        if mark not in ("S", "P"):
            raise ValueError(f"{path}:{number}: a link must be S (sure) or P (possible), got {words[3]!r:.60}")
        sentence, source, target = (int(word) for word in words[:3])
        if not 1 <= sentence <= pairs:
            raise ValueError(f"{path}:{number}: sentence must be from 1 to {pairs:,}, got {sentence}")
        if not null or (source and target):
            yield sentence - 1, number, source, target, mark == "S"


def _count_from_0(
    path: Path, line: int, link: tuple[int, int], first: int, lengths: tuple[int, int]
) -> tuple[int, int]:
    """Return a link counted from 0. Raises ValueError if a word is outside its sentence."""
    places = link[0] - first, link[1] - first
    for number, side, place, length in zip(link, ("source", "target"), places, lengths, strict=True):
        if not 0 <= place < length:
            raise ValueError(
                f"{path}:{line}: {side} word {number} (counted from {first}) is not in its sentence of {length} words; "
                f"does the file count from {1 - first} (--gold-base {1 - first}) or belong to another text?"
            )
    return places
