"""The 15-layer language model: its perplexity, how alike its tokens become (Table 1), and its gradients (Figure 4).

The paper's learning rate is not known. The item `rates` searches the best one of each attention.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnlab.experiments.corpora import list_grounds
from attnlab.experiments.learning_rates import compare_at_best_rates
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import VALIDATION, Value, Variant, Variants, read_perplexity
from attnlab.experiments.verdicts import Cell
from attnlab.studies.heo2024.attentions import ALL, GRID, OTHERS, SOFTMAX, STARTS, TRAINED, read_models
from attnlab.studies.heo2024.figures import draw_by_layer, draw_over_training
from attnlab.studies.heo2024.measures import COLUMNS
from attnlab.studies.heo2024.measures import DEEP as MEASURE
from attnlab.studies.heo2024.plan import DEEP, NAMES
from attnlab.studies.heo2024.published import PTB

PERPLEXITY = {"test perplexity": "test", VALIDATION: "valid"}
SIDES = {"relative residual": 1, "residual norm": 1, "mean cosine": -1}  # the sign of daGPAM − softmax in the paper
GRADIENT = "query gradient, mean over steps and layers"


def ptb(setting: Setting) -> Findings:
    """The item: perplexity, residual and cosine of every attention."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(DEEP, setting, NAMES):
        models = read_models("ptb", ground, _list_variants(setting), MEASURE)
        cells += [*_make_perplexities(models), *_make_alike(models)]
        if shown := _collect_values(models, "states"):
            caption = "states of trained models before the first layer (0) and after each layer, mean over seeds."
            figure = draw_by_layer(shown, list(COLUMNS.values()))
            figures[ground.corpus.name] = figure, f"{ground.corpus.row}: {caption}"
    remarks = (
        "The paper's widths, learning rates and steps are not known. Its perplexity is compared with that of the test "
        "part; which part it is of is not known. Of NON, NAP and de-attention only 'severe degradation' is known.",
        "The residual is ‖X − 1xᵀ‖ in the norm √(‖·‖₁‖·‖∞). Here x is the mean, which does not minimize it. The "
        "relative one is divided by ‖X‖. Which one the paper shows is not known: both are compared with its claim.",
    )
    return Findings(cells, figures, remarks)


def gradients(setting: Setting) -> Findings:
    """The item: the query gradient of the same runs over training."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(DEEP, setting, NAMES):
        models = read_models("gradients", ground, _list_variants(setting), MEASURE)
        for column, value in {GRADIENT: _average_norms(None), "query gradient at the start": _average_norms(0)}.items():
            cells += [models.make_level(each, column, value) for each in _list_variants(setting)]
            cells.append(models.make_contrast(TRAINED, SOFTMAX, column, value, sign=1))
        if shown := _collect_values(models, "gradients"):
            caption = "norm of the loss's gradient by the query projection on validation, mean over seeds."
            figures[ground.corpus.name] = draw_over_training(shown), f"{ground.corpus.row}: {caption}"
    remark = (
        "The paper says that daGPAM's query gradients are larger; by how much is not known. A larger gradient is not "
        "better by itself: compare the perplexity."
    )
    return Findings(cells, figures, (remark,))


def rates(setting: Setting) -> Findings:
    """The item: the best learning rate of each attention, and each attention at its best."""
    return Findings.join(
        compare_at_best_rates(
            ground, _list_variants(setting), peer=SOFTMAX, columns={"test perplexity": read_perplexity("test")},
            side=lambda variant, _: _find_side(variant), train=partial(read_models, "rates", measure=MEASURE),
        )
        for ground in list_grounds(DEEP, setting, NAMES)
    )  # fmt: skip


def starts(setting: Setting) -> Findings:
    """The item: does daGPAM's perplexity depend on where λ and W⁻ start?"""
    cells: list[Cell] = []
    tried = setting.at(smoke=STARTS[::4], small=STARTS[::4], full=STARTS)
    for ground in list_grounds(DEEP, setting, NAMES):
        models = read_models("starts", ground, (SOFTMAX, *tried), MEASURE)
        for column, part in PERPLEXITY.items():
            value = read_perplexity(part)
            cells += [models.make_level(each, column, value) for each in (SOFTMAX, *tried)]
            cells += [models.make_contrast(each, SOFTMAX, column, value) for each in tried]
    remark = (
        "The paper's initial λ and W⁻ are not known, so no cell has a verdict. λ = 0 starts as softmax. If a start "
        "brings the perplexity below softmax's, our start at 1 explains why the item ptb does not show the claim."
    )
    return Findings(cells, remarks=(remark,))


def _list_variants(setting: Setting) -> tuple[Variant, ...]:
    """Return all attentions at full scale, and with one pair of fixed λ below it."""
    some = (SOFTMAX, TRAINED, GRID[0], *OTHERS)
    return setting.at(smoke=some, small=some, full=ALL)


def _find_side(variant: Variant) -> int:
    """Return the sign of the perplexity − softmax's in the paper; 0 if it says nothing."""
    return -1 if variant == TRAINED else 1 if variant in OTHERS else 0


def _make_perplexities(models: Variants) -> Iterator[Cell]:
    for column, part in PERPLEXITY.items():
        value = read_perplexity(part)
        printed = PTB if part == "test" else {}
        for each in _list_variants(models.setting):
            yield models.make_level(each, column, value, printed.get(each.name))
        for each in _list_variants(models.setting)[1:]:
            gap = printed["dagpam"] - printed["softmax"] if each is TRAINED and printed else None
            yield models.make_contrast(each, SOFTMAX, column, value, gap, sign=_find_side(each))


def _make_alike(models: Variants) -> Iterator[Cell]:
    for name, sign in SIDES.items():
        for where, take in (("mean over layers", np.mean), ("after the last layer", lambda values: values[-1])):
            value = lambda values, name=name, take=take: float(take(values["states"][name][1:]))  # noqa: E731
            column = f"{name}, {where}"
            yield from (models.make_level(each, column, value) for each in _list_variants(models.setting))
            yield models.make_contrast(TRAINED, SOFTMAX, column, value, sign=sign)


def _average_norms(step: int | None) -> Value:
    """Return the function that averages the norms over layers, at one step or over all."""

    def average(values: dict[str, Any]) -> float:
        return float(np.mean([row["norm"] for row in values["gradients"] if step is None or row["step"] == step]))

    return average


def _collect_values(models: Variants, key: str) -> dict[str, list[Any]]:
    """Return one of the measured values of every seed, by the labels of the attentions that have some."""
    values = {each.label: [run[key] for run in models.list_values(each)] for each in ALL}
    return {label: seeds for label, seeds in values.items() if seeds}
