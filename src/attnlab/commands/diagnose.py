"""attnlab diagnose: read a parallel corpus or a classification file, judge it by its counts, and show the judgement."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from attnlab.counting.cooccurrence import alpha, beta, trans
from attnlab.counting.diagnosis import VERDICTS, Diagnosis
from attnlab.files import write_text
from attnlab.provenance import collect_provenance
from attnlab.report.count_figures import MOST, count_tables, word_scores
from attnlab.report.drawing import draw
from attnlab.report.page import Command, Facts, Part, Table, page
from attnlab.report.page import Text as Paragraph
from attnlab.tasks.labelled import split_words
from attnlab.tasks.task import SPECIALS
from attnlab.tasks.text import LABELLED_FILES, read_labelled, read_parallel, stem_suffix
from attnlab.tasks.vocabulary import Subwords, Vocabulary, Words

IdPairs = list[tuple[Sequence[int], Sequence[int]]]
SHOWN = 200  # words on the page
COLUMNS = ["word", "count", "gain", "at_least", "common", "score", "agreement", "chance", "from", "share", "learnable"]


@dataclass(frozen=True, eq=False)
class CorpusText:
    """Pairs of ids with the words they stand for, and what was done to make them."""

    name: str
    pairs: IdPairs
    source: list[str]  # by id
    target: list[str]
    labelled: bool
    notes: list[str] = field(default_factory=list)

    def check_sentence(self, number: int | None) -> None:
        if number is not None and not 1 <= number <= len(self.pairs):
            raise ValueError(f"sentence {number}: there are {len(self.pairs):,}, counted from 1")


def read(
    source: Path,
    target: Path | None = None,
    *,
    limit: int | None = None,
    vocabulary: int = 8000,
    units: str = "word",
    text: str = "text",
    label: str = "label",
) -> CorpusText:
    """Two files of which line k of one translates line k of the other; or one .csv, .tsv or .jsonl file with labels."""
    if limit is not None and limit < 2:
        raise ValueError(f"limit must be at least 2, not {limit}: the corpus is judged by halves")
    if vocabulary <= len(SPECIALS):
        raise ValueError(f"vocabulary must be more than the {len(SPECIALS)} special tokens, not {vocabulary}")
    if units not in ("word", "subword"):
        raise ValueError(f"units must be word or subword, not {units!r}")
    if target is not None:
        return _parallel(source, target, limit, vocabulary, units)
    if stem_suffix(source) not in LABELLED_FILES:
        kinds = ", ".join(LABELLED_FILES)
        raise ValueError(f"{source}: a single file must be labelled text ({kinds}); else give two files, SRC and TGT")
    return _labelled(source, limit, vocabulary, units, text, label)


def named(found: Diagnosis, text: CorpusText) -> pd.DataFrame:
    """The table of output words, as text."""
    words = found.words
    told = {"word": [text.target[o] for o in words["id"]], "from": [text.source[i] for i in words["from_id"]]}
    return words.assign(**told)[COLUMNS]


def summary(found: Diagnosis) -> dict[str, str]:
    """What is printed, in order."""
    return {
        "pairs": f"{found.pairs:,}",
        "output words judged": f"{found.judged:,}",
        "gain (nats)": _rounded(found.gain),
        "common (nats)": _rounded(found.common),
        "score = gain − common": _rounded(found.score),
        "expected agreement": f"{found.agreement:.1%} ({found.chance:.1%} by a choice at random)",
        "learnable": f"{found.learnable:.1%} of output words",
        "verdict": VERDICTS[found.verdict],
    }


def hardest(table: pd.DataFrame, number: int) -> Table:
    """The words that the counts cannot teach, so many of those that occur more than once, the most frequent first."""
    rows = table[~table["learnable"] & (table["count"] > 1)].head(number)
    columns = ["word", "count", "gain", "at least", "common", "agreement"]
    return Table(columns, [
        [row["word"], f"{row['count']:,}", *(_rounded(row[name]) for name in ("gain", "at_least", "common")),
         f"{row['agreement']:.0%}"]
        for _, row in rows.iterrows()
    ])  # fmt: skip


def notes(text: CorpusText, table: pd.DataFrame) -> list[str]:
    """What was left out, and what could not be judged."""
    once, what = int((table["count"] == 1).sum()), "labels" if text.labelled else "output words"
    seldom = (
        f"{once:,} of {len(table):,} {what} occur once where there is a choice: too seldom to be learnt from counts"
    )
    return [*text.notes, *([seldom] if once else [])]


def write(
    found: Diagnosis, text: CorpusText, table: pd.DataFrame, folder: Path, sentence: int | None, command: str = ""
) -> list[Path]:
    """Tables, figures and a page; count tables are of a sentence, by default of each of the first three with words.

    words.csv, summary.json     words, counts-N   .png, .svg, .pdf     report.html
    """
    whole = (number for number, pair in enumerate(text.pairs, start=1) if all(map(len, pair)))
    numbers = [sentence] if sentence is not None else list(islice(whole, 3))
    text.check_sentence(sentence)
    columns = (table[name].to_numpy() for name in ("count", "gain", "common"))
    pictures = {}
    if len(table):  # some word was judged
        pictures["words"] = (word_scores(*columns), "Gain and common of every output word against its frequency.")
    pictures |= {f"counts-{n}": (_counts(found, text, n), f"Counts of the words of pair {n}.") for n in numbers}
    about = {"text": text.name, "notes": notes(text, table), "verdict": found.verdict, "pairs": found.pairs}
    about |= {name: getattr(found, name) for name in ("judged", "score", "gain", "common", "agreement", "chance")}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "words.csv", table.to_csv(index=False))
    write_text(folder / "summary.json", json.dumps(about, ensure_ascii=False, indent=1) + "\n")
    shown = [draw(folder / name, *drawn) for name, drawn in pictures.items()]
    write_text(folder / "report.html", _page(found, text, table, shown, command))
    return [
        folder / name for name in ("words.csv", "summary.json", *(f"{name}.png" for name in pictures), "report.html")
    ]


def _page(found: Diagnosis, text: CorpusText, table: pd.DataFrame, shown: Sequence[Part], command: str) -> str:
    first = table.head(SHOWN)
    cells = [[_told(x) for x in row] for row in first.itertuples(index=False)]
    said = f"The {len(first):,} most frequent of {len(table):,} output words; words.csv has them all."
    sections: list[tuple[str, Sequence[Part]]] = [
        (
            "Can attention be learnt from it?",
            [Facts(summary(found)), *(Paragraph(note) for note in notes(text, table))],
        ),
        ("Words", [Paragraph(said), Table(COLUMNS, cells)]),
        ("Figures", shown),
        ("Make it again", [*([Command(command)] if command else []), Facts(collect_provenance(torch.device("cpu")))]),
    ]
    return page(f"attnlab diagnose: {text.name}", sections)


def _counts(found: Diagnosis, text: CorpusText, number: int) -> Figure:
    """C and what it makes of one sentence: α where it is translated, Trans where it is labelled."""
    source, target = (list(dict.fromkeys(ids)) for ids in text.pairs[number - 1])
    if text.labelled:
        target = list(range(len(text.target)))
    if not (source and target):
        raise ValueError(f"sentence {number} has an empty side: there is nothing to draw")
    source, target = source[:MOST], target[:MOST]
    table = found.table
    read = beta(trans(table), source, target)
    drawn = {"C: how often together, each pair 1/L": table[source].toarray()[:, target]}
    drawn |= {"Trans(label | word)": read.T} if text.labelled else {"α: which word is responsible": alpha(read).T}
    return count_tables(drawn, [text.source[i] for i in source], [text.target[o] for o in target])


def _parallel(source: Path, target: Path, limit: int | None, size: int, units: str) -> CorpusText:
    lines = [side[:limit] for side in read_parallel(source, target)]
    if units == "subword":
        joint = Subwords.train(lines[0] + lines[1], size)
        vocabularies: list[Vocabulary] = [joint, joint]
    else:
        lines = [[" ".join(split_text(line)) for line in side] for side in lines]
        vocabularies = [_most_frequent(side, size) for side in lines]
    sides = [list(vocabulary.encode(side)) for vocabulary, side in zip(vocabularies, lines, strict=True)]
    pairs = list(zip(*sides, strict=True))
    types = [vocabulary.tokens(range(len(vocabulary))) for vocabulary in vocabularies]
    return CorpusText(f"{source} and {target}", pairs, types[0], types[1], False, _notes(pairs))


def _labelled(path: Path, limit: int | None, size: int, units: str, text: str, label: str) -> CorpusText:
    texts, labels = (side[:limit] for side in read_labelled(path, text, label))
    names = sorted(set(labels))
    if len(names) < 2:
        raise ValueError(f"{path}: every example has the label {names[0]!r}: there is nothing to tell apart")
    lines = texts if units == "subword" else [" ".join(split_words(line)) for line in texts]
    vocabulary: Vocabulary = Subwords.train(lines, size) if units == "subword" else _most_frequent(lines, size)
    number = {name: k for k, name in enumerate(names)}
    pairs: IdPairs = list(zip(vocabulary.encode(lines), ([number[name]] for name in labels), strict=True))
    return CorpusText(str(path), pairs, vocabulary.tokens(range(len(vocabulary))), names, True, _notes(pairs))


def split_text(line: str) -> list[str]:
    """Words in lower case, and every other mark by itself."""
    return re.findall(r"\w+|[^\w\s]", line.lower())


def _most_frequent(lines: list[str], size: int) -> Words:
    """So many words, special tokens included; the others are <unk>."""
    return Words(Words.count(lines).words[len(SPECIALS) : size])


def _notes(pairs: IdPairs) -> list[str]:
    tests: dict[str, Callable[[Sequence[int], Sequence[int]], bool]] = {
        "have an empty side: left out": lambda x, y: not (len(x) and len(y)),
        "have a source of one word, or of one word repeated: nothing to choose, not judged": lambda x, y: (
            len(x) > 0 and len(y) > 0 and len(set(x)) == 1
        ),
    }
    found = {what: int(np.sum([test(x, y) for x, y in pairs])) for what, test in tests.items()}
    return [f"{number:,} of {len(pairs):,} pairs {what}" for what, number in found.items() if number]


def _told(x: object) -> object:
    if isinstance(x, bool):
        return "yes" if x else "no"
    return _rounded(x) if isinstance(x, float) else x


def _rounded(value: float) -> str:
    return f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no −0.000
