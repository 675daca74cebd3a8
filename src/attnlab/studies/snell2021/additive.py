"""A.1: is the optimal attention largest where β is largest? The additive translator on Multi30k.

p_t = σ(W(c_t + s_t)) = σ(Σ_l α_{t,l} γ_{t,l})            eq. 32, 33; γ_{t,l}: the logits of position l alone
α^opt = argmin over the simplex of −log p_t(y_t)          convex, each with a proof (analysis/optimal.py)
"""

from functools import partial

import torch
from torch import Tensor

from attnlab.analysis.agreement import random_baseline
from attnlab.analysis.optimal import optimal_attention
from attnlab.experiments.study import Findings, Setting
from attnlab.models.model import Model
from attnlab.recording.probe import beta, gamma
from attnlab.studies.snell2021.measures import ROWS, AgreementMeans, make_mask
from attnlab.studies.snell2021.performance import Performance
from attnlab.studies.snell2021.plan import MULTI
from attnlab.studies.snell2021.role_run import read_corpora
from attnlab.studies.snell2021.trials import Curves, Trial, extend_curves
from attnlab.tasks.task import PAD, Batch

UNPUBLISHED = "the paper prints no Â of this model"
REMARK = "All numbers are in per cent, on validation, at the checkpoint with the best BLEU of each model."


def a1(setting: Setting) -> Findings:
    """The item: A(α^opt, β), and the BLEU of the additive model and of the model of eq. 2."""
    (multi30k,) = read_corpora(
        [MULTI], setting, lambda size: ["additive"], measure="optimal attention", function=measure_optimal
    )
    curves = [trial.curves["additive"] for trial in multi30k.trials]
    concatenated = [max(trial.curves["A"]["valid/bleu"]) for trial in multi30k.trials]
    make_cell, agreement = partial(multi30k.make_cell, "a1", row="additive model, eq. 32"), "A(α^opt, β)"
    agreed = make_cell(agreement, (each["agreement"][0] for each in curves), published=53.0)
    chance = make_cell("Â", (each["chance"][0] for each in curves), note=UNPUBLISHED)
    above = make_cell(
        f"{agreement} − Â", (each["agreement"][0] - each["chance"][0] for each in curves), note=UNPUBLISHED
    )
    scores = make_cell("BLEU", (max(each["valid/bleu"]) for each in curves), published=38.2)
    others = make_cell("BLEU", concatenated, row="model of eq. 2", published=37.9)
    return Findings([agreed, chance, above, scores, others], remarks=(REMARK,))


def measure_optimal(trial: Trial, role: str) -> Curves:
    """Measure accuracy and BLEU at every checkpoint and, at the best BLEU, A(α^opt, β) and chance, in per cent."""
    field = trial.field
    performance = Performance(field, parts=("valid",))
    curves: Curves = {}
    for _, model in trial.iterate_checkpoints(role):
        extend_curves(curves, performance(model))
    bleu = curves["valid/bleu"]
    best = field.steps[bleu.index(max(bleu))]
    model, means, lengths = trial.load_model(role, best), AgreementMeans(kendall=False), []
    for batch in field.batches["valid"]:
        for u, v, mask in find_optimal_rows(model, batch):
            means.add(u, v, mask)
            lengths.append(mask.sum(-1))
    chance = 100.0 * float(random_baseline(torch.cat(lengths)))
    return curves | {"references": [float(best)], "agreement": [means.compute()["agreement"]], "chance": [chance]}


def find_optimal_rows(model: Model, batch: Batch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return α^opt, β and the mask of the words at each target position, (words,l) each."""
    probes, mask = beta(model, batch.inputs, batch.targets, rows=ROWS), make_mask(batch)  # (b,t,l)
    rows = []
    for position, targets in enumerate(batch.targets.unbind(1)):
        real = targets != PAD
        logits = gamma(model, batch.inputs, position=position)[real]  # (words,l,vocabulary)
        places = mask[real, position]
        best = optimal_attention(logits, targets[real], mask=places).weights
        rows.append((best, probes[real, position], places))
    return rows
