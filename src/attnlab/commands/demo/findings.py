"""The findings of the demo, one sentence each, written from the numbers: other settings give other sentences."""

from collections.abc import Callable
from statistics import fmean

from attnlab.commands.demo import learners as r
from attnlab.commands.demo.learners import DemoResults, Learner
from attnlab.experiments.seed_values import SeedMeasure
from attnlab.report.numbers import format_percent, format_real

NEGATIVE = -0.005  # negative weight that is worth mentioning
HALF = 0.5  # accuracy


def list_findings(results: DemoResults) -> list[tuple[str, str]]:
    """Return topic and sentence of each finding that the results allow."""
    sentences = [(topic, write(results)) for topic, write in FINDINGS.items()]
    return [(topic, sentence) for topic, sentence in sentences if sentence]


def _describe_learning(results: DemoResults) -> str:
    text = f"After {results.config.steps} steps, {_list_percents(results, r.ACCURACY)} of held-out words are correct."
    soonest = results.rank(r.SOONEST)
    if soonest is None or not soonest.has_several:
        return text
    first, goal = soonest.lowest, format_percent(r.LEARNT, 0)
    return f"{text} {first.name} is the first to reach {goal}, at step {_format_mean(first, r.SOONEST)} on average."


def _describe_alignment(results: DemoResults) -> str:
    runs = [values for learner in results.learners for values in learner.measured.values()]
    start = fmean(x for values in runs if (x := r.read_head(values, "aer_weight", 0)) is not None)
    rates = _list_percents(results, r.AER)
    return f"The best head aligns words with an error rate of {rates}; untrained, of {format_percent(start, 0)}."


def _describe_order(results: DemoResults) -> str:
    """Describe how well words are aligned when half of them are correct."""
    pairs = []
    for learner in results.learners:
        for values in learner.measured.values():
            moment = r.find_moment(values, HALF)
            rate = None if moment is None else r.read_head(values, "aer_weight", moment)
            if moment is not None and rate is not None:
                pairs.append((values["moments"][moment], rate))
    if not pairs:
        return ""
    steps, rates = zip(*pairs, strict=True)
    last = fmean(x for learner in results.learners for x in r.AER.list_values(learner.measured).values())
    return (
        f"When half of the words are correct, at step {fmean(steps):.0f} on average, the error rate of the best head "
        f"is {format_percent(fmean(rates), 0)}; at the end it is {format_percent(last, 0)}."
    )


def _describe_weight(results: DemoResults) -> str:
    ranking = results.rank(r.RIGHT)
    if ranking is None:
        return ""
    most, least = ranking.highest, ranking.lowest
    text = f"{most.name}'s best head gives the translated word a weight of {_format_mean(most, r.RIGHT)}"
    if ranking.has_several:
        text += f", {least.name}'s a weight of {_format_mean(least, r.RIGHT)}{_describe_seeds(results, ranking)}"
    for learner in results.learners:
        if (r.BELOW.compute_mean(learner.measured) or 0.0) < NEGATIVE:
            text += f"; the negative weights of {learner.name}'s sum to {_format_mean(learner, r.BELOW)}"
    return f"{text}."


def _describe_norms(results: DemoResults) -> str:
    changes = []
    for learner in results.learners:
        norm, weight = (measure.compute_mean(learner.measured) for measure in (r.AER_NORM, r.AER))
        if norm is not None and weight is not None:
            changes.append(f"{learner.name} {format_real(100 * (norm - weight), '+.1f')}")
    if not changes:
        return ""
    return f"By norm ‖αf(x)‖ instead of weight, the error rate changes (percentage points): {', '.join(changes)}."


def _describe_agreement(results: DemoResults) -> str:
    chance = fmean(values["at"][-1]["chance"] for learner in results.learners for values in learner.measured.values())
    return (
        "The largest weight is on the word from which the probe β predicts best in "
        f"{_list_percents(results, r.AGREEMENT)} of cases; by chance it would be in {format_percent(chance, 0)}."
    )


def _describe_extremes(measure: SeedMeasure, several: str, single: str) -> Callable[[DemoResults], str]:
    """Return the writer of a sentence with {most}, {least} and their values {high} and {low}; or for one attention."""

    def write(results: DemoResults) -> str:
        ranking = results.rank(measure)
        if ranking is None:
            return ""
        most, least = ranking.highest, ranking.lowest
        values = {"most": f"{most.name}'s", "high": _format_mean(most, measure)}
        values |= {"least": f"{least.name}'s", "low": _format_mean(least, measure)}
        if not ranking.has_several:
            return single.format(**values)
        return f"{several.format(**values)}{_describe_seeds(results, ranking)}."

    return write


def _describe_copying(results: DemoResults) -> str:
    if results.copying is None:
        return ""
    shares = [cell for cell in results.copying.cells if cell.column.startswith("share of seeds")]
    parts = [f"{cell.row} in {sum(cell.values):.0f} of {len(cell.values)} seeds" for cell in shares]
    return f"An LSTM learns to copy {_join(parts)}."


FINDINGS: dict[str, Callable[[DemoResults], str]] = {
    "learning": _describe_learning,
    "alignment": _describe_alignment,
    "weight": _describe_weight,
    "order": _describe_order,
    "contributions": _describe_norms,
    "probe": _describe_agreement,
    "diversity": _describe_extremes(
        r.JSD,
        "{most} heads differ most, by {high} nats over a sentence, {least} least, by {low}",
        "{most} heads differ by {high} nats over a sentence.",
    ),
    "rank": _describe_extremes(
        r.RESIDUAL,
        "{most} tokens stay most distinct, with a residual of {high}, {least} least, with {low}; 0 is collapse",
        "{most} tokens stay distinct, with a residual of {high}; 0 is collapse.",
    ),
    "gradients": _describe_extremes(
        r.GRADIENT,
        "At initialization {most} queries get the largest gradient, {high}, {least} the smallest, {low}",
        "At initialization {most} queries get a gradient of {high}.",
    ),
    "copying": _describe_copying,
}


def _list_percents(results: DemoResults, measure: SeedMeasure) -> str:
    """'17.4 % (softmax), 15.0 % (coda) and 26.3 % (dagpam)'."""
    means = {learner.name: measure.compute_mean(learner.measured) for learner in results.learners}
    return _join([f"{format_percent(x, 1)} ({name})" for name, x in means.items() if x is not None])


def _join(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _format_mean(learner: Learner, measure: SeedMeasure) -> str:
    return measure.format_value(measure.compute_mean(learner.measured) or 0.0)


def _describe_seeds(results: DemoResults, ranking: r.Ranking) -> str:
    if (count := results.config.seeds) == 1:
        return ""
    return f" (in each of {count} seeds)" if ranking.in_every_seed else f" (mean of {count} seeds, which disagree)"
