"""Figure 2 and A.7: agreement over training, and whether the best checkpoint of β^uf is only the best of many.

A(α, α̂(τ)), p̂(τ)     of two random initializations, and the performance of the second, which ξ reads (eq. 11)
A(α, β^uf(τ))          with the probe of a model whose attention stays uniform
"""

from collections.abc import Iterator
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.report.figures import draw_curves
from attnlab.studies.snell2021.agreements import list_compared
from attnlab.studies.snell2021.measures import find_reference
from attnlab.studies.snell2021.plan import list_corpora
from attnlab.studies.snell2021.published import TABLE5
from attnlab.studies.snell2021.role_run import CorpusRow, read_corpora
from attnlab.studies.snell2021.trials import Field, Trial

ITEM = "fig2"
REMARK = (
    "The paper reports the maximum over τ of A(α, β^uf(τ)), and says that it first rises and then falls on every data "
    "set (A.7). A maximum is never below the last value, even of noise. So the peak of a seed is taken where the other "
    "seeds have it, and its value there is compared with its values at the first and the last checkpoint."
)
PROBE, STARTS, PERFORMANCE = "A(α, β^uf(τ))", "A(α, α̂(τ))", "p̂(τ)"


def fig2(setting: Setting) -> Findings:
    """The item: curves of every data set of this scale."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for row in read_corpora(list_corpora(setting), setting, list_compared):
        lines = [read_curves(trial) for trial in row.trials]
        cells += _make_cells(row, [line[PROBE] for line in lines])
        if lines:
            figures[row.field.corpus.name] = _draw_figure(row.field, lines)
    return Findings(cells, figures, (REMARK,))


def read_curves(trial: Trial) -> dict[str, list[float]]:
    """Read the three curves of a trial on validation in per cent, with α of A at its most accurate checkpoint."""
    gold = find_reference(trial, "valid", "accuracy")
    uniform, *others = (trial.curves[role] for role in list_compared(trial.field.size))
    starts = [other[f"valid/{gold}/attention/agreement"] for other in others]
    return {
        PROBE: uniform[f"valid/{gold}/probe/agreement"],
        STARTS: np.mean(starts, axis=0).tolist(),
        PERFORMANCE: np.mean([other["valid/accuracy"] for other in others], axis=0).tolist(),
    }


def find_peaks(lines: list[list[float]]) -> list[int]:
    """Return for each curve the first place where the mean of the other curves is highest."""
    return [int(np.mean(lines[:k] + lines[k + 1 :], axis=0).argmax()) for k in range(len(lines))]


def _make_cells(row: CorpusRow, lines: list[list[float]]) -> Iterator[Cell]:
    column, corpus, last = "A(α, β^uf)", row.field.corpus.published, [line[-1] for line in lines]
    printed, number = TABLE5[corpus][column].value, f"table2, {corpus}, {column}"
    note = "the paper prints the best checkpoint only"
    yield row.make_cell(ITEM, f"{column}, best checkpoint", map(max, lines), published=printed, number=number)
    yield row.make_cell(ITEM, f"{column}, last checkpoint", last, note=note)
    alone = row.reason or ("" if len(lines) > 1 else "the peak is found in other seeds, and there is only one seed")
    peaks = [] if alone else find_peaks(lines)
    for name, end in (("first", 0), ("last", -1)):
        column = f"A(α, β^uf), at the other seeds' peak − {name} checkpoint"
        gaps = [line[peak] - line[end] for line, peak in zip(lines, peaks, strict=False)]
        yield row.make_cell(ITEM, column, gaps, sign=1, not_run=alone)


def _draw_figure(field: Field, lines: list[dict[str, list[float]]]) -> tuple[Figure, str]:
    means = {name: (field.steps, np.mean([line[name] for line in lines], axis=0).tolist()) for name in lines[0]}
    figure = draw_curves(means, x="updates", y="per cent, mean over seeds")
    figure.axes[0].set_xscale("symlog", linthresh=field.steps[1])
    last = fmean(line[PROBE][-1] for line in lines)
    return figure, f"{field.corpus.row}: agreement and accuracy over training. A(α, β^uf) ends at {last:.1f}."
