"""attnlab align: two files of text to lines of links, in one direction or in both, and their score."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnlab.aligning import Asked, Choosing, Pairs, align
from attnlab.aligning.extraction import Tick
from attnlab.analysis.alignment import Score, score
from attnlab.analysis.symmetrise import SYMMETRISATIONS, Links
from attnlab.config import suggest_nearest
from attnlab.files import write_text
from attnlab.tasks.links import Gold, format_links, read_gold
from attnlab.tasks.text import load_moses, read_parallel


@dataclass(frozen=True)
class Options:
    """What `attnlab align --help` lists."""

    by: str | None = None
    setting: str | None = None
    layer: str | None = None
    head: str | None = None
    best_on_text: tuple[str, str] | None = None
    reverse: str | None = None
    symmetrise: str | None = None
    tokenize: str = "none"
    pair: str | None = None
    train_on: tuple[str, str] | None = None
    diagonal: bool = False
    gold: str | None = None
    gold_format: str | None = None
    gold_base: int | None = None
    bootstrap: int = 1000
    scores: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.tokenize not in ("none", "moses"):
            raise ValueError(f"--tokenize must be none (words are between white space) or moses, not {self.tokenize!r}")
        if self.tokenize == "moses" and len((self.pair or "").split("-")) != 2:
            raise ValueError("--tokenize moses asks for the languages: say --pair, as --pair de-en")
        if self.symmetrise and not self.reverse:
            raise ValueError("--symmetrise joins two directions: name the other model with --reverse")
        if self.symmetrise and self.symmetrise not in SYMMETRISATIONS:
            known = ", ".join(SYMMETRISATIONS)
            guess = suggest_nearest(self.symmetrise, SYMMETRISATIONS)
            raise ValueError(f"--symmetrise must be one of {known}, not {self.symmetrise!r}{guess}")
        if self.scores and self.reverse:
            raise ValueError("--scores are those of one direction: leave out --reverse, or --scores")


@dataclass(frozen=True)
class AlignedFiles:
    lines: list[str]  # one for each line of the text, in Pharaoh's format
    notes: list[str]
    score: Score | None


def align_files(
    model: str, source: Path, target: Path, options: Options, *, tick: Tick = lambda done, of: None
) -> AlignedFiles:
    """The links of two files of which line k of one translates line k of the other."""
    pairs = read_words(source, target, options)
    gold = _gold(options.gold, pairs, options)
    asked = _asked(pairs, options)
    answer = align(model, pairs, asked.beside(model, options.reverse or model), tick=tick)
    notes, links = list(answer.notes), answer.aligned.links()
    if options.reverse:
        turned = _turned(asked).beside(options.reverse, model)
        back = align(options.reverse, (pairs[1], pairs[0]), turned, tick=tick)
        join = SYMMETRISATIONS[options.symmetrise or "grow-diag-final-and"]
        links = [join(ahead, _turn(behind)) for ahead, behind in zip(links, back.aligned.links(), strict=True)]
        notes += [f"reverse: {note}" for note in back.notes]
    told = answer.aligned.scores() if options.scores else links
    lines = [format_links(of_pair, scores=options.scores) for of_pair in told]
    found = score(links, gold.sure, gold.possible, bootstrap=options.bootstrap) if gold else None
    return AlignedFiles(lines, notes, found)


def write_alignment(outcome: AlignedFiles, out: Path | None) -> None:
    """Write the lines to a file or to standard output, and the notes and the score to standard error."""
    text = "".join(f"{line}\n" for line in outcome.lines)
    if out is None:
        sys.stdout.write(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
    for line in [*outcome.notes, *([str(outcome.score)] if outcome.score else [])]:
        sys.stderr.write(f"{line}\n")


def read_words(source: Path, target: Path, options: Options) -> Pairs:
    """The words of each line: between white space, or as Moses cuts them."""
    lines: Sequence[list[str]] = read_parallel(source, target)
    if options.tokenize == "moses":
        languages = (options.pair or "").split("-")
        lines = [[*map(load_moses(language)[0], side)] for language, side in zip(languages, lines, strict=True)]
    return [line.split() for line in lines[0]], [line.split() for line in lines[1]]


def _asked(pairs: Pairs, options: Options) -> Asked:
    layer, head = _rule(options.layer), _rule(options.head)
    files = {file for _, file in (layer, head) if file}
    if len(files) > 1:
        raise ValueError("layer and head are chosen on one file of gold links; two are named")
    file = next(iter(files), options.gold)
    text = _read_words(options.best_on_text, options)
    choosing = None
    if "best-on" in (layer[0], head[0]):
        found = _gold(file, text or pairs, options)
        choosing = Choosing(found, text) if found else None
    elif text:
        raise ValueError("--best-on-text is the text of gold links: name them, as --layer best-on:FILE")
    return Asked(
        by=options.by, setting=options.setting, layer=layer[0], head=head[0], choosing=choosing,
        diagonal=options.diagonal, train_on=_read_words(options.train_on, options), device=options.device,
    )  # fmt: skip


def _read_words(files: tuple[str, str] | None, options: Options) -> Pairs | None:
    return read_words(Path(files[0]), Path(files[1]), options) if files else None


def _rule(text: str | None) -> tuple[str | None, str | None]:
    """best-on:FILE, best-on=FILE or "best-on FILE" as (best-on, FILE); anything else as it is."""
    match = re.fullmatch(r"best-on[ :=]\s*(.+)", text or "")
    return ("best-on", match[1]) if match else (text, None)


def _gold(file: str | None, pairs: Pairs, options: Options) -> Gold | None:
    if file is None:
        return None
    lengths = [(len(x), len(y)) for x, y in zip(*pairs, strict=True)]
    return read_gold(Path(file), lengths, form=options.gold_format, base=options.gold_base)


def _turned(asked: Asked) -> Asked:
    """The same of the other direction."""
    choosing, train_on = asked.choosing, asked.train_on
    if choosing:
        gold = Gold([*map(_turn, choosing.gold.sure)], [*map(_turn, choosing.gold.possible)])
        choosing = Choosing(gold, choosing.pairs and (choosing.pairs[1], choosing.pairs[0]))
    return replace(asked, choosing=choosing, train_on=train_on and (train_on[1], train_on[0]))


def _turn(links: Links) -> Links:
    return frozenset((source, target) for target, source in links)
