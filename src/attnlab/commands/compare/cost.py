"""What a model costs before it runs: its parameters, and the arithmetic of a training step.

FLOPs are those of matrix products, forward and backward, two for a multiplication and its addition, counted by
torch.utils.flop_counter on the definition of the attention. Elementwise operations (softmax, norms, noise) are not
counted. FLOPs are given per target token of the first training batch, which is the same for all rows.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnlab.config import describe_error
from attnlab.huggingface.fine_tuning import TunedConfig, open_tuned_model
from attnlab.models.presets import build_on_meta
from attnlab.tasks.task import Batch, Task
from attnlab.training.objective import Objective
from attnlab.training.recipe import Recipe


@dataclass(frozen=True)
class ModelCost:
    parameters: int
    flops: float | None  # per target token, forward and backward
    uncounted: str = ""  # why there are no flops

    def __str__(self) -> str:
        cost = f"{self.flops / 1e6:,.3g} MFLOPs a target token" if self.flops is not None else self.uncounted
        return f"{self.parameters:,} parameters, {cost}"


class CostTable:
    """The costs of recipes on one task. Each model is built once, without memory."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._known: dict[Hashable, ModelCost | str] = {}

    def find(self, recipe: Recipe) -> ModelCost | None:
        """Return the cost; None if the model cannot be built."""
        cost = self._compute(recipe)
        return None if isinstance(cost, str) else cost

    def explain(self, recipe: Recipe) -> str:
        """Return why the model cannot be built; an empty text if it can."""
        cost = self._compute(recipe)
        return cost if isinstance(cost, str) else ""

    def count_parameters(self, recipe: Recipe) -> int | None:
        cost = self.find(recipe)
        return None if cost is None else cost.parameters

    def _compute(self, recipe: Recipe) -> ModelCost | str:
        training = recipe.training
        key = (recipe.model, *recipe.code().items(), training.batch_tokens, training.batch_examples)
        if key not in self._known:
            try:
                config = recipe.resolve_model(self.task)
                model = (
                    open_tuned_model(config).to("meta") if isinstance(config, TunedConfig) else build_on_meta(config)
                )
                self._known[key] = compute_cost(model, take_first_batch(recipe, self.task))
            except Exception as error:  # a user-written attention may raise anything
                self._known[key] = describe_error(error)
        return self._known[key]


def compute_cost(model: nn.Module, batch: Batch) -> ModelCost:
    """Return the cost of a model without memory; flops are None for an attention that needs real numbers."""
    parameters = sum(p.numel() for p in model.parameters())
    inputs = [x.to("meta") for x in batch.inputs]
    try:
        with FlopCounterMode(display=False) as counter:
            Objective(model.train())(inputs, batch.targets.to("meta")).backward()
    except Exception as error:
        return ModelCost(parameters, None, describe_error(error))
    return ModelCost(parameters, counter.get_total_flops() / batch.count)


def take_first_batch(recipe: Recipe, task: Task) -> Batch:
    training = recipe.training
    size: Any = {"examples": training.batch_examples} if training.batch_examples else {"tokens": training.batch_tokens}
    return task.make_batch("train", task.plan_batches("train", seed=training.seed, epoch=0, **size)[0])
