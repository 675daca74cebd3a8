"""Softmax rows that test whether a gain comes from the attention itself.

matched parameters   the feed_forward is chosen so that the model has as many parameters as the largest row, as near as
                     a whole number of units allows: a unit adds 2·width + 1 in every layer, 3·width in a modern one
as large as ROW      the same for a row that beats softmax, if controls are for winners only
twice the heads      twice the heads of half the size, with as many parameters as softmax: what a second set of weights
                     is worth by itself, as the reviewers of Heo & Choi (2024) asked
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from attnlab.commands.compare.plan import ComparisonRow, Plan
from attnlab.models.transformer_config import TransformerConfig
from attnlab.training.recipe import Recipe

SOFTMAX = {"attention": "softmax"}
MATCHED, HEADS = "softmax, matched parameters", "softmax, twice the heads"
SIZED = "softmax, as large as "  # the start of the label of a winner's control

NO_MODEL = "no controls: only a new Transformer can be resized"

Count = Callable[[Recipe], int | None]  # number of parameters; None if the model cannot be built


def add_controls(plan: Plan, count: Count) -> Plan:
    """Return the plan with its controls; a note explains each control that is not possible."""
    if all(row.settings == SOFTMAX for row in plan.rows):
        return plan
    if (models := _list_models(plan)) is None:
        return _extend(plan, [NO_MODEL])
    return _extend(plan, [_match_parameters(plan, models, count, plan.rows, MATCHED), _double_heads(models)])


def control_winners(plan: Plan, winners: Iterable[str], count: Count) -> Plan:
    """Return the plan with controls of the rows that beat softmax: one as large as each, and one with more heads."""
    rows = [row for row in plan.rows if row.label in set(winners)]
    if not rows:
        return plan
    if (models := _list_models(plan)) is None:
        return _extend(plan, [NO_MODEL])
    sized = [_match_parameters(plan, models, count, [row], f"{SIZED}{row.label}") for row in rows]
    return _extend(plan, [*sized, _double_heads(models)])


def list_controls(label: str, labels: Iterable[str]) -> list[str]:
    """Return which of these labels are controls of a row."""
    return [each for each in labels if each in (MATCHED, HEADS, f"{SIZED}{label}")]


def _list_models(plan: Plan) -> list[TransformerConfig] | None:
    """Return the softmax model at each point of the grid; None if one cannot be resized."""
    softmax = ComparisonRow("softmax", SOFTMAX)
    models = [plan.recipe(softmax, point).model for point in range(len(plan.points))]
    known = [model for model in models if isinstance(model, TransformerConfig)]
    return known if len(known) == len(models) else None


def _extend(plan: Plan, controls: Sequence[ComparisonRow | str]) -> Plan:
    """Return the plan with these rows, and these notes on rows that are not possible."""
    rows = [control for control in controls if isinstance(control, ComparisonRow)]
    notes = [control for control in controls if isinstance(control, str)]
    return replace(plan, rows=(*plan.rows, *rows), notes=(*plan.notes, *notes))


def _match_parameters(
    plan: Plan, models: Sequence[TransformerConfig], count: Count, matched: Iterable[ComparisonRow], label: str
) -> ComparisonRow | str:
    """Return softmax with as many parameters as the largest of these rows, or why there is no such row."""
    settings, descriptions, unit = [], [], 0
    for point, model in enumerate(models):
        sizes = {row.label: size for row in matched if (size := count(plan.recipe(row, point))) is not None}
        wider = [ComparisonRow("", SOFTMAX | {"feed_forward": str(model.feed_forward + more)}) for more in (0, 1)]
        ours, next_size = (count(plan.recipe(row, point)) for row in wider)
        if ours is None or next_size is None or not sizes:
            return f"no row “{label}”: no model can be built"
        largest, unit = max(sizes, key=sizes.__getitem__), next_size - ours
        units = max(1, model.feed_forward + round((sizes[largest] - ours) / unit))
        settings.append({"feed_forward": str(units)})
        total = ours + (units - model.feed_forward) * unit
        what = f"feed_forward={units} instead of {model.feed_forward}: {total:,} parameters"
        descriptions.append(f"{what}, {largest} has {sizes[largest]:,}")
    if all(own["feed_forward"] == str(model.feed_forward) for own, model in zip(settings, models, strict=True)):
        return f"no row “{label}”: one unit of feed_forward adds {unit:,}, more than twice the difference"
    return ComparisonRow(label, SOFTMAX, tuple(settings), "; ".join(dict.fromkeys(descriptions)))


def _double_heads(models: Sequence[TransformerConfig]) -> ComparisonRow | str:
    """Return softmax with twice the heads, or why there is no such row."""
    settings, descriptions = [], []
    for model in models:
        heads = 2 * model.heads
        if model.head_size % (even := 4 if model.positions == "rope" else 2):
            return f"no row with twice the heads: their size {model.head_size} is not divisible by {even}"
        size = model.head_size // 2
        shared = {} if model.key_value_heads is None else {"key_value_heads": str(2 * model.key_value_heads)}
        shared |= {} if model.head_dim is None else {"head_dim": str(size)}
        settings.append({"heads": str(heads), **shared})
        descriptions.append(f"heads={heads} of size {size}")
    return ComparisonRow(HEADS, SOFTMAX, tuple(settings), "; ".join(dict.fromkeys(descriptions)))
