"""What a model costs before it is run: its parameters, and the arithmetic of a training step.

FLOPs are those of matrix products, two for a multiplication and its addition, forward and backward, as
torch.utils.flop_counter counts them on the definition of the attention; element by element operations (softmax, norms,
noise) are not counted. They are given for a target token of the first training batch, which is the same for all rows.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnlab.experiments.jobs import describe_error
from attnlab.huggingface.fine_tuning import TunedConfig, open_tuned_model
from attnlab.models.presets import build_on_meta
from attnlab.tasks.task import Batch, Task
from attnlab.training.recipe import Recipe
from attnlab.training.step import Objective


@dataclass(frozen=True)
class ModelCost:
    parameters: int
    flops: float | None  # a target token, forward and backward
    uncounted: str = ""  # why there are none

    def __str__(self) -> str:
        cost = f"{self.flops / 1e6:,.3g} MFLOPs a target token" if self.flops is not None else self.uncounted
        return f"{self.parameters:,} parameters, {cost}"


class Sizes:
    """Of recipes on one task; each model is made without its memory, and once for all seeds and rates of learning."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.known: dict[Hashable, ModelCost] = {}

    def of(self, recipe: Recipe) -> ModelCost | None:
        """None where the model cannot be built: `why_not` says why."""
        return None if self.why_not(recipe) else self._measured(recipe)

    def why_not(self, recipe: Recipe) -> str:
        """Why the model cannot be built; empty where it can."""
        try:
            self._model(recipe)
        except Exception as error:  # whatever an attention of one's own may raise
            return describe_error(error)
        return ""

    def parameters(self, recipe: Recipe) -> int | None:
        return None if self.why_not(recipe) else _count(self._model(recipe))

    def _measured(self, recipe: Recipe) -> ModelCost:
        training = recipe.training
        key = (recipe.resolve_model(self.task), *recipe.code().items(), training.batch_tokens, training.batch_examples)
        if key not in self.known:
            model, batch = self._model(recipe), first_batch(recipe, self.task)
            try:
                self.known[key] = ModelCost(_count(model), flops(model, batch) / batch.count)
            except Exception as error:  # an attention that needs real numbers: it is trained all the same
                self.known[key] = ModelCost(_count(model), None, describe_error(error))
        return self.known[key]

    def _model(self, recipe: Recipe) -> nn.Module:
        config = recipe.resolve_model(self.task)
        return open_tuned_model(config).to("meta") if isinstance(config, TunedConfig) else build_on_meta(config)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def first_batch(recipe: Recipe, task: Task) -> Batch:
    training = recipe.training
    budget: Any = (
        {"examples": training.batch_examples} if training.batch_examples else {"tokens": training.batch_tokens}
    )
    return task.make_batch("train", task.plan_batches("train", seed=training.seed, epoch=0, **budget)[0])


def flops(model: nn.Module, batch: Batch) -> int:
    """Of one step of a model without memory on a batch, in all."""
    inputs = [x.to("meta") for x in batch.inputs]
    with FlopCounterMode(display=False) as counter:
        Objective(model.train())(inputs, batch.targets.to("meta")).backward()
    return counter.get_total_flops()
