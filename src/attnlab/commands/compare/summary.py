"""One sentence for each row of a comparison: its difference from the first row, and whether that is significant.

It is significant if the paired t-test over seeds gives p < 0.05 after Holm's correction. The test needs 3 seeds.
"""

from attnlab.commands.compare.rows import ComparisonResults
from attnlab.experiments.seed_values import SeedMeasure
from attnlab.experiments.significance import Contrast

LEVEL = 0.05


def list_findings(results: ComparisonResults) -> list[str]:
    """Return a sentence for each row that can be compared with the first."""
    if (measure := results.main_measure) is None:
        return []
    first = results.rows[0].label
    return [f"{label}: {_describe(x, measure, first)}." for label, x in results.contrast_rows(measure).items()]


def _describe(contrast: Contrast, measure: SeedMeasure, first: str) -> str:
    seeds = len(contrast.differences)
    if contrast.interval is None or contrast.holm is None:
        why = "a test needs at least 3" if contrast.interval is None else "no t-test, because every seed has the same"
        where = f"over {seeds} seed{'s' * (seeds > 1)}"
        return f"{measure.name} differs from {first}'s by {_add_sign(contrast.mean)} {where} ({why})"
    low, high = map(_add_sign, contrast.interval)
    tests = f"95 % interval {low} to {high}, Holm's p {contrast.holm:.2g}, {seeds} seeds"
    if contrast.holm < LEVEL:
        side = "higher" if contrast.mean > 0 else "lower"
        good = "better" if side == measure.better else "worse"
        return f"{measure.name} is {abs(contrast.mean):.3g} {side} than {first}'s, which is {good} ({tests})"
    if contrast.interval[0] > 0 or contrast.interval[1] < 0:
        tests = tests.replace("interval", "interval without correction")
        return f"the difference in {measure.name} from {first} is not significant after Holm's correction ({tests})"
    return f"no significant difference in {measure.name} from {first} ({tests})"


def _add_sign(x: float) -> str:
    return f"{x:+.3g}".replace("-", "−")
