"""What was found, in a sentence each, made of the numbers: who has most, who least, and whether every seed says so.

Nothing is said that the numbers do not: with other settings the sentences are others.
"""

from collections.abc import Callable
from statistics import fmean

from attnlab.commands.demo import learners as r
from attnlab.commands.demo.learners import DemoMeasure, DemoResults, Learner

NEGATIVE = -0.005  # weight below 0 that is worth a word
HALF = 0.5  # accuracy


def findings(results: DemoResults) -> list[tuple[str, str]]:
    """What it is about, and the sentence; those that the results allow."""
    told = [(name, make(results)) for name, make in FINDINGS.items()]
    return [(name, sentence) for name, sentence in told if sentence]


def _learning(results: DemoResults) -> str:
    said = f"After {results.config.steps} steps {_each(results, r.ACCURACY)} of held-out words are right"
    soonest = results.order(r.SOONEST)
    if soonest is None or not soonest.several:
        return f"{said}."
    first, goal = soonest.least, _percent(r.LEARNT, ".0f")
    return f"{said}; {first.name} is the first at {goal}, at step {_told(first, r.SOONEST)} on average."


def _alignment(results: DemoResults) -> str:
    runs = [values for learner in results.learners for values in learner.found.values()]
    start = fmean(x for values in runs if (x := r.at_head(values, "aer_weight", 0)) is not None)
    said = _each(results, r.AER)
    return f"The best head aligns words with an error rate of {said}; untrained it was {_percent(start, '.0f')}."


def _order_of_learning(results: DemoResults) -> str:
    """How well words are linked when half of them are right."""
    pairs = []
    for learner in results.learners:
        for values in learner.found.values():
            moment = r.first_at(values, HALF)
            aer = None if moment is None else r.at_head(values, "aer_weight", moment)
            if moment is not None and aer is not None:
                pairs.append((values["moments"][moment], aer))
    if not pairs:
        return ""
    steps, aers = zip(*pairs, strict=True)
    final = fmean(x for learner in results.learners for x in learner.values(r.AER).values())
    return (
        f"When half of the words are right, at step {fmean(steps):.0f} on average, the error rate of the best head "
        f"is {_percent(fmean(aers), '.0f')}; it ends at {_percent(final, '.0f')}."
    )


def _weight(results: DemoResults) -> str:
    order = results.order(r.RIGHT)
    if order is None:
        return ""
    said = f"{_whose(order.most)} best head puts {_told(order.most, r.RIGHT)} of its weight on the word it translates"
    said += f", {_whose(order.least)} {_told(order.least, r.RIGHT)}" if order.several else ""
    below = {learner.name: x for learner in results.learners if (x := learner.mean(r.BELOW) or 0.0) < NEGATIVE}
    said += "".join(f"; {x:.2f} of {name}'s is negative".replace("-", "−") for name, x in below.items())
    return f"{said}{_seeds(results, order.same) if order.several else ''}."


def _norms(results: DemoResults) -> str:
    changes = {
        learner.name: 100 * (norm - weight)
        for learner in results.learners
        if (norm := learner.mean(r.AER_NORM)) is not None and (weight := learner.mean(r.AER)) is not None
    }
    if not changes:
        return ""
    told = ", ".join(f"{name} {x:+.1f}".replace("-", "−") for name, x in changes.items())
    return f"Read by norm ‖αf(x)‖ instead of weight, the error rate changes by so many points: {told}."


def _agreement(results: DemoResults) -> str:
    said = _each(results, r.AGREEMENT)
    chance = fmean(values["at"][-1]["chance"] for learner in results.learners for values in learner.found.values())
    return (
        f"The largest weight is on the word from which the probe β predicts best in {said} of cases; "
        f"by chance {_percent(chance, '.0f')}."
    )


def _between(measure: DemoMeasure, sentence: str, alone: str) -> Callable[[DemoResults], str]:
    """A sentence with {most}, {least} and their values {high} and {low}; another for one attention alone."""

    def make(results: DemoResults) -> str:
        order = results.order(measure)
        if order is None:
            return ""
        values = {"most": _whose(order.most), "least": _whose(order.least)}
        values |= {"high": _told(order.most, measure), "low": _told(order.least, measure)}
        if not order.several:
            return alone.format(**values)
        return f"{sentence.format(**values)}{_seeds(results, order.same)}."

    return make


def _copying(results: DemoResults) -> str:
    if results.copying is None:
        return ""
    shares = [cell for cell in results.copying.cells if cell.column.startswith("share of seeds")]
    told = [f"{cell.row} in {sum(cell.values):.0f} of {len(cell.values)} seeds" for cell in shares]
    return f"An LSTM learns to copy {_listed(told)}."


FINDINGS: dict[str, Callable[[DemoResults], str]] = {
    "learning": _learning,
    "alignment": _alignment,
    "weight": _weight,
    "order": _order_of_learning,
    "contributions": _norms,
    "probe": _agreement,
    "diversity": _between(
        r.JSD,
        "{most} heads differ most, by {high} nats over a sentence, {least} least, by {low}",
        "{most} heads differ by {high} nats over a sentence.",
    ),
    "rank": _between(
        r.RESIDUAL,
        "{most} tokens stay most distinct, with a residual of {high}, {least} least, with {low}; 0 is collapse",
        "{most} tokens stay distinct: a residual of {high}; 0 is collapse.",
    ),
    "gradients": _between(
        r.GRADIENT,
        "At the start {most} queries get the largest gradient, {high}, {least} the smallest, {low}",
        "At the start {most} queries get a gradient of {high}.",
    ),
    "copying": _copying,
}


def _each(results: DemoResults, measure: DemoMeasure) -> str:
    """'17.4 % (softmax), 15.0 % (coda) and 26.3 % (dagpam)'."""
    known = [(learner.name, x) for learner in results.learners if (x := learner.mean(measure)) is not None]
    return _listed([f"{_percent(x)} ({name})" for name, x in known])


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _percent(share: float, form: str = ".1f") -> str:
    return f"{100 * share:{form}}\N{NO-BREAK SPACE}%"


def _seeds(results: DemoResults, same: bool) -> str:
    if (count := results.config.seeds) == 1:
        return ""
    return f" (in each of {count} seeds)" if same else f" (the mean of {count} seeds; they differ)"


def _whose(learner: Learner) -> str:
    return f"{learner.name}'s"


def _told(learner: Learner, measure: DemoMeasure) -> str:
    return measure.told(learner.mean(measure) or 0.0)
