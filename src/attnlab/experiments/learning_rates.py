"""The learning rate of each variant, searched on validation with equal trials, and the variants at their best.

With the first seed every variant is trained at the learning rate of its corpus's recipe and at multiples of it.
Then it is trained with all seeds at the rate with the lowest validation perplexity, and compared with a peer at that
peer's own best rate. Validation chooses the rates, so the compared columns must be of the test part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from attnlab.experiments.corpora import Ground
from attnlab.experiments.engine import NOT_MEASURED
from attnlab.experiments.study import Findings
from attnlab.experiments.variants import VALIDATION, Value, Variant, Variants, read_perplexity
from attnlab.experiments.verdicts import Cell

TIMES = (0.5, 1.0, 2.0)
BEST = "at the best rate tried"
REMARK = (
    "The learning rate was searched with the first seed alone, by validation perplexity. Where the best rate is the "
    "lowest or the highest tried, a better one may lie beyond it."
)

Train = Callable[[Ground, Sequence[Variant]], Variants]
Side = Callable[[Variant, str], int]  # the side of 0 on which the paper has a variant minus its peer in a column


def compare_at_best_rates(
    ground: Ground,
    variants: Sequence[Variant],
    *,
    peer: Variant,
    columns: Mapping[str, Value],
    side: Side,
    train: Train,
    times: Sequence[float] = TIMES,
) -> Findings:
    """Return the validation perplexity at every rate on one corpus, then the columns of each variant at its best.

    times   the multiples of the recipe's rate that are tried
    """
    tried = {variant: vary_rate(variant, ground, times) for variant in variants}
    every = [at for rates in tried.values() for at in rates.values()]
    search = train(replace(ground, setting=replace(ground.setting, seeds=ground.setting.seeds[:1])), every)
    cells = [search.make_level(at, VALIDATION, read_perplexity("valid")) for at in every]
    best = {variant: find_best_rate(search, rates) for variant, rates in tried.items()}
    chosen = {variant: tried[variant][times] for variant, times in best.items() if times is not None}
    models = train(ground, list(chosen.values()))
    rates = {each: f"{at.at}{_describe_edge(search, tried[each], at)}" for each, at in chosen.items()}
    for column, value in columns.items():
        for variant in variants:
            label = f"{variant.label}, {BEST}"
            if variant in chosen:
                at, note = chosen[variant], rates[variant]
                cells.append(models.make_level(at, column, value, label=label, at="", note=note))
            else:
                cells.append(_make_failed(search, label, column, variant))
        for variant in (variant for variant in variants if variant != peer):
            label = f"{variant.label} − {peer.label}, each {BEST}"
            if missing := [each for each in (variant, peer) if each not in chosen]:
                cells.append(_make_failed(search, label, column, missing[0]))
                continue
            note, sign = f"{rates[variant]}; {rates[peer]}", side(variant, column)
            two = chosen[variant], chosen[peer]
            cells.append(models.make_contrast(*two, column, value, sign=sign, label=label, at="", note=note))
    hardware = sorted({*search.measured.hardware, *models.measured.hardware})
    return Findings(cells, remarks=(REMARK, *([f"Trained on {'; '.join(hardware)}."] if hardware else [])))


def vary_rate(variant: Variant, ground: Ground, multiples: Sequence[float] = TIMES) -> dict[float, Variant]:
    """Return the variant at each multiple of the recipe's learning rate; at 1 it is the run that other items have."""
    if ground.explain_absence():  # then nothing is trained, and the recipe may not exist
        return {times: replace(variant, at=f"{times:g} times the rate") for times in multiples}
    rate = ground.recipe(0, variant.values).training.lr
    return {
        times: replace(variant, values={**variant.values, "lr": repr(times * rate)}, at=f"lr {times * rate:g}")
        for times in multiples
    }


def find_best_rate(search: Variants, rates: Mapping[float, Variant]) -> float | None:
    """Return the multiple with the lowest validation perplexity; None if all failed, 1 for rows that do not run."""
    if any(map(search.explain_absence, rates.values())):
        return 1.0
    losses = {times: read_perplexity("valid")(one) for times, at in rates.items() for one in search.list_values(at)}
    return min(losses, key=losses.__getitem__, default=None)


def _describe_edge(search: Variants, rates: Mapping[float, Variant], chosen: Variant) -> str:
    """Say whether the chosen rate is the lowest or the highest of those that were tried."""
    unknown = {each for (each, _), reason in search.measured.failures.items() if reason == NOT_MEASURED}
    known = [at for at in rates.values() if at not in unknown]
    if len(known) < 2 or chosen not in (known[0], known[-1]):
        return ""
    return ", the lowest tried" if chosen == known[0] else ", the highest tried"


def _make_failed(search: Variants, label: str, column: str, variant: Variant) -> Cell:
    reasons = [reason for (each, _), reason in search.measured.failures.items() if each.name == variant.name]
    return Cell(**search.describe_cell("", label, column), not_run=f"{variant.label} fails at every rate: {reasons[0]}")
