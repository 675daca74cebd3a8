"""A.9: on SMS Spam the attention of two random initializations barely agrees, so the paper leaves the set out.

A(α, α̂), τ_b(α, α̂)      both at their most accurate checkpoint, on validation, in per cent
"""

from statistics import fmean
from typing import Any

from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.studies.snell2021.datasets import GLOVE, plan_statistics
from attnlab.studies.snell2021.measures import find_reference
from attnlab.studies.snell2021.plan import NO_GLOVE, SMS, SST
from attnlab.studies.snell2021.role_run import CorpusRow, read_corpora
from attnlab.studies.snell2021.trials import Field, Trial

ITEM = "a9"
SIZES = {"training examples": 3500, "median training length": 13, "vocabulary": 4691}
STARTS, ORDER = "A(α, α̂)", "τ_b(α, α̂)"
REMARK = (
    "The paper prints no number for SMS. It is compared with SST, which the paper keeps: agreement should be lower on "
    "SMS. Sizes are of 3,500 training messages; equal messages stay in one part."
)


def a9(setting: Setting) -> Findings:
    """The item: agreement of two random initializations on SMS and on SST, and the sizes of SMS."""
    spam, kept = (_make_cells(row) for row in read_corpora((SMS, SST), setting, lambda size: ["B"]))
    cells = [*spam.values(), *kept.values()]
    for column in (STARTS, ORDER):
        low, high = spam[column], kept[column]
        gaps = tuple(x - y for x, y in zip(low.values, high.values, strict=False))
        row, tags = f"{low.row} − {high.row}", tuple(dict.fromkeys((*low.tags, *high.tags)))
        missing = low.not_run or high.not_run
        cells.append(Cell(item=ITEM, row=row, column=column, sign=-1, values=gaps, tags=tags, not_run=missing))
    return Findings([*cells, *_make_sizes(setting)], remarks=(REMARK,))


def compare_starts(trial: Trial) -> dict[str, float]:
    """Return the agreement of the attention of B and A, each at its most accurate checkpoint."""
    gold, other = find_reference(trial, "valid", "accuracy"), trial.curves["B"]
    best = other["valid/accuracy"].index(max(other["valid/accuracy"]))
    return {
        STARTS: other[f"valid/{gold}/attention/agreement"][best],
        ORDER: other[f"valid/{gold}/attention/kendall"][best],
        "Â": fmean(other[f"valid/{gold}/chance/agreement"]),
        "accuracy": other["valid/accuracy"][best],
    }


def _make_cells(row: CorpusRow) -> dict[str, Cell]:
    seeds, columns = [compare_starts(trial) for trial in row.trials], (STARTS, ORDER, "Â", "accuracy")
    return {column: row.make_cell(ITEM, column, (seed[column] for seed in seeds)) for column in columns}


def _make_sizes(setting: Setting) -> list[Cell]:
    """Return the sizes of the set and those in the paper."""
    reason = Field(SMS, setting).explain_absence()
    sizes: dict[str, float] = {}
    if not reason:
        recipe: Any = SMS.recipe(setting.scale, "A", 0)
        measured = setting.rows.read_plan({SMS: plan_statistics(recipe.data)})
        sizes, reason = measured.values.get(SMS, {}), measured.failures.get(SMS, "")
    cells = []
    for column, published in SIZES.items():
        about: dict[str, Any] = {"tags": NO_GLOVE, "note": GLOVE} if column == "vocabulary" else {}
        about |= {"values": (sizes[column],), "exact": True} if sizes else {"not_run": reason}
        cells.append(Cell(item=ITEM, row=SMS.row, column=column, published=published, **about))
    return cells
