"""Word alignment by translators that are trained by the authors' recipe, at the checkpoint of the best BLEU (§5).

    dropout 0.1, label smoothing 0.1, Adam, 4,000 updates of warm-up to 1e-3, then ∝ 1/√step

The authors have about 64,000 tokens in an update and at most 100 epochs of Europarl v7. Here there are 10,000 updates
of 16,384 tokens, from 480,000 pairs. The item alignment has 160,000 pairs, a shorter recipe with cosine decay, and the
checkpoint of the best loss.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from attnlab.decoding.evaluation import evaluate_part
from attnlab.experiments.plan import Measure, Workplace
from attnlab.experiments.study import Findings, Scale, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.studies.kobayashi2020.plan import MORE_EUROPARL, configure_europarl
from attnlab.studies.kobayashi2020.word_alignment import make_recipe, measure_alignment, tabulate_alignment
from attnlab.training.recipe import Recipe
from attnlab.training.runs import Run, open_run

ITEM = "alignment-paper-recipe"
STEPS, FIRST, EVERY = 10_000, 4_000, 1_000  # of full scale: updates; the first checkpoint with a BLEU; between two


def alignment_by_paper_recipe(setting: Setting) -> Findings:
    """The item: the cells of the item alignment, of models with the authors' recipe."""
    measure = Measure("alignment error at best BLEU", partial(measure_at_best_bleu, setting.scale), clean=True)
    found = tabulate_alignment(setting, make_paper_recipe, measure, MORE_EUROPARL)
    remark = (
        "The recipe is the authors': dropout 0.1, Adam with 1e-3 and inverse square root decay, the checkpoint of the "
        "best validation BLEU."
    )
    shorter = f" They have about 64,000 tokens in an update and at most 100 epochs; here {STEPS:,} updates of 16,384."
    remarks = (remark + (shorter if setting.scale == "full" else ""), *found.remarks)
    return Findings([_move_cell(cell) for cell in found.cells], found.figures, remarks)


def make_paper_recipe(attention: str, seed: int, setting: Setting) -> Recipe:
    """Return the recipe of one seed: the authors' at full scale, else the small one with two checkpoints."""
    recipe = make_recipe(attention, seed, setting)
    if setting.scale != "full":
        steps = recipe.training.steps
        return replace(recipe, training=replace(recipe.training, evaluate_at=(steps // 2, steps)))
    model: Any = recipe.model
    training = replace(
        recipe.training, steps=STEPS, optimiser="adam", weight_decay=0.0, lr=1e-3, warmup=4000,
        schedule="inverse-sqrt", evaluate_at=tuple(range(FIRST, STEPS + 1, EVERY)), evaluate_every=EVERY,
    )  # fmt: skip
    data = configure_europarl(setting.place, MORE_EUROPARL)
    return replace(recipe, data=data, model=replace(model, dropout=0.1, activation_dropout=0.0), training=training)


def measure_at_best_bleu(scale: Scale, run: Run, place: Workplace) -> dict[str, Any]:
    """Return the link counts of the checkpoint with the best validation BLEU, its step, and the BLEU of every step."""
    opened = partial(open_run, run.folder.path, device=place.device, asked=run.recipe)
    steps = run.recipe.training.evaluate_at
    bleu = {step: compute_bleu(opened(weights=f"at:{step}")) for step in steps}
    best = max(steps, key=lambda step: bleu[step])  # of equal ones the first
    found = measure_alignment(scale, opened(weights=f"at:{best}"), place, MORE_EUROPARL)
    return found | {"best_step": best, "bleu": [{"step": step, "bleu": score} for step, score in bleu.items()]}


def compute_bleu(run: Run) -> float:
    """Return BLEU on validation."""
    scores = evaluate_part(run, "valid", bootstrap=0)["text"]
    return float(next(score["value"] for score in scores if score["name"] == "BLEU"))


def _move_cell(cell: Cell) -> Cell:
    """Return a cell of the item alignment as one of this item, compared with the same published number."""
    number = str(cell) if cell.published is not None and cell.number is None else cell.number
    return replace(cell, item=ITEM, number=number)
