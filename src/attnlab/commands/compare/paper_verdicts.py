"""What each paper claims beside what a comparison found, for rows that are compared with softmax.

    same direction   better than softmax, as the paper claims, with Holm's p below 0.05
    opposite         worse, with Holm's p below 0.05, where the paper claims better
    better, worse    the same, where the paper claims no better quality
    open             these seeds cannot tell

Options that a row sets make it another model than the paper's, so only rows without options have a claim.
"""

from attnlab.commands.compare.controls import SOFTMAX
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.experiments.power import LEVEL
from attnlab.experiments.significance import Contrast
from attnlab.mechanisms.paper_claims import CLAIMS, PaperClaim
from attnlab.report.page import Table

SHARES = ("tokens_per_second", "memory")
COLUMNS = ["attention", "the paper claims", "found here", "speed beside softmax", "memory beside softmax"]


def tabulate_claims(results: ComparisonResults) -> Table:
    """Return a line for each row whose paper is known; no lines if the first row is not softmax."""
    first = results.rows[0]
    if first.row.settings != SOFTMAX or (measure := results.main_measure) is None:
        return Table(COLUMNS, [])
    contrasts, better = results.contrast_rows(measure), 1 if measure.better == "higher" else -1
    lines = []
    for row in results.rows[1:]:
        if (claim := CLAIMS.get(row.label)) and row.row.settings == {"attention": row.label}:
            verdict = judge_claim(claim, contrasts.get(row.label), better)
            lines.append([row.label, claim.text, verdict, *(_divide(row, first, key) for key in SHARES)])
    return Table(COLUMNS, lines)


def judge_claim(claim: PaperClaim, contrast: Contrast | None, better: int) -> str:
    """Return the verdict on a row; better: the sign of a difference that is an improvement."""
    if contrast is None:
        return "not run"
    if contrast.holm is None:
        return "no test: too few seeds"
    if contrast.holm >= LEVEL:
        return "open"
    is_better = contrast.mean * better > 0
    if claim.is_better is None:
        return "better" if is_better else "worse"
    return "same direction" if is_better == claim.is_better else "opposite"


def _divide(row: RowResult, first: RowResult, key: str) -> str:
    """Return a cost of a row divided by that of softmax."""
    if not (row.speed and first.speed and first.speed[key] > 0):
        return "–"
    return f"{row.speed[key] / first.speed[key]:.2f} ×"
