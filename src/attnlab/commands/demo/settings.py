"""What the demo trains: the same small translator for every attention and seed, measured while it learns."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlab.config import Natural, Positive, check_fields
from attnlab.mechanisms import find_mechanism
from attnlab.models.presets import Config, build_on_meta
from attnlab.tasks import find_task
from attnlab.training.recipe import Recipe, resolve_recipe

MODEL = {"layers": "2", "width": "64", "heads": "4", "feed_forward": "128", "dropout": "0"}
DATA = {"data": "lexicon", "held_out": "200"}
MOMENTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)  # in 32nds of the training: most is learnt early


@dataclass(frozen=True)
class DemoConfig:
    attention: tuple[str, ...] = ("softmax", "realformer", "coda", "dagpam")  # mechanisms to train
    steps: int = 400  # number of updates
    batch: int = 32  # number of sentences per batch
    lr: Positive = 3e-3  # learning rate
    seed: Natural = 0  # the first seed
    seeds: int = 3  # number of seeds
    copying: bool = True  # also run Figure 3 of Snell et al.
    open: bool = True  # open the page if there is a desktop
    out: str = "runs/demo"  # folder to write to

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.attention or len(set(self.attention)) < len(self.attention):
            raise ValueError(f"attention={','.join(self.attention)}: give one or more different names, with commas")
        for name in self.attention:
            self.count_parameters(name)  # refuses a bad name before anything is trained

    @property
    def moments(self) -> tuple[int, ...]:
        """The steps at which a model is measured, from 0 (initialization) to the last."""
        return tuple(sorted({self.steps * moment // MOMENTS[-1] for moment in MOMENTS}))

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.seeds))

    def recipe(self, name: str, seed: int) -> Recipe:
        """Return the recipe of one run. Beside an attention for self-attention only, cross attention is softmax."""
        settings = {"attention": name, "steps": str(self.steps), "batch_examples": str(self.batch), "lr": str(self.lr)}
        recipe = resolve_recipe("synthetic", {**DATA, **MODEL, **settings, "seed": str(seed)})
        training = replace(
            recipe.training, evaluate_every=self.steps, evaluate_at=self.moments[1:], checkpoint_every=100, log_every=10
        )
        changes: dict[str, Any] = {"model": "translator", "cross_attention": "softmax"}
        model = replace(recipe.model, **changes) if find_mechanism(name).self_only else recipe.model
        return replace(recipe, training=training, model=model)

    def count_parameters(self, name: str) -> int:
        """Return the number of parameters of the model with this attention."""
        recipe = self.recipe(name, self.seed)
        model = recipe.resolve_model(find_task(recipe.task)(recipe.data))  # type: ignore[call-arg]
        assert isinstance(model, Config)
        return sum(p.numel() for p in build_on_meta(model).parameters())

    def make_folder(self) -> Path:
        """Make the output folder; PermissionError if it is not writable."""
        folder = Path(self.out)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"out={self.out} is not writable")
        return folder

    @property
    def command(self) -> str:
        """The command that makes the same page, with every setting that changes it."""
        values = {"attention": ",".join(self.attention), "steps": self.steps, "batch": self.batch, "lr": self.lr}
        values |= {"seed": self.seed, "copying": str(self.copying).lower()}
        return " ".join(["attnlab demo", *(f"{key}={value}" for key, value in values.items()), f"--seeds {self.seeds}"])
