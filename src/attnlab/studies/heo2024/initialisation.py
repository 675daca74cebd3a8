"""Figure 5: how alike tokens become at initialisation, with λ⁺ varied and λ⁻ = 1; nothing is trained.

Values are by layer, for attention alone (x ← attention(x)) and for the whole model. They are computed in float64,
because the residual soon falls below the rounding of float32.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnlab.experiments.corpora import Ground, list_grounds
from attnlab.experiments.plan import Calculation, Workplace, describe_recipe, prepare_vocabulary
from attnlab.experiments.run_measures import initialize_model
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import Variant
from attnlab.experiments.verdicts import Cell
from attnlab.models.presets import Config
from attnlab.recording.depth import strip_model
from attnlab.studies.heo2024.attentions import SOFTMAX, fix_lambdas
from attnlab.studies.heo2024.figures import draw_by_layer
from attnlab.studies.heo2024.measures import draw_batches, measure_states
from attnlab.studies.heo2024.plan import DEEP, NAMES
from attnlab.tasks import find_task
from attnlab.training.recipe import Recipe

ITEM = "faithfulness"
PLUS = (0.0, 0.5, 1.0, 2.0, 4.0)
VARIANTS = (SOFTMAX, *(fix_lambdas(plus, 1.0) for plus in PLUS))
CLAIMED = VARIANTS[1 + PLUS.index(1.0)]  # λ⁺ = λ⁻ = 1: rows sum to 1, as in softmax
SHOWN = ("relative residual", "mean cosine")
PARTS = {"attention alone": True, "the whole model": False}
By = dict[str, list[float]]  # by column, a value for each layer
REMARK = (
    "The paper's Figure 5 varies λ⁺ with λ⁻ = 1. Its curves are not available, only the claim that daGPAM keeps more "
    "of the residual. The claim is compared with λ⁺ = 1, where rows sum to 1 as in softmax. A λ⁺ far above λ⁻ is a "
    "softmax with a gain."
)


def faithfulness(setting: Setting) -> Findings:
    """The item: residual and cosine by layer of untrained models."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(DEEP, setting, NAMES):
        reason = ground.explain_absence()
        for name, alone in PARTS.items():
            found = {} if reason else read_start(ground, alone=alone)
            if not reason and not any(found.values()):
                reason, found = ground.explain_missing(), {}
            cells += _make_cells(ground, name, found, reason)
            if found:
                caption = f"at initialisation, {name}: residual and cosine by layer, λ⁻ = 1, mean over seeds."
                figure = draw_by_layer({variant.label: seeds for variant, seeds in found.items()}, SHOWN)
                key = f"{ground.corpus.name}-{'alone' if alone else 'whole'}"
                figures[key] = (figure, f"{ground.corpus.row}: {caption}")
    return Findings(cells, figures, (REMARK,))


def read_start(ground: Ground, *, alone: bool) -> dict[Variant, list[By]]:
    """Read each column by layer, for every variant and seed."""
    plan = {}
    for variant, seed in product(VARIANTS, ground.setting.seeds):
        recipe = ground.recipe(seed, variant.values)
        values = {**describe_recipe(recipe, ground.text), "attention alone": alone}
        function = partial(measure_start, recipe, alone)
        plan[variant, seed] = Calculation("states at initialisation", values, function, seed)
    measured = ground.setting.rows.read_plan(plan)
    if ground.setting.running and measured.failures:
        raise ValueError(next(iter(measured.failures.values())))
    return {variant: [x for (of, _), x in measured.values.items() if of == variant] for variant in VARIANTS}


def measure_start(recipe: Recipe, alone: bool, place: Workplace, seed: int | None) -> By:
    """Return each column by layer of a model as its seed initializes it, in float64."""
    task = find_task(recipe.task).prepare(recipe.data, prepare_vocabulary(recipe, place))
    config = recipe.resolve_model(task)
    assert isinstance(config, Config)
    model = initialize_model(config, seed or 0).to(place.device).double()
    tokens = [batch for batch, _ in draw_batches(task, model)]
    return measure_states(strip_model(model) if alone else model, tokens)


def _make_cells(ground: Ground, parts: str, found: dict[Variant, list[By]], reason: str) -> list[Cell]:
    cells = []
    reasons = {variant: reason or _explain_vanishing(found[variant]) for variant in VARIANTS}
    for column in SHOWN:
        means = {variant: () if reasons[variant] else _average_layers(found[variant], column) for variant in VARIANTS}
        where: dict[str, Any] = {"item": ITEM, "column": f"{column}, mean over layers", "tags": ground.tags}
        for variant in VARIANTS:
            row = f"{ground.corpus.row}, {parts}: {variant.label}"
            cells.append(Cell(**where, row=row, values=means[variant], not_run=reasons[variant]))
        for variant in VARIANTS[1:]:
            row = f"{ground.corpus.row}, {parts}: {variant.label} − {SOFTMAX.label}"
            missing = reasons[variant] or reasons[SOFTMAX]
            gaps = () if missing else tuple(a - b for a, b in zip(means[variant], means[SOFTMAX], strict=True))
            side: Any = 0 if variant is not CLAIMED else -1 if column == "mean cosine" else 1
            cells.append(Cell(**where, row=row, values=gaps, sign=side, not_run=missing))
    return cells


def _explain_vanishing(seeds: Sequence[By]) -> str:
    """Return why there is no mean over layers, because states became 0, or an empty text."""
    zero = [layer for seed in seeds for layer, value in enumerate(seed["mean cosine"]) if np.isnan(value)]
    return f"the states are 0 after layer {min(zero)}, so they have neither residual nor cosine" if zero else ""


def _average_layers(seeds: Sequence[By], column: str) -> tuple[float, ...]:
    return tuple(float(np.mean(seed[column][1:])) for seed in seeds)
