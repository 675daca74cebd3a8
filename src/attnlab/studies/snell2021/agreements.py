"""Tables 2–8: the agreement of attention, the probes β, β^uf and β^px, and the saliency Δ (Snell et al. 2021, §3, A.4).

    table   agreement    p̂                on             table   agreement    p̂          on
    2, 5    A            accuracy          validation     6       A            BLEU       validation
    3       Kendall τ_b  accuracy          validation     7       A            accuracy   training
    4       Kendall τ_b  BLEU              validation     8       A            BLEU       training

All numbers are in per cent. The columns are computed as in the authors' code: α of A at its best by p̂; β^uf, and β
of B, at the checkpoint that agrees best; Â by shuffling α̂. Where the code differs from the paper, a second column has
the paper's definition (CORRECTED, NOTES):

    A(β^uf, β^px)   in the code β^px chooses the position, β^uf judges it, and the proxy also predicts <s> and padding
    A(Δ, β^uf)      in the released code Δ of a classifier has the opposite sign; the printed numbers are older
    A(α, β)         in the code α and β are of two random initializations

Table 5 is Table 2 with two decimals and more rows, so both are one item.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

import numpy as np

from attnlab.analysis.agreement import contextualise_agreement
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell, make_contrast
from attnlab.studies.snell2021 import published
from attnlab.studies.snell2021.measures import find_reference
from attnlab.studies.snell2021.plan import CORPORA, ScaleSize, list_corpora
from attnlab.studies.snell2021.published import AGREEMENTS, CONTEXTS, Printed
from attnlab.studies.snell2021.role_run import CorpusRow, read_corpora
from attnlab.studies.snell2021.trials import Curves, Trial

CHANCE, BEST = AGREEMENTS[-1], CONTEXTS[-1]
DEFINED, NEGATED, ONE = "A(β^uf, β^px), as defined", "A(−Δ, β^uf)", "A(α, β), of one model"
CORRECTED = {"A(β^uf, β^px)": DEFINED, "A(Δ, β^uf)": NEGATED, "A(α, β)": ONE}
NOTES = {
    "A(β^uf, β^px)": "as in the authors' code: β^px chooses the position and β^uf judges it, and the proxy also "
    "predicts <s> and padding",
    DEFINED: "β^uf chooses and β^px judges; the proxy is that of eq. 5, without padding",
    NEGATED: "the sign of Δ in the released code; the published number must have had the other",
    "A(α, β)": "as in the authors' code: α and β of two random initializations, at the checkpoint that agrees best",
    ONE: "α and β of the same model at its best checkpoint",
}


@dataclass(frozen=True)
class ScorePair:
    """How two scores are compared, how a model's performance is measured, and on which part."""

    metric: Literal["agreement", "kendall"]
    judged_by: Literal["accuracy", "bleu"]
    part: Literal["valid", "train"]


@dataclass(frozen=True)
class CorpusReading:
    """The columns of a row with one seed; starred: those ξ that the agreement of two initializations never reaches."""

    values: Mapping[str, float]
    starred: frozenset[str]


TABLES: Mapping[str, tuple[ScorePair, Mapping[str, Mapping[str, Printed]]]] = {
    "table2": (ScorePair("agreement", "accuracy", "valid"), published.TABLE5),
    "table3": (ScorePair("kendall", "accuracy", "valid"), published.TABLE3),
    "table4": (ScorePair("kendall", "bleu", "valid"), published.TABLE4),
    "table6": (ScorePair("agreement", "bleu", "valid"), published.TABLE6),
    "table7": (ScorePair("agreement", "accuracy", "train"), published.TABLE7),
    "table8": (ScorePair("agreement", "bleu", "train"), published.TABLE8),
}


def make_table(name: str, setting: Setting) -> Findings:
    """Return the item of a table: every row of this scale."""
    reading, printed = TABLES[name]
    cells: list[Cell] = []
    corpora = [corpus for corpus in list_corpora(setting) if corpus.published in printed]
    read = read_corpora(corpora, setting, list_compared)
    for each in read:
        columns = [read_columns(trial, reading) for trial in each.trials]
        row = list(_make_row(name, each, printed[each.field.corpus.published], columns))
        cells += row
        if name == "table2":
            cells += _compare_with_chance(row)
    return Findings(cells, remarks=(_describe_measure(reading), describe_cost(read)))


table2, table3, table4, table6, table7, table8 = (partial(make_table, name) for name in TABLES)


