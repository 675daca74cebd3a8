"""Carry inline tags or labelled spans from the source to the target along word links.

    inline   a line of the source with tags: the <b> red house </b> is <x id="1"/> big
    spans    a line of spans of source words, from 0, the end excluded: 0-2:PER 5-6:LOC; empty for none

The target span of a source span is the smallest range of target words that covers the words linked to it. If a word
outside the span is linked into that range, the range is cut to its largest part without such words. A span without
links is dropped and counted. An empty tag goes before the word linked to the word after it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnlab.analysis.symmetrise import Link

TAG = re.compile(r"<(/?)([A-Za-z][\w:.-]*)([^<>]*?)(/?)>")
SPAN = re.compile(r"(\d{1,9})-(\d{1,9}):(\S+)")


@dataclass(frozen=True)
class TaggedSpan:
    """Words start … stop − 1 and their opening and closing tag; an empty tag has start = stop and no closing."""

    start: int
    stop: int
    opening: str
    closing: str


def parse_tags(line: str, words: Sequence[str], where: str) -> list[TaggedSpan]:
    """Read the tags of a source line whose words without tags must be `words`. Raises ValueError otherwise.

    A tag stands between words or, if the words are only then those of the source, inside one: then the span has the
    whole word.
    """
    gap = " " if TAG.sub(" ", line).split() == list(words) else ""
    if TAG.sub(gap, line).split() != list(words):
        raise ValueError(f"{where}: without its tags the line must be the source line, and differs from it")
    spans: list[TaggedSpan] = []
    open_tags: list[tuple[str, int, str]] = []  # name, start, text
    before, at = "", 0
    for match in TAG.finditer(line):
        before, at = before + line[at : match.start()] + gap, match.end()
        count = len(before.split())
        is_inside = bool(before[-1:].strip() and TAG.sub("", line[at:])[:1].strip())
        closes, name, _, empty = match.groups()
        if empty:
            spans.append(TaggedSpan(count, count, match[0], ""))
        elif not closes:
            open_tags.append((name, count - is_inside, match[0]))
        else:
            if not open_tags or open_tags[-1][0] != name:
                raise ValueError(f"{where}: {match[0]} closes no open tag; tags must be nested")
            _, start, opening = open_tags.pop()
            spans.append(TaggedSpan(start, count, opening, match[0]))
    if open_tags:
        raise ValueError(f"{where}: {open_tags[-1][2]} is never closed; write an empty tag as <{open_tags[-1][0]}/>")
    return spans


def parse_spans(line: str, words: Sequence[str], where: str) -> list[TaggedSpan]:
    """Read labelled spans such as 0-2:PER."""
    spans = []
    for text in line.split():
        if not (match := SPAN.fullmatch(text)):
            raise ValueError(f"{where}: {text!r:.60} must be a span such as 0-2:PER (source words 0 and 1)")
        start, stop = int(match[1]), int(match[2])
        if not 0 <= start < stop <= len(words):
            raise ValueError(f"{where}: span {text} is not in its sentence of {len(words)} words")
        spans.append(TaggedSpan(start, stop, match[3], ""))
    return spans


def project_span(span: TaggedSpan, links: Iterable[Link], target_words: int) -> tuple[int, int] | None:
    """Return the range of target words of a source span, or None if it has no links."""
    pairs = set(links)
    if span.start == span.stop:
        after = [t for s, t in pairs if s == span.start]
        before = [t + 1 for s, t in pairs if s == span.start - 1]
        place = min(after) if after else max(before) if before else 0 if span.start == 0 else target_words
        return place, place
    inside = {t for s, t in pairs if span.start <= s < span.stop}
    outside = {t for s, t in pairs if not span.start <= s < span.stop} - inside
    if not inside:
        return None
    parts: list[tuple[int, int]] = []
    start: int | None = None
    for t in range(min(inside), max(inside) + 2):
        usable = t <= max(inside) and t not in outside
        if usable and start is None:
            start = t
        elif not usable and start is not None:
            parts.append((start, t))
            start = None
    held = [part for part in parts if inside & set(range(*part))]
    best = max(held, key=lambda part: (len(inside & set(range(*part))), -part[0]))
    own = sorted(inside & set(range(*best)))
    return own[0], own[-1] + 1


def write_tags(spans: Sequence[TaggedSpan], links: Iterable[Link], target: Sequence[str]) -> tuple[str, int]:
    """Return the target line with the tags of the source, and the number of spans that were dropped."""
    pairs = list(links)
    placed = [(span, project_span(span, pairs, len(target))) for span in spans]
    kept = _nest([(span, place) for span, place in placed if place is not None])
    before: list[list[str]] = [[] for _ in range(len(target) + 1)]
    after: list[list[str]] = [[] for _ in range(len(target) + 1)]
    for span, (start, stop) in sorted(kept, key=lambda each: (each[1][0], -each[1][1])):
        before[start].append(span.opening)
        if span.closing:
            after[stop].insert(0, span.closing)
    words: list[str] = []
    for k in range(len(target) + 1):
        words += [*after[k], *before[k], *target[k : k + 1]]
    return " ".join(words), len(spans) - len(kept)


def write_spans(spans: Sequence[TaggedSpan], links: Iterable[Link], target: Sequence[str]) -> tuple[str, int]:
    """Return the labelled spans of the target, and the number of spans that were dropped."""
    pairs = list(links)
    placed = [(span, project_span(span, pairs, len(target))) for span in spans]
    texts = [f"{place[0]}-{place[1]}:{span.opening}" for span, place in placed if place is not None]
    return " ".join(texts), len(spans) - len(texts)


Placed = tuple[TaggedSpan, tuple[int, int]]


def _nest(placed: list[Placed]) -> list[Placed]:
    """Drop spans that would cross another one, the shorter source span first: XML must nest."""
    kept: list[Placed] = []
    for span, (start, stop) in sorted(placed, key=lambda each: each[0].start - each[0].stop):
        if not any(a < start < b < stop or start < a < stop < b for _, (a, b) in kept):
            kept.append((span, (start, stop)))
    return kept
