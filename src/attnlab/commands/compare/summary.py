"""Sentences on a comparison: three on the whole, and for each row its difference from the first.

A difference is significant if the t-test over seeds gives p < 0.05 after Holm's correction. It needs 3 seeds. Whether
the test is paired depends on the number of seeds alone (experiments/power.py).
"""

from attnlab.commands.compare.rows import ComparisonResults
from attnlab.experiments.power import LEVEL
from attnlab.experiments.seed_values import SeedMeasure
from attnlab.experiments.significance import Contrast
from attnlab.report.numbers import format_real


def list_findings(results: ComparisonResults) -> list[str]:
    """Return a sentence for each judging measure and each row that can be compared with the first."""
    first, found = results.rows[0].label, [(each, results.contrast_rows(each)) for each in results.judges]
    return [f"{label}: {_describe(x, measure, first)}." for measure, rows in found for label, x in rows.items()]


def summarise_comparison(results: ComparisonResults) -> list[str]:
    """Return up to three sentences: the best row, which rows differ from the first, and what they cost."""
    if (measure := results.main_measure) is None:
        return ["No run finished, so there is nothing to compare."]
    sentences = [_describe_best(results, measure), _describe_tests(results, measure), _describe_cost(results)]
    return [sentence for sentence in sentences if sentence]


def _describe_best(results: ComparisonResults, measure: SeedMeasure) -> str:
    means = {row.label: x for row in results.rows if (x := measure.compute_mean(row.measured)) is not None}
    choose = max if measure.better == "higher" else min
    best, first = choose(means, key=means.__getitem__), next(iter(means))
    shown = {row.label: measure.format_mean(row.measured) for row in results.rows}
    part = {"valid": "validation", "test": "test"}.get(results.part, results.part)
    side = "highest" if measure.better == "higher" else "lowest"
    if len(means) == 1:
        return f"On the {part} part, {first} has a mean {measure.name} of {shown[first]}."
    text = f"On the {part} part, {best} has the {side} {measure.name} of {len(means)} rows, {shown[best]}"
    return f"{text}; {first}, the first row, has {shown[first]}." if best != first else f"{text}; it is the first row."


def _describe_tests(results: ComparisonResults, measure: SeedMeasure) -> str:
    contrasts, first = results.contrast_rows(measure), results.rows[0].label
    if not contrasts:
        return ""
    tested = {label: x for label, x in contrasts.items() if x.holm is not None}
    if not tested:
        return f"Whether rows differ from {first} by more than chance is not tested: that needs at least 3 seeds."
    sure = [f"{label} ({_add_sign(x.mean)})" for label, x in tested.items() if x.holm is not None and x.holm < LEVEL]
    test = f"{'paired' if results.is_paired else 'unpaired'} t-test over seeds, Holm's p < {LEVEL}"
    if not sure:
        return f"No row differs significantly from {first} in {measure.name} ({test})."
    return f"These differ significantly from {first} in {measure.name}: {', '.join(sure)} ({test})."


def _describe_cost(results: ComparisonResults) -> str:
    speeds = {row.label: row.speed["tokens_per_second"] for row in results.rows if row.speed}
    if len(speeds) > 1:
        fast, slow = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
        text = f"{fast} trains fastest, with {speeds[fast]:,.0f} tokens per second"
        return f"{text}, and {slow} slowest, with {speeds[slow]:,.0f}."
    sizes = {row.label: row.cost.parameters for row in results.rows if row.cost}
    if len(sizes) < 2:
        return ""
    most, least = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
    if sizes[most] == sizes[least]:
        return f"All rows have {sizes[most]:,} parameters."
    return f"{most} has the most parameters, {sizes[most]:,}, and {least} the fewest, {sizes[least]:,}."


def _describe(contrast: Contrast, measure: SeedMeasure, first: str) -> str:
    seeds = len(contrast.differences)
    if contrast.interval is None or contrast.holm is None:
        why = "a test needs at least 3" if contrast.interval is None else "no t-test, because every seed has the same"
        where = f"over {seeds} seed{'s' * (seeds > 1)}"
        return f"{measure.name} differs from {first}'s by {_add_sign(contrast.mean)} {where} ({why})"
    low, high = map(_add_sign, contrast.interval)
    tests = f"95 % interval {low} to {high}, Holm's p {contrast.holm:.2g}, {seeds} seeds"
    tests += f"; detectable: {contrast.detectable:.2g}" if contrast.detectable else ""
    if contrast.holm < LEVEL:
        side = "higher" if contrast.mean > 0 else "lower"
        good = "better" if side == measure.better else "worse"
        return f"{measure.name} is {abs(contrast.mean):.3g} {side} than {first}'s, which is {good} ({tests})"
    if contrast.interval[0] > 0 or contrast.interval[1] < 0:
        tests = tests.replace("interval", "interval without correction")
        return f"the difference in {measure.name} from {first} is not significant after Holm's correction ({tests})"
    return f"no significant difference in {measure.name} from {first} ({tests})"


def _add_sign(x: float) -> str:
    return format_real(x, "+.3g")
