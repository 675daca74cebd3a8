"""The 15-layer language model: its perplexity, how alike its tokens become (Table 1), and its gradients (Figure 4).

The paper's rate of learning is not known: the item `rates` looks for the one that is best for each attention.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnlab.experiments.corpora import list_grounds
from attnlab.experiments.learning_rates import compare_at_best_rates
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import VALIDATION, Variant, Variants, read_perplexity
from attnlab.experiments.verdicts import Cell
from attnlab.studies.heo2024.attentions import ALL, GRID, OTHERS, SOFTMAX, TRAINED, read_models
from attnlab.studies.heo2024.figures import draw_by_layer, draw_over_training
from attnlab.studies.heo2024.measures import COLUMNS
from attnlab.studies.heo2024.measures import DEEP as MEASURE
from attnlab.studies.heo2024.plan import DEEP, NAMES
from attnlab.studies.heo2024.published import PTB

PERPLEXITY = {"test perplexity": "test", VALIDATION: "valid"}
SIDES = {"relative residual": 1, "residual norm": 1, "mean cosine": -1}  # of daGPAM − softmax, says the paper
GRADIENT = "query gradient, mean over steps and layers"


def ptb(setting: Setting) -> Findings:
    """The item: perplexity, residual and cosine of every attention."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(DEEP, setting, NAMES):
        models = read_models("ptb", ground, _list_variants(setting), MEASURE)
        cells += [*_make_perplexities(models), *_make_alike(models)]
        if shown := {
            each.label: [found["states"] for found in models.list_values(each)]
            for each in ALL
            if models.list_values(each)
        }:
            says = "the states before the first layer (0) and after each, trained; the mean over seeds."
            figures[ground.corpus.name] = draw_by_layer(shown, list(COLUMNS.values())), f"{ground.corpus.row}: {says}"
    remarks = (
        "The paper's widths, rates and steps are not known, nor whether its perplexity is of the test part: it is "
        "held against the test part here. Of NON, NAP and de-attention only 'severe degradation' is known.",
        "The residual is ‖X − 1xᵀ‖ in the norm √(‖·‖₁‖·‖∞) with x the mean, which is not the least; relative, it is "
        "divided by ‖X‖. Which of the two the paper shows is not known: both are held against what it says.",
    )
    return Findings(cells, figures, remarks)


def gradients(setting: Setting) -> Findings:
    """The item: the query gradient over training, of the same runs."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(DEEP, setting, NAMES):
        models = read_models("gradients", ground, _list_variants(setting), MEASURE)
        for column, value in {GRADIENT: _average_norms(None), "query gradient at the start": _average_norms(0)}.items():
            cells += [models.make_level(each, column, value) for each in _list_variants(setting)]
            cells.append(models.make_contrast(TRAINED, SOFTMAX, column, value, sign=1))
        if shown := {
            each.label: [found["gradients"] for found in models.list_values(each)]
            for each in ALL
            if models.list_values(each)
        }:
            says = "norm of the loss's gradient by the query projection on validation, the mean over seeds."
            figures[ground.corpus.name] = draw_over_training(shown), f"{ground.corpus.row}: {says}"
    remark = (
        "The paper says that daGPAM's query gradients are larger; by how much is not known. A larger gradient is not a "
        "better one: read it beside the perplexity."
    )
    return Findings(cells, figures, (remark,))


def rates(setting: Setting) -> Findings:
    """The item: the rate of learning that is best for each attention, and each at its best."""
    return Findings.join(
        compare_at_best_rates(
            ground, _list_variants(setting), peer=SOFTMAX, columns={"test perplexity": read_perplexity("test")},
            side=lambda variant, _: _find_side(variant), train=partial(read_models, "rates", measure=MEASURE),
        )
        for ground in list_grounds(DEEP, setting, NAMES)
    )  # fmt: skip


def _list_variants(setting: Setting) -> tuple[Variant, ...]:
    """All at full scale; below it one λ pair of the grid."""
    some = (SOFTMAX, TRAINED, GRID[0], *OTHERS)
    return setting.at(smoke=some, small=some, full=ALL)


def _find_side(variant: Variant) -> int:
    """Of 0, that on which the paper says the perplexity less softmax's is; 0 where it says nothing."""
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
        for where, taken in (("mean over layers", np.mean), ("after the last layer", lambda values: values[-1])):
            value = lambda found, name=name, taken=taken: float(taken(found["states"][name][1:]))  # noqa: E731
            column = f"{name}, {where}"
            yield from (models.make_level(each, column, value) for each in _list_variants(models.setting))
            yield models.make_contrast(TRAINED, SOFTMAX, column, value, sign=sign)


def _average_norms(step: int | None) -> Callable[[dict[str, Any]], float]:
    def value(found: dict[str, Any]) -> float:
        rows: Sequence[dict[str, Any]] = found["gradients"]
        return float(np.mean([row["norm"] for row in rows if step is None or row["step"] == step]))

    return value
