"""The page of a diagnosis: the verdict and what it rests on in three sentences, a figure, and the rest folded."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch

from attnlab.counting.diagnosis import LIKELY, UNLIKELY, VERDICTS, Diagnosis
from attnlab.provenance import collect_provenance
from attnlab.report.numbers import format_real
from attnlab.report.page import Command, Facts, Part, Picture, Table, Text, render_page

SHOWN = 200  # words on the page
HARDEST = 5  # words in a sentence
NATS = "z.3f"  # format of a number; z: no −0.000
HEADINGS = {
    "word": "output word", "count": "occurrences", "gain": "gain (nats)", "at_least": "gain, at least (nats)",
    "common": "common (nats)", "score": "score (nats)", "agreement": "agreement", "chance": "agreement by chance",
    "from": "most often from", "share": "share of that", "learnable": "learnable",
}  # fmt: skip
READ = (
    "Gain: evidence in the counts that points at one source word. Common: evidence that all words of a sentence share, "
    "which teaches attention nothing. Score: gain minus common. Agreement: how often both halves of the corpus point "
    "at the same word."
)


def select_hardest(table: pd.DataFrame, number: int) -> pd.DataFrame:
    """Return the `number` most frequent words not shown to be learnable, without words that occur once."""
    return table[~table["learnable"] & (table["count"] > 1)].head(number)


def list_findings(found: Diagnosis, table: pd.DataFrame) -> list[str]:
    """Return the verdict, the numbers behind it, and the most frequent words that the counts do not teach."""
    verdict = VERDICTS[found.verdict]
    sentences = [f"{verdict[0].upper()}{verdict[1:]}."]
    if not found.judged:
        return sentences
    score, unlikely = format_real(found.score, "z.2f"), format_real(UNLIKELY, "g")
    sentences.append(
        f"The counts teach {found.learnable:.0%} of {found.judged:,} output words, in {found.pairs:,} pairs; the score "
        f"is {score} nats, where above {LIKELY} is likely and below {unlikely} unlikely."
    )
    hard = select_hardest(table, HARDEST)
    if len(hard):
        words = ", ".join(f"“{word}”" for word in hard["word"])
        sentences.append(f"The most frequent words that the counts do not teach: {words}.")
    return sentences


def render_diagnosis(
    found: Diagnosis, name: str, table: pd.DataFrame, measures: Mapping[str, str], notes: Sequence[str],
    figures: Sequence[Picture], command: str,
) -> str:  # fmt: skip
    """Render the page. `table` has the columns of HEADINGS."""
    first = table.head(SHOWN)
    cells = [[_format_cell(x) for x in row] for row in first.itertuples(index=False)]
    caption = f"The {len(first):,} most frequent of {len(table):,} output words; words.csv has all of them."
    visible: list[tuple[str, Sequence[Part]]] = [
        ("Can attention be learnt from this corpus?", [*map(Text, notes), *figures[:1]]),
    ]
    folded: list[tuple[str, Sequence[Part]]] = [
        ("The numbers behind the verdict", [Facts(measures), Text(READ)]),
        ("Output words", [Text(caption), Table([HEADINGS[column] for column in table], cells)]),
        *([("Counts of single pairs", figures[1:])] if figures[1:] else []),
        ("How to repeat it", [Command(command), Facts(collect_provenance(torch.device("cpu")))]),
    ]
    return render_page(f"attnlab diagnose: {name}", visible, findings=list_findings(found, table), folded=folded)


def _format_cell(x: object) -> object:
    if isinstance(x, bool):
        return "yes" if x else "no"
    return format_real(x, NATS) if isinstance(x, float) else x
