"""Softmax rows that ask whether a gain is the attention's own: with as many parameters, and with more heads.

matched     the feed_forward is chosen so that the model has as many parameters as the largest row, to the nearest
            that a whole number of units gives: a unit adds 2·width + 1 in every layer
more heads  twice the heads of half the size, as many parameters as softmax has: what a second branch of weights
            may be worth by itself, as the reviewers of Heo & Choi (2024) asked
"""

from collections.abc import Callable
from dataclasses import replace

from attnlab.commands.compare.plan import ComparisonRow, Plan
from attnlab.models.transformer import TransformerConfig
from attnlab.training.recipe import Recipe

SOFTMAX = {"attention": "softmax"}
MATCHED, HEADS = "softmax, matched parameters", "softmax, twice the heads"

Count = Callable[[Recipe], int | None]  # parameters; None where the model cannot be built


def with_controls(plan: Plan, parameters: Count) -> Plan:
    """The plan with its controls; where one cannot be had, a note says why."""
    plain = ComparisonRow("softmax", SOFTMAX)
    if all(row.values == SOFTMAX for row in plan.rows):
        return plan
    if not isinstance(plan.recipe(plain, 0, plan.seeds[0]).model, TransformerConfig):
        return replace(plan, notes=(*plan.notes, "no controls: only a Transformer made here can be made larger"))
    rows, notes = list(plan.rows), list(plan.notes)
    for made in (_matched(plan, plain, parameters), _more_heads(plan, plain)):
        if isinstance(made, ComparisonRow):
            rows.append(made)
        else:
            notes.append(made)
    return replace(plan, rows=tuple(rows), notes=tuple(notes))


def _matched(plan: Plan, plain: ComparisonRow, parameters: Count) -> ComparisonRow | str:
    at, says = [], []
    for point in range(len(plan.points)):
        counts = {row.label: parameters(plan.recipe(row, point, plan.seeds[0])) for row in plan.rows}
        known = {label: count for label, count in counts.items() if count is not None}
        base = plan.recipe(plain, point, plan.seeds[0])
        mine = parameters(base)
        if mine is None or not known:
            return "no row with matched parameters: no model could be built"
        largest = max(known, key=known.__getitem__)
        assert isinstance(base.model, TransformerConfig)
        units = base.model.feed_forward
        wider = ComparisonRow("", SOFTMAX | {"feed_forward": str(units + 1)})
        unit = (parameters(plan.recipe(wider, point, plan.seeds[0])) or 0) - mine
        wanted = max(1, units + round((known[largest] - mine) / unit))
        at.append({"feed_forward": str(wanted)})
        has = f"{mine + (wanted - units) * unit:,} parameters, {largest} has {known[largest]:,}"
        says.append(f"feed_forward={wanted} instead of {units}: {has}")
    if all(values["feed_forward"] == str(_units(plan, plain, k)) for k, values in enumerate(at)):
        return f"no row with matched parameters: one unit of feed_forward adds {unit:,}, more than twice what differs"
    return ComparisonRow(MATCHED, SOFTMAX, tuple(at), "; ".join(dict.fromkeys(says)))


def _units(plan: Plan, plain: ComparisonRow, point: int) -> int:
    model = plan.recipe(plain, point, plan.seeds[0]).model
    assert isinstance(model, TransformerConfig)
    return model.feed_forward


def _more_heads(plan: Plan, plain: ComparisonRow) -> ComparisonRow | str:
    at, says = [], []
    for point in range(len(plan.points)):
        model = plan.recipe(plain, point, plan.seeds[0]).model
        assert isinstance(model, TransformerConfig)
        if model.width % (2 * model.heads):
            return f"no row with twice the heads: width={model.width} is not divisible by {2 * model.heads}"
        more = {"heads": str(2 * model.heads)}
        if model.key_value_heads is not None:
            more["key_value_heads"] = str(2 * model.key_value_heads)
        at.append(more)
        says.append(f"heads={more['heads']} of size {model.width // (2 * model.heads)}")
    return ComparisonRow(HEADS, SOFTMAX, tuple(at), "; ".join(dict.fromkeys(says)))
