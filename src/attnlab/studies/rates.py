"""The rate of learning of each variant, looked for on validation with equal trials, and the variants at their best.

With the first seed every variant is trained at the rate of its corpus's recipe, at half of it and at twice it; then,
with all seeds, at the one whose validation perplexity was lowest, and held against a peer at that one's own best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnlab.studies.claims import Cell
from attnlab.studies.corpora import Ground
from attnlab.studies.trained import Value
from attnlab.studies.variants import Variant, Variants

TIMES = (0.5, 1.0, 2.0)
VALIDATION = "validation perplexity"
REMARK = "The rate was looked for with the first seed alone; the best has the lowest validation perplexity."

Train = Callable[[Ground, Sequence[Variant]], Variants]
Side = Callable[[Variant, str], int]  # of 0, that on which a variant less its peer is in a column, says the paper


def validation(found: dict[str, Any]) -> float:
    return found["perplexity"]["valid"]


def searched(
    ground: Ground, variants: Sequence[Variant], peer: Variant, columns: Mapping[str, Value], side: Side, train: Train
) -> list[Cell]:
    """The cells of one corpus: validation perplexity at every rate, then the columns with each variant at its best."""
    tried = {each: at_rates(each, ground) for each in variants}
    first = replace(ground, setting=replace(ground.setting, seeds=ground.setting.seeds[:1]))
    search = train(first, [one for some in tried.values() for one in some])
    cells = [search.level(one, VALIDATION, validation) for some in tried.values() for one in some]
    best = {each: best_of(search, some) for each, some in tried.items()}
    models = train(ground, list(best.values()))
    for column, value in columns.items():
        for each, own in best.items():
            label = f"{each.label}, at its best rate"
            cells.append(_said(models, models.level(own, column, value), label, own.at))
        for each in (each for each in variants if each != peer):
            own, other = best[each], best[peer]
            made = models.contrast(own, other, column, value, sign=side(each, column))
            label = f"{each.label} − {peer.label}, each at its best rate"
            cells.append(_said(models, made, label, f"{own.at} and {other.at}"))
    return cells


def at_rates(variant: Variant, ground: Ground) -> list[Variant]:
    """The variant with each rate; at the recipe's own it is the very run that other items have."""
    said = ground.corpus.settings.get(ground.setting.scale, {})
    found = []
    for times in TIMES:
        rate = f"{times * float(said['lr']):g}" if "lr" in said else f"{times:g} times the recipe's"
        found.append(replace(variant, values={**variant.values, "lr": rate}, at=f"lr {rate}"))
    return found


def best_of(search: Variants, tried: Sequence[Variant]) -> Variant:
    """The one of the lowest validation perplexity; the first, where nothing is known."""

    def lowest(variant: Variant) -> float:
        return min(map(validation, search.of(variant)), default=float("inf"))

    return min(tried, key=lowest)


def _said(models: Variants, made: Cell, label: str, rate: str) -> Cell:
    """The cell in a row whose name does not depend on which rate was best; that stands in its note."""
    note = "" if made.not_run else "; ".join(filter(None, (rate, made.note)))
    return replace(made, row=models.about("", label, made.column)["row"], note=note)