def list_compared(size: ScaleSize) -> tuple[str, ...]:
    """Return the roles that are compared with A."""
    return ("uniform", *size.comparisons)


def read_columns(trial: Trial, reading: ScorePair) -> CorpusReading:
    """Return a row's columns from the curves of a trial."""
    part, judged_by = reading.part, reading.judged_by
    gold, uniform, *others = (trial.curves[role] for role in ("A", *list_compared(trial.field.size)))
    best = find_reference(trial, part, judged_by)

    def curve(curves: Curves, pair: str) -> list[float]:
        return curves[f"{part}/{best}/{pair}/{reading.metric}"]

    pairs = {"A(α, β^uf)": "probe", "A(β^uf, β^px)": "proxy", "A(Δ, β^uf)": "saliency", DEFINED: "equation"}
    columns = {column: max(curve(uniform, pair)) for column, pair in pairs.items()}
    columns |= {"A(α, β)": max(curve(others[0], "probe")), ONE: curve(gold, "own")[0]}
    columns |= {CHANCE: fmean(fmean(curve(other, "chance")) for other in others)}
    if not trial.field.corpus.translates:
        columns[NEGATED] = max(curve(uniform, "negated"))
    between_starts = np.mean([curve(other, "attention") for other in others], axis=0).tolist()
    performance = np.mean([other[f"{part}/{judged_by}"] for other in others], axis=0).tolist()
    columns[BEST] = max(gold[f"{part}/{judged_by}"])
    starred = set()
    for column, context in zip(AGREEMENTS[:-1], CONTEXTS[:-1], strict=True):
        reached = contextualise_agreement(between_starts, performance, columns[column])
        columns[context] = columns[BEST] if reached is None else reached
        starred |= {context} if reached is None else set()
    return CorpusReading(columns, frozenset(starred))


def describe_cost(rows: Sequence[CorpusRow]) -> str:
    """Return how many updates the runs take at full scale, and how long those of these rows took."""
    models = {corpus: 1 + len(list_compared(corpus.size("full"))) for corpus in CORPORA}
    full = "; ".join(f"{corpus.row} {count * corpus.measured_at[-1] / 1e3:,.0f}" for corpus, count in models.items())
    runs = [(row.field, curves) for row in rows for trial in row.trials for curves in trial.curves.values()]
    done = sum(field.steps[-1] for field, _ in runs)
    trained, measured = (sum(curves["seconds"][part] for _, curves in runs) for part in (0, 1))
    return (
        f"At full scale the models of one seed take, in thousands of updates: {full}. Here {done:,} updates took "
        f"{trained:,.0f} s and measuring took {measured:,.0f} s, summed over all models."
    )


def _make_row(
    item: str, row: CorpusRow, printed: Mapping[str, Printed], seeds: Sequence[CorpusReading]
) -> Iterator[Cell]:
    for column, print_ in printed.items():
        for name in (column, CORRECTED.get(column, "")):
            if not name or (name == NEGATED and row.field.corpus.translates):
                continue
            stars = sum(name in seed.starred for seed in seeds)
            starred = f"{stars} of {len(seeds)} seeds never agree this well and count as ξ*" if stars else ""
            place = f"{item}, {row.field.corpus.published}, {column}"
            about = {"published": print_.value, "margin": print_.margin, "number": place}
            about |= {"note": starred or NOTES.get(name, "")}
            about |= {"tags": (*row.field.tags, "erratum")} if name in NOTES else {}
            yield row.make_cell(item, name, (seed.values[name] for seed in seeds), **about)


def _compare_with_chance(row: list[Cell]) -> Iterator[Cell]:
    """Yield the claim of §3.2 about each row: every agreement is above chance."""
    by_name = {cell.column: cell for cell in row}
    for column in AGREEMENTS[:-1]:
        yield make_contrast(by_name[column], by_name[CHANCE])


def _describe_measure(reading: ScorePair) -> str:
    metric = {"agreement": "A, eq. 10", "kendall": "Kendall's τ_b"}[reading.metric]
    part = {"valid": "validation", "train": "as many training examples as validation has"}[reading.part]
    judged = {"accuracy": "accuracy", "bleu": "BLEU"}[reading.judged_by]
    return (
        f"Agreement is {metric}, performance is {judged}, on {part}, all in per cent. β^uf and β are taken at the "
        "checkpoint that agrees best, as in the paper; fig2 also has the last checkpoint."
    )
