"""What the demo trains: the same small translator for every attention and seed, looked at while it learns."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlab.mechanisms import find_mechanism
from attnlab.models.presets import Config, build_on_meta
from attnlab.tasks import TASKS
from attnlab.training.recipe import Recipe, resolve_recipe

MODEL = {"layers": "2", "width": "64", "heads": "4", "feed_forward": "128", "dropout": "0"}
DATA = {"data": "lexicon", "held_out": "200"}
MOMENTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)  # of a training, in 32nds: most is learnt early


@dataclass(frozen=True)
class DemoConfig:
    attention: tuple[str, ...] = ("softmax", "realformer", "coda", "dagpam")
    steps: int = 400
    batch: int = 32  # sentences
    lr: float = 3e-3
    seed: int = 0  # the first
    seeds: int = 3
    copying: bool = True  # also the study of copying
    open: bool = True  # the page, where there is a desktop
    out: str = "runs/demo"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be below 0, as {self.seed} is")
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")
        if not self.attention or len(set(self.attention)) < len(self.attention):
            raise ValueError("attention= takes one or more names, separated by commas, each once")
        for name in self.attention:
            self.parameters(name)  # what is wrong with one is said before the first is trained

    @property
    def moments(self) -> tuple[int, ...]:
        """The steps at which a model is looked at, from 0, as it starts, to the last."""
        return tuple(sorted({self.steps * moment // MOMENTS[-1] for moment in MOMENTS}))

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.seeds))

    def recipe(self, name: str, seed: int) -> Recipe:
        """What one run is made of. An attention that is for self-attention alone leaves the cross attention softmax."""
        said = {"attention": name, "steps": str(self.steps), "batch_examples": str(self.batch), "lr": str(self.lr)}
        made = resolve_recipe("synthetic", {**DATA, **MODEL, **said, "seed": str(seed)})
        training = replace(
            made.training, evaluate_every=self.steps, evaluate_at=self.moments[1:], checkpoint_every=100, log_every=10
        )
        changes: dict[str, Any] = (
            {"model": "translator", "cross_attention": "softmax"} if find_mechanism(name).self_only else {}
        )
        return replace(made, training=training, model=replace(made.model, **changes))

    def parameters(self, name: str) -> int:
        """How many the model with this attention has."""
        recipe = self.recipe(name, self.seed)
        fitted = recipe.resolve_model(TASKS[recipe.task](recipe.data))  # type: ignore[call-arg]
        assert isinstance(fitted, Config)
        return sum(p.numel() for p in build_on_meta(fitted).parameters())

    def folder(self) -> Path:
        """Where it will be written; made, and found to be writable, before anything is trained."""
        folder = Path(self.out)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"out={self.out} cannot be written to")
        return folder

    def command(self) -> str:
        """What makes the same page again, whatever the defaults are by then."""
        values = {"attention": ",".join(self.attention), "steps": self.steps, "batch": self.batch, "lr": self.lr}
        values |= {"seed": self.seed, "seeds": self.seeds, "copying": str(self.copying).lower()}
        return " ".join(["attnlab demo", *(f"{key}={value}" for key, value in values.items())])
