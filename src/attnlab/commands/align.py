"""attnlab align: align the words of two text files, in one direction or in both, and score the links.

Attention and encoders read a file in chunks of CHUNK lines, and align them in parts of about half a minute. With --out,
finished parts are in OUT.partial, and OUT.partial.json says what was chosen; the same command continues after the last
whole line, and renames the file.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from attnlab.aligning import AlignmentRequest, MapAligner, SelectionGold, align
from attnlab.aligning.choice import SINGLE
from attnlab.aligning.exporting import check_converted
from attnlab.aligning.map_aligner import reverse_gold
from attnlab.aligning.request import Pairs, is_word_model
from attnlab.analysis.alignment import score
from attnlab.analysis.symmetrise import SYMMETRISATIONS, Link, Links
from attnlab.commands.align_products import EXPORTS, check_tags, join_lines, write_heads, write_products
from attnlab.commands.output_files import check_outputs
from attnlab.commands.partial_links import PartialLinks
from attnlab.config import Natural, check_fields, suggest_nearest
from attnlab.files import replace_file
from attnlab.tasks.links import Gold, format_links, read_gold
from attnlab.tasks.numbered_text import NumberedText
from attnlab.tasks.text import iterate_parallel, load_moses
from attnlab.terminal import Bar, resumable
from attnlab.training.runs import choose_device

CHUNK = 10_000  # lines
PART, SLOW_PART = 1_000, 100  # lines that a CPU aligns before it writes them; by probe or gradient


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
    project: str | None = None
    terms: str | None = None
    show: str | None = None
    export: str | None = None
    export_to: str | None = None
    guided_text: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.export is not None and self.export not in EXPORTS:
            guess = suggest_nearest(self.export, EXPORTS)
            raise ValueError(f"--export must be one of {', '.join(EXPORTS)}, got {self.export!r}{guess}")
        if self.export == "guided" and not self.guided_text:
            raise ValueError("--export guided needs the subword files to train on: pass --guided-text SRC TGT")
        if self.export == "ctranslate2" and not self.export_to:
            raise ValueError("--export ctranslate2 needs the folder of the converted model: pass --export-to FOLDER")
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
        if self.symmetrise and self.decide:
            raise ValueError(
                "--symmetrise joins the links of two directions, --decide their soft maps: pass one of them"
            )
        if self.scores and (self.symmetrise or (self.reverse and is_word_model(self.reverse))):
            raise ValueError("--scores needs a single direction or soft maps: omit --symmetrise or --scores")

    def needs_products(self) -> bool:
        """Return whether links are used for more than writing them."""
        return bool(self.project or self.terms or self.show or self.guided_text)

    def check_files(self, source: Path, target: Path, out: Path | None) -> None:
        """Raise an error for a file to write that cannot be written, or that is also read."""
        files = {"--gold": [self.gold], "--project": [self.project], "--best-on-text": self.best_on_text}
        files |= {"--train-on": self.train_files, "--guided-text": self.guided_text}
        files |= {"best-on": [_parse_rule(place)[1] for place in (self.layer, self.head)]}
        read = {Path(file): name for name, group in files.items() for file in group or () if file}
        written = {"--out": out, "--terms": self.terms, "--show": self.show}
        written["the file of projected tags"] = f"{self.project}.projected" if self.project else None
        written["the file of guided links"] = f"{self.guided_text[0]}.align" if self.guided_text else None
        named = {name: Path(file) for name, file in written.items() if file}
        check_outputs(named, {source: "SRC", target: "TGT"} | read)


def align_files(model: str, source: Path, target: Path, options: AlignOptions, out: Path | None) -> None:
    """Align two files; line k of one is the translation of line k of the other.

    Write the links in Pharaoh's format to a file or to standard output, and notes and score to standard error.
    """
    options.check_files(source, target, out)
    hard = bool(options.symmetrise) or any(map(is_word_model, filter(None, (model, options.reverse))))
    if hard and options.scores and options.reverse:
        raise ValueError("--scores needs a single direction or soft maps: omit --reverse or --scores")
    if options.export == "ctranslate2":
        if is_word_model(model):
            raise ValueError(f"--export ctranslate2 needs a translator, and {model} has no attention")
        check_converted(Path(options.export_to or ""))
    if options.project:
        check_tags(_iterate_words(source, target, options), options.project)
    gold = _read_gold(options.gold, read_words(source, target, options), options) if options.gold else None
    write = _align_at_once if hard else _align_in_chunks
    links, notes = write(model, source, target, options, out)
    if gold is not None:
        notes.append(str(score(links, gold.sure, gold.possible, bootstrap=options.bootstrap)))
    if options.needs_products():
        notes += write_products(join_lines(_iterate_words(source, target, options), links), options, gold)
    if options.export == "ctranslate2":
        words = _iterate_words(source, target, options)
        notes.append(write_heads(model, options, words, Path(options.export_to or "")))
    sys.stderr.writelines(f"{note}\n" for note in notes)


def _iterate_words(source: Path, target: Path, options: AlignOptions) -> Iterator[tuple[list[str], list[str]]]:
    for _, (left, right) in _read_chunks(source, target, options, 0):
        yield from zip(map(list, left), map(list, right), strict=True)


def _align_at_once(
    model: str, source: Path, target: Path, options: AlignOptions, out: Path | None
) -> tuple[list[Links], list[str]]:
    """Align with IBM Model 1, or join the links of two directions that are decided apart."""
    pairs = read_words(source, target, options)
    request = _read_request(pairs, options)
    with Bar(1) as progress:
        result = align(model, pairs, request.for_model(model, options.reverse or model), tick=progress.tick)
        notes, found = list(result.notes), result.aligned.iterate_scores()
        if options.reverse:
            reversed_request = _reverse_request(request).for_model(options.reverse, model)
            back = align(options.reverse, (pairs[1], pairs[0]), reversed_request, tick=progress.tick)
            found = _join_links(found, back.aligned.iterate_scores(), options.symmetrise or "grow-diag-final-and")
            notes += [f"reverse: {note}" for note in back.notes]
    keeps, links = bool(options.gold) or options.needs_products(), []

    def write_lines() -> Iterator[str]:
        for pair in found:
            if keeps:
                links.append(frozenset(pair))
            yield f"{format_links(pair, scores=options.scores)}\n"

    if out is None:
        sys.stdout.writelines(write_lines())
        return links, notes
    with replace_file(out) as scratch, scratch.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(write_lines())
    return links, notes


def _join_links(
    ahead: Iterable[dict[Link, float]], back: Iterable[dict[Link, float]], how: str
) -> Iterator[dict[Link, float]]:
    """Yield the joined links of each pair; their values are 1."""
    for one, other in zip(ahead, back, strict=True):
        joined = SYMMETRISATIONS[how](frozenset(one), frozenset((source, target) for target, source in other))
        yield dict.fromkeys(joined, 1.0)


def _align_in_chunks(
    model: str, source: Path, target: Path, options: AlignOptions, out: Path | None
) -> tuple[list[Links], list[str]]:
    """Align by soft maps, chunk by chunk, and resume a partial file. Links come back only if something reads them."""
    if options.train_files:
        raise ValueError(f"--train-on is for MODEL fertility, hmm, ibm1 or eflomal; omit it for {model}")
    total = sum(1 for _ in iterate_parallel(source, target))  # refuses files of different lengths before any work
    request = _read_request_of_file(source, target, options)
    partial = PartialLinks(out, _describe_command(model, source, target, options))
    done, kept = partial.resume()
    aligner: MapAligner | None = None
    keeps = bool(options.gold) or options.needs_products()
    links: list[Links] = [frozenset(map(_parse_link, line.split())) for line in kept] if keeps else []
    with Bar(total) as progress, resumable() if out else progress, partial:
        for first, pairs in _read_chunks(source, target, options, done):
            if aligner is None:
                sample = next(_read_chunks(source, target, options, 0))[1] if done else pairs
                aligner = _open_aligner(model, request, options, sample, partial)
                aligner.aligned, aligner.lines = sum(map(bool, kept)), done
            for start, part in _cut_parts(first, pairs, request):

                def tick(now: int, _of: int, start: int = start) -> None:
                    progress.tick(start + now, total)

                found = aligner.align(part, tick)
                partial.write(format_links(each, scores=options.scores) for each in found)
                links += [frozenset(each) for each in found] if keeps else []
                progress.tick(start + len(found), total)
        partial.finish()
    notes = [] if aligner is None else aligner.list_notes()
    return links, [f"resumed after {done:,} lines; any counts are of the later ones", *notes] if done else notes


def _cut_parts(first: int, pairs: Pairs, request: AlignmentRequest) -> Iterator[tuple[int, Pairs]]:
    """Yield parts of a chunk with the number of their first line: what a stopped command has to align again."""
    size = CHUNK if choose_device(request.device).type == "cuda" else SLOW_PART if request.by in SINGLE else PART
    for k in range(0, len(pairs[0]), size):
        yield first + k, (pairs[0][k : k + size], pairs[1][k : k + size])


def _open_aligner(
    model: str, request: AlignmentRequest, options: AlignOptions, pairs: Pairs, partial: PartialLinks
) -> MapAligner:
    """Open the models, and choose what to read, or take the choice of the partial file."""
    aligner = MapAligner.open(model, request, options.reverse)
    if partial.chosen is not None:
        aligner.restore(partial.chosen, pairs)
        return aligner
    aligner.choose(pairs)
    partial.begin([asdict(each) if is_dataclass(each) else each for each in aligner.chosen])
    return aligner


def _describe_command(model: str, source: Path, target: Path, options: AlignOptions) -> dict[str, Any]:
    """Return what the links depend on; a partial file of another command is not resumed."""
    free = (
        "gold",
        "gold_format",
        "gold_base",
        "bootstrap",
        "device",
        "selection",
        "train_on",
        "project",
        "terms",
        "show",
        "export",
        "export_to",
        "guided_text",
    )
    own = {name: value for name, value in vars(options).items() if name not in free}
    files = [[str(path.resolve()), path.stat().st_size] for path in (source, target)]
    return {"model": model, "files": files, "options": {name: str(value) for name, value in own.items()}}


def _read_chunks(source: Path, target: Path, options: AlignOptions, done: int) -> Iterator[tuple[int, Pairs]]:
    """Yield the words of chunks of lines with the number of the first line, from `done` on."""
    lines, splitters = islice(iterate_parallel(source, target), done, None), _open_splitters(options)
    while chunk := list(islice(lines, CHUNK)):
        source_words, target_words = (
            [[*map(sys.intern, split(line[side]))] for line in chunk]  # each word once in memory
            for side, split in enumerate(splitters)
        )
        yield done, (source_words, target_words)
        done += len(chunk)


def read_words(source: Path, target: Path, options: AlignOptions) -> Pairs:
    """Read the words of each line, split at white space or by Moses, in 4 bytes a word."""
    texts, splitters = (NumberedText(), NumberedText()), _open_splitters(options)
    for lines in iterate_parallel(source, target):
        for text, split, line in zip(texts, splitters, lines, strict=True):
            text.append(split(line))
    return texts


def _open_splitters(options: AlignOptions) -> list[Callable[[str], list[str]]]:
    """Return the functions that split a line of the source and of the target."""
    if options.tokenize != "moses":
        return [str.split, str.split]
    tokenizers = [load_moses(language)[0] for language in (options.pair or "").split("-")]
    return [lambda line, tokenize=tokenize: tokenize(line).split() for tokenize in tokenizers]  # type: ignore[misc]


def _read_request_of_file(source: Path, target: Path, options: AlignOptions) -> AlignmentRequest:
    """Return the request; the whole text is read only where gold links of it choose a layer or head."""
    own = any(place and place.startswith("best-on") for place in (options.layer, options.head))
    pairs = read_words(source, target, options) if own and not options.best_on_text else ([], [])
    request = _read_request(pairs, options)
    if own and request.selection and request.selection.pairs is None:
        return replace(request, selection=SelectionGold(request.selection.gold, pairs))
    return request


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
        turned = selection.pairs and (selection.pairs[1], selection.pairs[0])
        selection = SelectionGold(reverse_gold(selection.gold), turned)
    languages = "-".join(reversed(request.languages.split("-"))) if request.languages else None
    prefixes: dict[str, Any] = {
        "prefix": request.reverse_prefix,
        "reverse_prefix": request.prefix,
        "languages": languages,
    }
    return replace(request, selection=selection, train_on=train_on and (train_on[1], train_on[0]), **prefixes)


def _parse_link(text: str) -> tuple[int, int]:
    source, target = text.split(":")[0].split("-")
    return int(source), int(target)
