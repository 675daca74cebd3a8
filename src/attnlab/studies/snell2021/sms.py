"""A.9: on SMS Spam the attention of two random starts barely agrees, which is why the paper leaves the set out.

    A(α, α̂), τ_b(α, α̂)      both at their most accurate checkpoint, on validation, in per cent

The paper prints no number of it. SST, which it keeps, stands beside it: agreement should be lower on SMS. Sizes are of
3,500 training messages, equal messages kept in one part.
"""

from statistics import fmean
from typing import Any

from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.studies.snell2021.datasets import GLOVE, plan_statistics
from attnlab.studies.snell2021.measures import find_reference
from attnlab.studies.snell2021.plan import SMS, SST
from attnlab.studies.snell2021.role_run import CorpusRow, read_corpora
from attnlab.studies.snell2021.trials import Field, Trial

ITEM = "a9"
SIZES = {"training examples": 3500, "median training length": 13, "vocabulary": 4691}
STARTS, ORDER = "A(α, α̂)", "τ_b(α, α̂)"
REMARK = (
    "The paper prints no number for SMS. SST, which it keeps, stands beside it: agreement should be lower on SMS. "
    "Sizes are of 3,500 training messages; equal messages stay in one part."
)


def a9(setting: Setting) -> Findings:
    """The item."""
    spam, kept = (_make_cells(row) for row in read_corpora((SMS, SST), setting, lambda size: ["B"]))
    cells = [*spam.values(), *kept.values()]
    for column in (STARTS, ORDER):
        low, high = spam[column], kept[column]
        cells.append(
            Cell(
                item=ITEM,
                row=f"{low.row} − {high.row}",
                column=column,
                sign=-1,
                values=tuple(x - y for x, y in zip(low.values, high.values, strict=False)),
                tags=tuple(dict.fromkeys((*low.tags, *high.tags))),
                not_run=low.not_run or high.not_run,
            )
        )
    return Findings([*cells, *_make_sizes(setting)], remarks=(REMARK,))


def compare_starts(trial: Trial) -> dict[str, float]:
    """Return how far the attention of B agrees with that of A, each where it is most accurate."""
    gold, other = find_reference(trial, "valid", "accuracy"), trial.curves["B"]
    best = other["valid/accuracy"].index(max(other["valid/accuracy"]))
    return {
        STARTS: other[f"valid/{gold}/attention/agreement"][best],
        ORDER: other[f"valid/{gold}/attention/kendall"][best],
        "Â": fmean(other[f"valid/{gold}/chance/agreement"]),
        "accuracy": other["valid/accuracy"][best],
    }


def _make_cells(row: CorpusRow) -> dict[str, Cell]:
    found = [compare_starts(trial) for trial in row.trials]
    return {
        column: Cell(
            item=ITEM,
            row=row.field.corpus.row,
            column=column,
            values=tuple(each[column] for each in found),
            tags=row.field.tags,
            not_run=row.reason,
        )
        for column in (STARTS, ORDER, "Â", "accuracy")
    }


def _make_sizes(setting: Setting) -> list[Cell]:
    """Return the sizes of the set beside those in the paper."""
    reason = Field(SMS, setting).explain_absence()
    found: dict[str, float] = {}
    if not reason:
        recipe: Any = SMS.recipe(setting.scale, "A", 0)
        measured = setting.rows.read_plan({SMS: plan_statistics(recipe.data)})
        found, reason = measured.values.get(SMS, {}), measured.failures.get(SMS, "")
    return [
        Cell(
            item=ITEM,
            row=SMS.row,
            column=column,
            published=published,
            values=(found[column],) if found else (),
            exact=bool(found),
            tags=("other data",) if column == "vocabulary" else (),
            note=GLOVE if column == "vocabulary" else "",
            not_run=reason,
        )
        for column, published in SIZES.items()
    ]
