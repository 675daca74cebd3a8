"""A page of sentence pairs with their word links drawn as lines, gold links beside them.

A line is solid if a gold link confirms it, or if there are no gold links; red if it contradicts them; dashed grey if a
sure gold link is missing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Link = tuple[int, int]
HEIGHT, WIDE, GAP = 90, 8.2, 14.0  # of the drawing, of a character and between words, in px


@dataclass(frozen=True)
class LinkedPair:
    """One sentence pair; sure and possible are None without gold links."""

    number: int
    source: Sequence[str]
    target: Sequence[str]
    links: frozenset[Link]
    sure: frozenset[Link] | None = None
    possible: frozenset[Link] | None = None


@dataclass(frozen=True)
class LinkDrawing:
    """Sentence pairs as drawings, a Part of a page."""

    pairs: Sequence[LinkedPair]

    def html(self) -> str:
        return "".join(_draw_pair(pair) for pair in self.pairs)


def _draw_pair(pair: LinkedPair) -> str:
    tops, bottoms = (_place_words(words) for words in (pair.source, pair.target))
    width = max(tops[-1][1] if tops else 0, bottoms[-1][1] if bottoms else 0) + GAP
    lines = [
        f"<line x1='{_middle(tops[s]):.0f}' y1='22' x2='{_middle(bottoms[t]):.0f}' y2='{HEIGHT - 20}' {style}>"
        f"<title>{escape(pair.source[s])} – {escape(pair.target[t])}: {what}</title></line>"
        for s, t, style, what in _list_lines(pair)
    ]
    words = [
        f"<text x='{start:.0f}' y='{y}'>{escape(word)}</text>"
        for side, places, y in ((pair.source, tops, 16), (pair.target, bottoms, HEIGHT - 6))
        for word, (start, _) in zip(side, places, strict=True)
    ]
    label = escape(f"pair {pair.number}: {' '.join(pair.source)} – {' '.join(pair.target)}")
    size = f"width='{width:.0f}' height='{HEIGHT}' viewBox='0 0 {width:.0f} {HEIGHT}'"
    drawing = f"<svg role='img' aria-label='{label}' {size} font-family='monospace' font-size='13' fill='currentColor'>"
    return f"<h3>Pair {pair.number}</h3><div class='table'>{drawing}{''.join(lines)}{''.join(words)}</svg></div>"


def _list_lines(pair: LinkedPair) -> Iterable[tuple[int, int, str, str]]:
    plain, wrong = "stroke='#3b6fb6' stroke-width='1.6'", "stroke='#c0392b' stroke-width='1.6'"
    missing = "stroke='#888' stroke-width='1.4' stroke-dasharray='4 3'"
    allowed = None if pair.sure is None else pair.sure | (pair.possible or frozenset())
    for s, t in sorted(pair.links):
        right = allowed is None or (s, t) in allowed
        yield s, t, plain if right else wrong, "linked" if allowed is None else "right" if right else "wrong"
    for s, t in sorted((pair.sure or frozenset()) - pair.links):
        yield s, t, missing, "missing"


def _place_words(words: Sequence[str]) -> list[tuple[float, float]]:
    places, at = [], GAP
    for word in words:
        places.append((at, at + WIDE * len(word)))
        at += WIDE * len(word) + GAP
    return places


def _middle(place: tuple[float, float]) -> float:
    return (place[0] + place[1]) / 2
