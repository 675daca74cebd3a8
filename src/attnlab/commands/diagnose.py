"""attnlab diagnose: judge a parallel corpus or a labelled file by its counts, and print and write the result."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnlab.commands.diagnosis_page import NATS, render_diagnosis, select_hardest
from attnlab.counting.cooccurrence import alpha, count_between
from attnlab.counting.corpus_text import CorpusText, read_corpus
from attnlab.counting.diagnosis import VERDICTS, Diagnosis, diagnose
from attnlab.files import write_text
from attnlab.report.count_figures import LIMIT, draw_count_tables, draw_word_scores
from attnlab.report.figures import save_figure
from attnlab.report.numbers import format_real
from attnlab.report.page import Table
from attnlab.terminal import Bar, show_table

WORDS = (
    "Each output word, by how often it occurs. Blue: evidence that points at one source word (gain). Orange: evidence "
    "that all words of a sentence share (common). Words whose blue dot is well above 0 can be learnt."
)
PAIR = (
    "Pair {}. Left: how often its words occur together in the corpus. Right: where these counts alone would attend; "
    "one dark cell in a column is a word that is easy to learn."
)
COLUMNS = ["word", "count", "gain", "at_least", "common", "score", "agreement", "chance", "from", "share", "learnable"]


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
    with Bar(1) as progress:
        found = diagnose(text.pairs, sizes=(len(text.source), len(text.target)), tick=progress.tick)
    table = name_words(found, text)
    print(f"{text.name}: {VERDICTS[found.verdict]}.\n")
    show_table("measures", ["measure", "value"], list(summarise(found).items()))
    if (hard := list_hardest(table, 12)).rows:
        what = "labels" if text.labelled else "words"
        show_table(f"frequent {what} not shown to be learnable from so few occurrences", hard.columns, hard.rows)
    for line in list_notes(text, table):
        print(line)
    if out is not None:
        print("written:", *write_report(found, text, table, out, sentence, command))


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
        "gain (nats)": format_real(found.gain, NATS),
        "common (nats)": format_real(found.common, NATS),
        "score = gain − common": format_real(found.score, NATS),
        "expected agreement": f"{found.agreement:.1%} ({found.chance:.1%} by chance)",
        "learnable": f"{found.learnable:.1%} of output words",
    }


def list_hardest(table: pd.DataFrame, number: int) -> Table:
    """Return the table of `select_hardest`."""
    columns = ["word", "count", "gain", "at least", "common", "agreement"]
    return Table(columns, [
        [row["word"], f"{row['count']:,}", *(format_real(row[name], NATS) for name in ("gain", "at_least", "common")),
         f"{row['agreement']:.0%}"]
        for _, row in select_hardest(table, number).iterrows()
    ])  # fmt: skip


def list_notes(text: CorpusText, table: pd.DataFrame) -> list[str]:
    """Say which pairs were left out and how many words are too rare to be judged."""
    once, what = int((table["count"] == 1).sum()), "labels" if text.labelled else "output words"
    rare = f"{once:,} of {len(table):,} {what} occur only once beside several source words"
    return [*text.notes, *([f"{rare}: not shown to be learnable from so few"] if once else [])]


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
        pictures["words"] = (draw_word_scores(*columns), WORDS)
    drawn = {f"counts-{n}": figure for n, figure in zip(numbers, _draw_counts(text, numbers), strict=True)}
    pictures |= {name: (figure, PAIR.format(name[7:])) for name, figure in drawn.items()}
    about = {"text": text.name, "notes": list_notes(text, table), "verdict": found.verdict, "pairs": found.pairs}
    about |= {name: getattr(found, name) for name in ("judged", "score", "gain", "common", "agreement", "chance")}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "words.csv", table.to_csv(index=False))
    write_text(folder / "summary.json", json.dumps(about, ensure_ascii=False, indent=1) + "\n")
    figures = [save_figure(folder / name, *drawn) for name, drawn in pictures.items()]
    page = render_diagnosis(found, text.name, table, summarise(found), list_notes(text, table), figures, command)
    write_text(folder / "report.html", page)
    names = ("words.csv", "summary.json", *(f"{name}.png" for name in pictures), "report.html")
    return [folder / name for name in names]


def _draw_counts(text: CorpusText, numbers: Sequence[int]) -> list[Figure]:
    """Draw C for each of some pairs, and α of a translated pair or Trans of a labelled one."""
    sides = [_list_words(text, number) for number in numbers]
    words = [sorted({word for side in sides for word in side[k]}) for k in (0, 1)]
    cells, totals = count_between(text.pairs.full_chunks(), words[0], words[1])
    figures = []
    for source, target in sides:
        rows, columns = ([words[k].index(word) for word in side] for k, side in enumerate((source, target)))
        counted = cells[np.ix_(rows, columns)]
        share = counted / np.maximum(totals[rows], np.finfo(float).tiny)[:, None]
        tables = {"C: co-occurrences, weighted 1/L": counted}
        tables |= (
            {"Trans(label | word)": share} if text.labelled else {"α: share of each source word": alpha(share.T).T}
        )
        figures.append(draw_count_tables(tables, [text.source[i] for i in source], [text.target[o] for o in target]))
    return figures


def _list_words(text: CorpusText, number: int) -> tuple[list[int], list[int]]:
    """Return the word types of a pair that fit a figure; all labels if the text is labelled."""
    source, target = (list(dict.fromkeys(ids.tolist())) for ids in text.pairs[number - 1])
    if text.labelled:
        target = list(range(len(text.target)))
    if not (source and target):
        raise ValueError(f"sentence {number} has an empty side: choose another --sentence")
    return source[:LIMIT], target[:LIMIT]
