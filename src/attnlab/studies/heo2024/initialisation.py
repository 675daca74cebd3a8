"""Figure 5: how alike tokens become at initialisation, with λ⁺ varied and λ⁻ = 1; nothing is trained.

By layer, for attention alone (x ← attention(x)) and for the model as it is. In float64, since what is left of a
residual soon falls below the rounding of float32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnlab.experiments.corpora import Ground, grounds
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import Variant
from attnlab.experiments.verdicts import Cell
from attnlab.models.presets import Config
from attnlab.recording.depth import stripped
from attnlab.studies.heo2024.attentions import SOFTMAX, fixed
from attnlab.studies.heo2024.figures import by_layer
from attnlab.studies.heo2024.measures import as_started, batches_of, collapsed
from attnlab.studies.heo2024.plan import DEEP, NAMES
from attnlab.tasks import TASKS

ITEM = "faithfulness"
PLUS = (0.0, 0.5, 1.0, 2.0, 4.0)
VARIANTS = (SOFTMAX, *(fixed(plus, 1.0) for plus in PLUS))
CLAIMED = VARIANTS[1 + PLUS.index(1.0)]  # λ⁺ = λ⁻ = 1: rows sum to 1, as those of softmax do
SHOWN = ("relative residual", "mean cosine")
PARTS = {"attention alone": True, "the whole model": False}
By = dict[str, list[float]]  # by column, a value for each layer


def faithfulness(setting: Setting) -> Findings:
    """The item: residual and cosine by layer of models that have learnt nothing."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in grounds(DEEP, setting, NAMES):
        reason = ground.why_not()
        for name, alone in PARTS.items():
            found = {} if reason else at_start(ground, alone=alone)
            cells += _cells(ground, name, found, reason)
            if found:
                says = f"at initialisation, {name}: residual and cosine by layer, λ⁻ = 1; the mean over seeds."
                lines = {variant.label: seeds for variant, seeds in found.items()}
                figure = by_layer(lines, SHOWN)
                figures[f"{ground.corpus.name}-{'alone' if alone else 'whole'}"] = (
                    figure,
                    f"{ground.corpus.row}: {says}",
                )
    remark = (
        "The paper's Figure 5 varies λ⁺ with λ⁻ = 1; its curves could not be had, only that daGPAM keeps more of the "
        "residual. The claim is held against λ⁺ = 1, where rows sum to 1 as in softmax. A λ⁺ far above λ⁻ is a softmax "
        "with a gain."
    )
    return Findings(cells, figures, (remark,))


def at_start(ground: Ground, *, alone: bool) -> dict[Variant, list[By]]:
    """Of every variant and seed, each column by layer."""
    found: dict[Variant, list[By]] = {}
    setting = ground.setting
    recipe = ground.recipe(0, {})
    task = TASKS[recipe.task].prepare(recipe.data, ground.vocabulary)
    for number, variant in enumerate(VARIANTS):
        setting.progress(number, len(VARIANTS), f"at initialisation, {variant.label}")
        found[variant] = []
        for seed in setting.seeds:
            config = ground.recipe(seed, variant.values).resolve_model(task)
            assert isinstance(config, Config)
            model = as_started(config, seed).to(setting.device).double()
            tokens = [batch for batch, _ in batches_of(task, model)]
            found[variant].append(collapsed(stripped(model) if alone else model, tokens))
    return found


def _cells(ground: Ground, parts: str, found: dict[Variant, list[By]], reason: str) -> list[Cell]:
    cells = []
    reasons = {variant: reason or _vanished(found[variant]) for variant in VARIANTS}
    for column in SHOWN:
        means = {variant: () if reasons[variant] else _means(found[variant], column) for variant in VARIANTS}
        where: dict[str, Any] = {"item": ITEM, "column": f"{column}, mean over layers", "tags": ground.tags}
        for variant in VARIANTS:
            row = f"{ground.corpus.row}, {parts}: {variant.label}"
            cells.append(Cell(**where, row=row, values=means[variant], not_run=reasons[variant]))
        for variant in VARIANTS[1:]:
            row = f"{ground.corpus.row}, {parts}: {variant.label} − {SOFTMAX.label}"
            why = reasons[variant] or reasons[SOFTMAX]
            gaps = () if why else tuple(a - b for a, b in zip(means[variant], means[SOFTMAX], strict=True))
            side: Any = 0 if variant is not CLAIMED else -1 if column == "mean cosine" else 1
            cells.append(Cell(**where, row=row, values=gaps, sign=side, not_run=why))
    return cells


def _vanished(seeds: Sequence[By]) -> str:
    """Why there is no mean over layers: after some, states are too small for any number; empty where they are not."""
    none = [layer for seed in seeds for layer, value in enumerate(seed["mean cosine"]) if np.isnan(value)]
    return (
        f"its states vanish: after layer {min(none)} they are 0, and have neither residual nor cosine" if none else ""
    )


def _means(seeds: Sequence[By], column: str) -> tuple[float, ...]:
    return tuple(float(np.mean(seed[column][1:])) for seed in seeds)
