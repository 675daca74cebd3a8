"""Word alignments as text: links (source word, target word), from 0 inside, as the formats count outside.

pharaoh   a line for each sentence pair: 0-0 1-2 2-1        from 0; 1p2 or 1?2: only possible
talp      the same from 1: 1-1 2p3
naacl     a line for each link: sentence source target [S|P [confidence]]        from 1; word 0 is NULL, no link
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from attnlab.tasks.lexicon import Links
from attnlab.tasks.text import get_suffix, read_text

Format = Literal["pharaoh", "talp", "naacl"]
FORMATS: tuple[Format, ...] = get_args(Format)
FIRST: dict[Format, int] = {"pharaoh": 0, "talp": 1, "naacl": 1}  # what the first word is called
SUFFIXES: dict[str, Format] = {".talp": "talp", ".naacl": "naacl", ".wa": "naacl", ".nonullalign": "naacl"}
LINK = re.compile(r"(\d+)([-p?])(\d+)(?::\S+)?")  # the last: a score, as attnlab align --scores writes it

Lengths = Sequence[tuple[int, int]]  # the words of source and target of each pair


@dataclass(frozen=True)
class Gold:
    """Links made by hand, of each sentence pair; what is sure is possible too."""

    sure: list[Links]
    possible: list[Links]

    def __len__(self) -> int:
        return len(self.sure)


def format_links(links: Iterable[tuple[int, int]] | Mapping[tuple[int, int], float], *, scores: bool = False) -> str:
    """One pair in Pharaoh's format, by source word, then by target word; scores: with the values of a mapping."""
    ordered = sorted(links)
    if scores and isinstance(links, Mapping):
        return " ".join(f"{s}-{t}:{links[s, t]:.4g}" for s, t in ordered)
    return " ".join(f"{s}-{t}" for s, t in ordered)


def read_gold(path: Path, lengths: Lengths, *, form: str | None = None, base: int | None = None) -> Gold:
    """The links of a file for sentence pairs of these lengths; the format by its suffix where it is not said.

    base   what the file calls the first word, where not as its format does
    """
    chosen = check_format(form) if form is not None else SUFFIXES.get(get_suffix(path), "pharaoh")
    if base not in (None, 0, 1):
        raise ValueError(f"the first word of an alignment is called 0 or 1, not {base}")
    first = FIRST[chosen] if base is None else base
    text = read_text(path)
    if not text:
        raise ValueError(f"{path}: the file is empty; a pair without links has an empty line")
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if chosen == "naacl":
        rows = _read_naacl(path, lines, len(lengths), null=first == 1)
    else:
        if len(lines) != len(lengths):
            raise ValueError(
                f"{path} has {len(lines):,} lines for {len(lengths):,} sentence pairs: a line must hold the links of "
                "one pair"
            )
        rows = _read_pharaoh(path, lines)
    gold = Gold([frozenset()] * len(lengths), [frozenset()] * len(lengths))
    found: dict[int, tuple[set[tuple[int, int]], set[tuple[int, int]]]] = {}
    for pair, where, source, target, sure in rows:
        link = _count_from_0(path, where, (source, target), first, lengths[pair])
        of_pair = found.setdefault(pair, (set(), set()))
        of_pair[1].add(link)
        if sure:
            of_pair[0].add(link)
    for pair, (sure_links, possible_links) in found.items():
        gold.sure[pair], gold.possible[pair] = frozenset(sure_links), frozenset(possible_links)
    return gold


def check_format(name: str) -> Format:
    for form in FORMATS:
        if form == name:
            return form
    raise ValueError(f"no format of alignments is called {name!r}; there are {', '.join(FORMATS)}")


Row = tuple[int, int, int, int, bool]  # pair, line, source, target, sure


def _read_pharaoh(path: Path, lines: Sequence[str]) -> Iterable[Row]:
    for pair, line in enumerate(lines):
        for word in line.split():
            if not (match := LINK.fullmatch(word)):
                raise ValueError(f"{path}:{pair + 1}: {word!r} is not a link such as 3-4 (sure) or 3p4 (possible)")
            yield pair, pair + 1, int(match[1]), int(match[3]), match[2] == "-"


def _read_naacl(path: Path, lines: Sequence[str], pairs: int, *, null: bool) -> Iterable[Row]:
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        if len(words) < 3 or not all(word.isdecimal() for word in words[:3]):
            raise ValueError(f"{path}:{number}: a line is sentence, source word, target word, S or P; not {line!r}")
        mark = next((word.upper() for word in words[3:4] if not word.replace(".", "", 1).isdecimal()), "S")
        if mark not in ("S", "P"):
            raise ValueError(f"{path}:{number}: a link is S (sure) or P (possible), not {words[3]!r}")
        sentence, source, target = (int(word) for word in words[:3])
        if not 1 <= sentence <= pairs:
            raise ValueError(f"{path}:{number}: sentence {sentence}; there are 1 to {pairs:,}")
        if not null or (source and target):
            yield sentence - 1, number, source, target, mark == "S"


def _count_from_0(
    path: Path, where: int, link: tuple[int, int], first: int, lengths: tuple[int, int]
) -> tuple[int, int]:
    places = link[0] - first, link[1] - first
    for side, name, place, length in zip(link, ("source", "target"), places, lengths, strict=True):
        if not 0 <= place < length:
            raise ValueError(
                f"{path}:{where}: {name} word {side}, counted from {first}, of a sentence of {length} words; "
                f"does the file count from {1 - first} (--gold-base {1 - first}), or is it of another text?"
            )
    return places
