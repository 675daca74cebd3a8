"""What a comparison found, in a sentence a row, made of the numbers: by how much it differs from the first, if it does.

A difference is told where the paired t-test over seeds gives p < 0.05 by Holm's method; below 3 seeds there is no test.
"""

from attnlab.commands.compare.measures import ComparisonMeasure
from attnlab.commands.compare.rows import ComparisonResults
from attnlab.experiments.significance import Contrast

LEVEL = 0.05


def findings(results: ComparisonResults) -> list[str]:
    """One for each row that can be compared with the first; of one that failed, the page says so elsewhere."""
    if (measure := results.judged) is None:
        return []
    first = results.outcomes[0].row.label
    return [_sentence(label, first, measure, against) for label, against in results.contrasts(measure).items()]


def _sentence(label: str, first: str, measure: ComparisonMeasure, against: Contrast) -> str:
    seeds = len(against.differences)
    if against.holm is None or against.interval is None:
        why = "too few for a test" if against.interval is None else "the same in each, of which a test says nothing"
        of = f"over {seeds} seed{'s' * (seeds > 1)}"
        return f"{label}: {measure.name} {_signed(against.mean)} against {first}, {of}; {why}."
    low, high = map(_signed, against.interval)
    spread = f"95 % interval {low} to {high}, Holm's p {against.holm:.2g}, {seeds} seeds"
    if against.holm >= LEVEL:
        if against.interval[0] > 0 or against.interval[1] < 0:
            apart = (
                f"{label}: a difference in {measure.name} from {first} does not outlast Holm's correction for all rows"
            )
            return f"{apart} ({spread.replace('interval', 'interval, uncorrected,')})."
        return f"{label}: no difference in {measure.name} from {first} can be told ({spread})."
    way = "higher" if against.mean > 0 else "lower"
    good = "better" if way == measure.better else "worse"
    return f"{label}: {measure.name} is {way} than {first}'s by {abs(against.mean):.3g}, which is {good} ({spread})."


def _signed(x: float) -> str:
    return f"{x:+.3g}".replace("-", "−")
