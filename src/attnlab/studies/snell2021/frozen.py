"""Table 10 (A.6): attention is not learnt without β.

α^fr    attention of a classifier in which only the attention is trained
β^uf    probe of a classifier in which all but the attention is trained
"""

from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell, make_contrast
from attnlab.studies.snell2021.measures import find_reference
from attnlab.studies.snell2021.plan import list_corpora
from attnlab.studies.snell2021.published import TABLE10
from attnlab.studies.snell2021.role_run import read_corpora
from attnlab.studies.snell2021.trials import Trial

REMARK = (
    "A(α, α^fr) and A(α, β^uf), each at the checkpoint that agrees best, on validation, in per cent. The paper claims "
    "that the first is below the second on every data set: lexical knowledge is learnt without attention, attention is "
    "not learnt without lexical knowledge."
)
COLUMNS = {"A(α, α^fr)": ("frozen", "attention"), "A(α, β^uf)": ("uniform", "probe")}
ROLES = tuple(role for role, _ in COLUMNS.values())


def table10(setting: Setting) -> Findings:
    """The item: both columns and their difference, for every classification set of this scale."""
    cells: list[Cell] = []
    corpora = [corpus for corpus in list_corpora(setting) if corpus.published in TABLE10]
    for row in read_corpora(corpora, setting, lambda size: ROLES):
        seeds = [_read_columns(trial) for trial in row.trials]
        pair = [
            row.make_cell("table10", column, (columns[column] for columns in seeds), published=printed)
            for column, printed in zip(COLUMNS, TABLE10[row.field.corpus.published], strict=True)
        ]
        cells += [*pair, make_contrast(*pair)]
    return Findings(cells, remarks=(REMARK,))


def _read_columns(trial: Trial) -> dict[str, float]:
    gold = find_reference(trial, "valid", "accuracy")
    return {
        column: max(trial.curves[role][f"valid/{gold}/{pair}/agreement"]) for column, (role, pair) in COLUMNS.items()
    }
