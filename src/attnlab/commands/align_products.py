"""What attnlab align makes of links: projected tags, terms, a page, links of pieces, heads for CTranslate2."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.aligning.exporting import choose_first_heads, expand_links, measure_first_heads, write_alignment_heads
from attnlab.aligning.map_aligner import MapAligner
from attnlab.aligning.map_choice import spread_sample
from attnlab.aligning.projection import TaggedSpan, parse_spans, parse_tags, write_spans, write_tags
from attnlab.aligning.request import AlignmentRequest, Pairs
from attnlab.aligning.term_list import TermCounter
from attnlab.analysis.symmetrise import Links
from attnlab.files import write_text
from attnlab.report.link_page import LinkDrawing, LinkedPair
from attnlab.report.page import render_page
from attnlab.tasks.links import Gold, format_links
from attnlab.tasks.text import iterate_parallel, read_lines

if TYPE_CHECKING:
    from attnlab.commands.align import AlignOptions

SHOWN = 100  # pairs on a page
EXPORTS = ("ctranslate2", "guided")


@dataclass(frozen=True)
class LinkedLine:
    """One sentence pair with its links."""

    number: int  # from 1
    source: list[str]
    target: list[str]
    links: Links


def check_tags(words: Iterable[tuple[list[str], list[str]]], file: str) -> None:
    """Raise ValueError for a file of tags that does not fit the source text, before anything is aligned."""
    tags, count = read_lines(Path(file)), 0
    for count, (source, _) in enumerate(words, start=1):
        _parse_tags(tags, source, count, file)
    if len(tags) != count:
        raise ValueError(f"{file} has {len(tags):,} lines for {count:,} sentence pairs")


def write_products(lines: Iterable[LinkedLine], options: "AlignOptions", gold: Gold | None) -> list[str]:
    """Write every file that the options ask for, in one pass over the links. Return notes."""
    tags = read_lines(Path(options.project)) if options.project else []
    guided = iterate_parallel(*map(Path, options.guided_text)) if options.guided_text else iter(())
    counter, dropped, count = TermCounter(), 0, 0
    shown: list[LinkedPair] = []
    projected: list[str] = []
    pieces: list[str] = []
    for count, line in enumerate(lines, start=1):
        if options.project:
            text, lost = _project(tags, line, options.project)
            projected.append(text)
            dropped += lost
        if options.terms:
            counter.add(line.source, line.target, line.links)
        if options.guided_text:
            pieces.append(_expand(next(guided, ("", "")), line, options.guided_text))
        if options.show and len(shown) < SHOWN:
            known = (gold.sure[count - 1], gold.possible[count - 1]) if gold else (None, None)
            shown.append(LinkedPair(line.number, line.source, line.target, line.links, *known))
    notes = []
    if options.project:
        notes.append(_write_lines(Path(f"{options.project}.projected"), projected, f"{dropped:,} tags had no place"))
    if options.terms:
        rows = counter.list_terms()
        header = "source\ttarget\tcount\tscore"
        table = [header, *(f"{s}\t{t}\t{n}\t{dice:.3f}" for s, t, n, dice in rows)]
        notes.append(_write_lines(Path(options.terms), table, f"{len(rows):,} terms"))
    if options.guided_text:
        notes.append(_write_lines(Path(f"{options.guided_text[0]}.align"), pieces, "links of pieces"))
    if options.show:
        _write_page(Path(options.show), shown, count, gold is not None)
        notes.append(f"{options.show}: the links of {len(shown):,} of {count:,} pairs")
    return notes


def write_heads(
    model: str, request: AlignmentRequest, pairs: Iterable[tuple[list[str], list[str]]], folder: Path
) -> str:
    """Choose the heads of a translator that align best, and set them in a model that CTranslate2 converted."""
    aligner = MapAligner.open(model, request)
    if not aligner.directions:
        raise ValueError(f"--export ctranslate2 needs a translator with cross attention, and {model} is none")
    full = [(x, y) for x, y in islice(pairs, 10_000) if x and y]
    sample: Pairs = tuple(zip(*(full[k] for k in spread_sample(len(full), 200)), strict=True))  # type: ignore[assignment]
    if not sample:
        raise ValueError("no pair has words on both sides, so no heads can be chosen")
    nats = measure_first_heads(aligner.directions[0].open_pairs(*sample), *sample)
    layer, heads = choose_first_heads(nats)
    write_alignment_heads(folder, layer, heads)
    which = "head 0" if heads == 1 else f"the mean of its first {heads} heads"
    return f"{folder}: CTranslate2 now returns the attention of layer {layer}, {which}"


def _project(tags: list[str], line: LinkedLine, file: str) -> tuple[str, int]:
    spans, is_inline = _parse_tags(tags, line.source, line.number, file)
    return (write_tags if is_inline else write_spans)(spans, line.links, line.target)


def _parse_tags(tags: list[str], source: list[str], number: int, file: str) -> tuple[list[TaggedSpan], bool]:
    """Return the spans of one line, and whether they are inline tags."""
    text = tags[number - 1] if number <= len(tags) else ""
    is_inline = "<" in text or bool(source and text.split() == source)
    return (parse_tags if is_inline else parse_spans)(text, source, f"{file}:{number}"), is_inline


def _expand(texts: tuple[str, str], line: LinkedLine, files: tuple[str, str]) -> str:
    sizes = len(line.source), len(line.target)
    return format_links(expand_links(line.links, *texts, sizes, f"{files[0]}:{line.number}"))


def _write_lines(path: Path, lines: list[str], what: str) -> str:
    write_text(path, "".join(f"{line}\n" for line in lines))
    return f"{path}: {what}"


def _write_page(path: Path, shown: list[LinkedPair], count: int, scored: bool) -> None:
    findings = [f"{len(shown):,} of {count:,} sentence pairs; a line joins two linked words."]
    if scored:
        findings.append("Red lines contradict the gold links; dashed grey lines are sure gold links that are missing.")
    write_text(path, render_page("Word alignment", [("", [LinkDrawing(shown)])], findings=findings))


def join_lines(words: Iterator[tuple[list[str], list[str]]], links: Iterable[Links]) -> Iterator[LinkedLine]:
    """Yield sentence pairs with their links."""
    for number, ((source, target), own) in enumerate(zip(words, links, strict=True), start=1):
        yield LinkedLine(number, source, target, own)
