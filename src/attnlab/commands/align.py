"""attnlab align: align the words of two text files, in one direction or in both, and score the links."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from attnlab.aligning import AlignmentRequest, Pairs, SelectionGold, align
from attnlab.analysis.alignment import score
from attnlab.analysis.symmetrise import SYMMETRISATIONS, Links
from attnlab.config import Natural, check_fields, suggest_nearest
from attnlab.files import write_text
from attnlab.tasks.links import Gold, format_links, read_gold
from attnlab.tasks.text import load_moses, read_parallel
from attnlab.terminal import Bar


@dataclass(frozen=True, kw_only=True)
class AlignOptions(AlignmentRequest):
    """The options that `attnlab align --help` lists: a request whose texts and links are in files."""

    best_on_text: tuple[str, str] | None = None
    reverse: str | None = None
    symmetrise: str | None = None
    tokenize: str = "none"
    pair: str | None = None
    train_files: tuple[str, str] | None = None  # --train-on
    gold: str | None = None
    gold_format: str | None = None
    gold_base: Annotated[int, "[0, 1]"] | None = None
    bootstrap: Natural = 1000
    scores: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokenize not in ("none", "moses"):
            raise ValueError(f"--tokenize must be none (split at white space) or moses, got {self.tokenize!r}")
        if self.tokenize == "moses" and len((self.pair or "").split("-")) != 2:
            raise ValueError("--tokenize moses needs the languages: pass --pair, for example --pair de-en")
        if self.symmetrise and not self.reverse:
            raise ValueError("--symmetrise needs two directions: pass the model of the other one with --reverse")
        if self.symmetrise and self.symmetrise not in SYMMETRISATIONS:
            known = ", ".join(SYMMETRISATIONS)
            guess = suggest_nearest(self.symmetrise, SYMMETRISATIONS)
            raise ValueError(f"--symmetrise must be one of {known}, got {self.symmetrise!r}{guess}")
        if self.scores and self.reverse:
            raise ValueError("--scores needs a single direction: omit --reverse or --scores")


def align_files(model: str, source: Path, target: Path, options: AlignOptions, out: Path | None) -> None:
    """Align two files; line k of one is the translation of line k of the other.

    Write the links in Pharaoh's format to a file or to standard output, and notes and score to standard error.
    """
    pairs = read_words(source, target, options)
    gold = _read_gold(options.gold, pairs, options)
    request = _read_request(pairs, options)
    with Bar(1) as progress:
        result = align(model, pairs, request.for_model(model, options.reverse or model), tick=progress.tick)
        notes, links = list(result.notes), result.aligned.links()
        if options.reverse:
            reversed_request = _reverse_request(request).for_model(options.reverse, model)
            back = align(options.reverse, (pairs[1], pairs[0]), reversed_request, tick=progress.tick)
            join = SYMMETRISATIONS[options.symmetrise or "grow-diag-final-and"]
            links = [*map(join, links, map(_reverse_links, back.aligned.links()))]
            notes += [f"reverse: {note}" for note in back.notes]
    written = result.aligned.scores() if options.scores else links
    text = "".join(f"{format_links(pair, scores=options.scores)}\n" for pair in written)
    if gold:
        notes.append(str(score(links, gold.sure, gold.possible, bootstrap=options.bootstrap)))
    if out is None:
        sys.stdout.write(text)
    else:
        write_text(out, text)
    sys.stderr.writelines(f"{note}\n" for note in notes)


def read_words(source: Path, target: Path, options: AlignOptions) -> Pairs:
    """Read the words of each line, split at white space or by Moses."""
    lines: Sequence[list[str]] = read_parallel(source, target)
    if options.tokenize == "moses":
        languages = (options.pair or "").split("-")
        lines = [[*map(load_moses(language)[0], side)] for language, side in zip(languages, lines, strict=True)]
    return [line.split() for line in lines[0]], [line.split() for line in lines[1]]


def _read_request(pairs: Pairs, options: AlignOptions) -> AlignmentRequest:
    """Return the request with the texts and links that the options name."""
    (layer, layer_file), (head, head_file) = _parse_rule(options.layer), _parse_rule(options.head)
    if layer_file and head_file and layer_file != head_file:
        raise ValueError("layer and head must use the same file of gold links, got two files")
    text = _read_optional_words(options.best_on_text, options)
    selection = None
    if "best-on" in (layer, head):
        gold = _read_gold(layer_file or head_file or options.gold, text or pairs, options)
        selection = SelectionGold(gold, text) if gold else None
    elif text:
        raise ValueError("--best-on-text needs gold links: pass --layer best-on:FILE or --head best-on:FILE")
    train_on = _read_optional_words(options.train_files, options)
    return replace(options, layer=layer, head=head, selection=selection, train_on=train_on)


def _read_optional_words(files: tuple[str, str] | None, options: AlignOptions) -> Pairs | None:
    return read_words(Path(files[0]), Path(files[1]), options) if files else None


def _parse_rule(text: str | None) -> tuple[str | None, str | None]:
    """Split best-on:FILE, best-on=FILE or "best-on FILE" into (best-on, FILE). Other texts come back with None."""
    match = re.fullmatch(r"best-on[ :=]\s*(.+)", text or "")
    return ("best-on", match[1]) if match else (text, None)


def _read_gold(file: str | None, pairs: Pairs, options: AlignOptions) -> Gold | None:
    if file is None:
        return None
    lengths = [(len(x), len(y)) for x, y in zip(*pairs, strict=True)]
    return read_gold(Path(file), lengths, form=options.gold_format, base=options.gold_base)


def _reverse_request(request: AlignmentRequest) -> AlignmentRequest:
    """Return the request for the other direction."""
    selection, train_on = request.selection, request.train_on
    if selection:
        gold = Gold([*map(_reverse_links, selection.gold.sure)], [*map(_reverse_links, selection.gold.possible)])
        selection = SelectionGold(gold, selection.pairs and (selection.pairs[1], selection.pairs[0]))
    return replace(request, selection=selection, train_on=train_on and (train_on[1], train_on[0]))


def _reverse_links(links: Links) -> Links:
    return frozenset((source, target) for target, source in links)
