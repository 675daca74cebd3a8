"""The rate of learning of each variant, looked for on validation with equal trials, and the variants at their best.

With the first seed every variant is trained at the rate of its corpus's recipe, at half of it and at twice it; then,
with all seeds, at the one whose validation perplexity was lowest, and held against a peer at that one's own best. What
chose the rates judges nothing: the columns that are compared must be of the test part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from attnlab.experiments.corpora import Ground
from attnlab.experiments.study import Findings
from attnlab.experiments.trained import VALIDATION, Value, perplexity
from attnlab.experiments.variants import Variant, Variants
from attnlab.experiments.verdicts import Cell

TIMES = (0.5, 1.0, 2.0)
EDGES = {TIMES[0]: ", the lowest tried", TIMES[-1]: ", the highest tried"}
BEST = "at the best rate tried"
REMARK = (
    "The rate was looked for with the first seed alone, by validation perplexity; where the best is the lowest or the "
    "highest tried, a better one may lie beyond it."
)

Train = Callable[[Ground, Sequence[Variant]], Variants]
Side = Callable[[Variant, str], int]  # of 0, that on which a variant less its peer is in a column, says the paper


def compared_at_best_rates(
    ground: Ground,
    variants: Sequence[Variant],
    *,
    peer: Variant,
    columns: Mapping[str, Value],
    side: Side,
    train: Train,
) -> Findings:
    """Of one corpus: validation perplexity at every rate, then the columns with each variant at its best."""
    tried = {variant: at_rates(variant, ground) for variant in variants}
    every = [at for rates in tried.values() for at in rates.values()]
    search = train(replace(ground, setting=replace(ground.setting, seeds=ground.setting.seeds[:1])), every)
    cells = [search.level(at, VALIDATION, perplexity("valid")) for at in every]
    best = {variant: best_rate(search, rates) for variant, rates in tried.items()}
    chosen = {variant: tried[variant][times] for variant, times in best.items() if times is not None}
    models = train(ground, list(chosen.values()))
    said = {variant: f"{at.at}{EDGES.get(best[variant] or 0, '')}" for variant, at in chosen.items()}
    for column, value in columns.items():
        for variant in variants:
            label = f"{variant.label}, {BEST}"
            if variant in chosen:
                cells.append(models.level(chosen[variant], column, value, label=label, at="", note=said[variant]))
            else:
                cells.append(_none(search, label, column, variant))
        for variant in (variant for variant in variants if variant != peer):
            label = f"{variant.label} − {peer.label}, each {BEST}"
            if missing := [each for each in (variant, peer) if each not in chosen]:
                cells.append(_none(search, label, column, missing[0]))
                continue
            note, sign = f"{said[variant]}; {said[peer]}", side(variant, column)
            two = chosen[variant], chosen[peer]
            cells.append(models.contrast(*two, column, value, sign=sign, label=label, at="", note=note))
    where = sorted({*search.trained.on, *models.trained.on})
    return Findings(cells, remarks=(REMARK, *([f"Trained on {'; '.join(where)}."] if where else [])))


def at_rates(variant: Variant, ground: Ground) -> dict[float, Variant]:
    """The variant by how many times the recipe's rate it has; with 1 it is the very run that other items have."""
    if ground.why_not():  # then nothing is trained, and the recipe may not be there
        return {times: replace(variant, at=f"{times:g} times the rate") for times in TIMES}
    rate = ground.recipe(0, variant.values).training.lr
    return {
        times: replace(variant, values={**variant.values, "lr": repr(times * rate)}, at=f"lr {times * rate:g}")
        for times in TIMES
    }


def best_rate(search: Variants, rates: Mapping[float, Variant]) -> float | None:
    """The times of the lowest validation perplexity; None where none could be trained. Of rows that are not run, 1."""
    if any(map(search.why_not, rates.values())):
        return 1.0
    found = {times: perplexity("valid")(one) for times, at in rates.items() for one in search.of(at)}
    return min(found, key=found.__getitem__, default=None)


def _none(search: Variants, label: str, column: str, variant: Variant) -> Cell:
    reasons = [reason for (each, _), reason in search.trained.failed.items() if each.name == variant.name]
    return Cell(**search.about("", label, column), not_run=f"{variant.label} fails at every rate: {reasons[0]}")
