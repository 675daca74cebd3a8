"""attnlab diagnose: judge a parallel corpus or a labelled file by its counts, and print and write the result."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from attnlab.counting.cooccurrence import alpha, beta, trans
from attnlab.counting.diagnosis import VERDICTS, Diagnosis, diagnose
from attnlab.files import write_text
from attnlab.provenance import collect_provenance
from attnlab.report.count_figures import LIMIT, draw_count_tables, draw_word_scores
from attnlab.report.figures import save_figure
from attnlab.report.page import Command, Facts, Part, Table, render_page
from attnlab.report.page import Text as Paragraph
from attnlab.tasks.labelled import split_words
from attnlab.tasks.task import SPECIALS
from attnlab.tasks.text import LABELLED_FILES, get_suffix, read_labelled, read_parallel
from attnlab.tasks.vocabulary import Subwords, Vocabulary, Words
from attnlab.terminal import show_table

IdPairs = list[tuple[Sequence[int], Sequence[int]]]
SHOWN = 200  # words on the page
COLUMNS = ["word", "count", "gain", "at_least", "common", "score", "agreement", "chance", "from", "share", "learnable"]


@dataclass(frozen=True, eq=False)
class CorpusText:
    """A corpus as pairs of token ids, with the word of each id and notes on skipped pairs."""

    name: str
    pairs: IdPairs
    source: list[str]  # by id
    target: list[str]
    labelled: bool
    notes: list[str]


def diagnose_files(
    source: Path, target: Path | None, *, sentence: int | None, out: Path | None, command: str, **options: Any
) -> None:
    """Judge a corpus, print the verdict, and write tables, figures and a page to `out`, if it is given.

    sentence  number of the pair whose counts are drawn, from 1; needs `out`
    options   see `read_corpus`
    """
    if sentence is not None and out is None:
        raise ValueError("--sentence draws a figure and needs --out: give the folder to write it to")
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: give a folder, which is created if it does not exist")
    text = read_corpus(source, target, **options)
    if sentence is not None and not 1 <= sentence <= (count := len(text.pairs)):
        raise ValueError(f"sentence must be between 1 and {count:,}, the number of pairs; got {sentence}")
    found = diagnose(text.pairs, sizes=(len(text.source), len(text.target)))
    table = name_words(found, text)
    show_table(text.name, ["measure", "value"], list(summarise(found).items()))
    if (hard := list_hardest(table, 12)).rows:
        what = "labels" if text.labelled else "words"
        show_table(f"{what} that the counts cannot teach", hard.columns, hard.rows)
    for line in list_notes(text, table):
        print(line)
    if out is not None:
        print("written:", *write_report(found, text, table, out, sentence, command))


def read_corpus(
    source: Path,
    target: Path | None = None,
    *,
    limit: int | None = None,
    vocabulary: int = 8000,
    units: str = "word",
    text: str = "text",
    label: str = "label",
) -> CorpusText:
    """Read two files, line k of one the translation of line k of the other; or one .csv, .tsv or .jsonl with labels."""
    if limit is not None and limit < 2:
        raise ValueError(f"limit must be at least 2, got {limit}: the two halves of the corpus are compared")
    if vocabulary <= len(SPECIALS):
        raise ValueError(f"vocabulary must be larger than the {len(SPECIALS)} special tokens, got {vocabulary}")
    if units not in ("word", "subword"):
        raise ValueError(f"units must be word or subword, got {units!r}")
    if target is not None:
        return _read_parallel(source, target, limit, vocabulary, units)
    if get_suffix(source) not in LABELLED_FILES:
        kinds = ", ".join(LABELLED_FILES)
        raise ValueError(f"{source}: a single file must be labelled text ({kinds}); give SRC and TGT for parallel text")
    return _read_labelled(source, limit, vocabulary, units, text, label)


def name_words(found: Diagnosis, text: CorpusText) -> pd.DataFrame:
    """Return the table of output words with words in place of ids."""
    words = found.words
    names = {"word": [text.target[o] for o in words["id"]], "from": [text.source[i] for i in words["from_id"]]}
    return words.assign(**names)[COLUMNS]


def summarise(found: Diagnosis) -> dict[str, str]:
    """Return the printed measures, in order."""
    return {
        "pairs": f"{found.pairs:,}",
        "output words judged": f"{found.judged:,}",
        "gain (nats)": _format_number(found.gain),
        "common (nats)": _format_number(found.common),
        "score = gain − common": _format_number(found.score),
        "expected agreement": f"{found.agreement:.1%} ({found.chance:.1%} by chance)",
        "learnable": f"{found.learnable:.1%} of output words",
        "verdict": VERDICTS[found.verdict],
    }


def list_hardest(table: pd.DataFrame, number: int) -> Table:
    """Return the `number` most frequent words that the counts cannot teach, without words that occur once."""
    rows = table[~table["learnable"] & (table["count"] > 1)].head(number)
    columns = ["word", "count", "gain", "at least", "common", "agreement"]
    return Table(columns, [
        [row["word"], f"{row['count']:,}", *(_format_number(row[name]) for name in ("gain", "at_least", "common")),
         f"{row['agreement']:.0%}"]
        for _, row in rows.iterrows()
    ])  # fmt: skip


def list_notes(text: CorpusText, table: pd.DataFrame) -> list[str]:
    """Say which pairs were left out and how many words are too rare to be judged."""
    once, what = int((table["count"] == 1).sum()), "labels" if text.labelled else "output words"
    rare = f"{once:,} of {len(table):,} {what} occur only once beside several source words"
    return [*text.notes, *([f"{rare}: too rare to learn from counts"] if once else [])]


def write_report(
    found: Diagnosis, text: CorpusText, table: pd.DataFrame, folder: Path, sentence: int | None, command: str
) -> list[Path]:
    """Write words.csv, summary.json, the figures words and counts-N (.png, .svg, .pdf) and report.html to a folder.

    counts-N shows the counts of pair N: of `sentence`, or of the first three pairs without an empty side.
    """
    whole = (number for number, pair in enumerate(text.pairs, start=1) if all(map(len, pair)))
    numbers = [sentence] if sentence is not None else list(islice(whole, 3))
    columns = (table[name].to_numpy() for name in ("count", "gain", "common"))
    pictures = {}
    if len(table):
        pictures["words"] = (draw_word_scores(*columns), "Gain and common of each output word against its frequency.")
    pictures |= {f"counts-{n}": (_draw_counts(found, text, n), f"Counts of the words of pair {n}.") for n in numbers}
    about = {"text": text.name, "notes": list_notes(text, table), "verdict": found.verdict, "pairs": found.pairs}
    about |= {name: getattr(found, name) for name in ("judged", "score", "gain", "common", "agreement", "chance")}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "words.csv", table.to_csv(index=False))
    write_text(folder / "summary.json", json.dumps(about, ensure_ascii=False, indent=1) + "\n")
    figures = [save_figure(folder / name, *drawn) for name, drawn in pictures.items()]
    write_text(folder / "report.html", _render_report(found, text, table, figures, command))
    names = ("words.csv", "summary.json", *(f"{name}.png" for name in pictures), "report.html")
    return [folder / name for name in names]


def _render_report(
    found: Diagnosis, text: CorpusText, table: pd.DataFrame, figures: Sequence[Part], command: str
) -> str:
    first = table.head(SHOWN)
    cells = [[_format_cell(x) for x in row] for row in first.itertuples(index=False)]
    caption = f"The {len(first):,} most frequent of {len(table):,} output words; words.csv has all of them."
    verdict: list[Part] = [Facts(summarise(found)), *(Paragraph(note) for note in list_notes(text, table))]
    sections: list[tuple[str, Sequence[Part]]] = [
        ("Can attention be learnt from this corpus?", verdict),
        ("Words", [Paragraph(caption), Table(COLUMNS, cells)]),
        ("Figures", figures),
        ("How to repeat it", [Command(command), Facts(collect_provenance(torch.device("cpu")))]),
    ]
    return render_page(f"attnlab diagnose: {text.name}", sections)


def _draw_counts(found: Diagnosis, text: CorpusText, number: int) -> Figure:
    """Draw C for one sentence, and α of a translated sentence or Trans of a labelled one."""
    source, target = (list(dict.fromkeys(ids)) for ids in text.pairs[number - 1])
    if text.labelled:
        target = list(range(len(text.target)))
    if not (source and target):
        raise ValueError(f"sentence {number} has an empty side: choose another --sentence")
    source, target = source[:LIMIT], target[:LIMIT]
    scores = beta(trans(found.table), source, target)
    tables = {"C: co-occurrences, weighted 1/L": found.table[source].toarray()[:, target]}
    tables |= {"Trans(label | word)": scores.T} if text.labelled else {"α: share of each source word": alpha(scores).T}
    return draw_count_tables(tables, [text.source[i] for i in source], [text.target[o] for o in target])


def _read_parallel(source: Path, target: Path, limit: int | None, size: int, units: str) -> CorpusText:
    lines = [side[:limit] for side in read_parallel(source, target)]
    if units == "subword":
        joint = Subwords.train(lines[0] + lines[1], size, shrink=True)
        vocabularies: list[Vocabulary] = [joint, joint]
    else:
        lines = [[" ".join(split_text(line)) for line in side] for side in lines]
        vocabularies = [_count_words(side, size) for side in lines]
    sides = [list(vocabulary.encode(side)) for vocabulary, side in zip(vocabularies, lines, strict=True)]
    pairs = list(zip(*sides, strict=True))
    types = [vocabulary.get_tokens(range(len(vocabulary))) for vocabulary in vocabularies]
    return CorpusText(f"{source} and {target}", pairs, types[0], types[1], False, _describe_skipped(pairs))


def _read_labelled(path: Path, limit: int | None, size: int, units: str, text: str, label: str) -> CorpusText:
    texts, labels = (side[:limit] for side in read_labelled(path, text, label))
    names = sorted(set(labels))
    if len(names) < 2:
        raise ValueError(f"{path}: every example has the label {names[0]!r}; at least two labels are needed")
    lines = texts if units == "subword" else [" ".join(split_words(line)) for line in texts]
    vocabulary: Vocabulary = (
        Subwords.train(lines, size, shrink=True) if units == "subword" else _count_words(lines, size)
    )
    number = {name: k for k, name in enumerate(names)}
    pairs: IdPairs = list(zip(vocabulary.encode(lines), ([number[name]] for name in labels), strict=True))
    words = vocabulary.get_tokens(range(len(vocabulary)))
    return CorpusText(str(path), pairs, words, names, True, _describe_skipped(pairs))


def split_text(line: str) -> list[str]:
    """Split a line into lower-case words and single punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", line.lower())


def _count_words(lines: list[str], size: int) -> Words:
    """Return a vocabulary of the most frequent words: `size` entries with the special tokens."""
    return Words(Words.from_lines(lines).words[len(SPECIALS) : size])


def _describe_skipped(pairs: IdPairs) -> list[str]:
    full = [x for x, y in pairs if len(x) and len(y)]
    empty, single = len(pairs) - len(full), sum(len(set(x)) == 1 for x in full)
    repeated = "have a source of one word, or of one word repeated: they offer no choice and are not judged"
    counts = {"have an empty side and are left out": empty, repeated: single}
    return [f"{count:,} of {len(pairs):,} pairs {what}" for what, count in counts.items() if count]


def _format_cell(x: object) -> object:
    if isinstance(x, bool):
        return "yes" if x else "no"
    return _format_number(x) if isinstance(x, float) else x


def _format_number(value: float) -> str:
    return f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no −0.000
