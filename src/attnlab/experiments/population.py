"""Many seeds of one model as one: weights (s,…) of s models, one pass for all, each as if it were alone.

An Experiment says what a seed is: its model, its batches, what is measured and when. The model is the ordinary one,
mapped over the leading axis by torch.func, so its attention must be a mechanism that torch.func can map (`dot`,
`uniform`, and others by their definition).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from attnlab.models.affine import OneProduct
from attnlab.training.objective import compute_nll

Stacked = tuple[Tensor, ...]  # a batch of each seed: inputs and targets, (s,b,…) each
Feed = Callable[[int], tuple[Stacked, ...]]  # step -> the batches of the next update, passed one after another
IGNORED = -100  # a target that is not scored, as in torch's cross-entropy


class Experiment(ABC):
    """What every seed does: its model, its batches, its measures. A plain value, copied to other processes."""

    steps: int
    lr: float = 1e-3
    clip: float = 0.0  # largest norm of a seed's gradient; 0: no limit
    measured_at: tuple[int, ...] = ()  # numbers of updates
    checkpoint_every: int = 1000

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Return the model of a seed, initialized: forward(*inputs) gives logits (b,…,words)."""

    @abstractmethod
    def feed(self, seeds: Sequence[int], device: torch.device) -> Feed:
        """Return the batches of these seeds. Their content is a pure function of seed and step; padding and splitting
        may depend on the other seeds."""

    @abstractmethod
    def measure(self, population: "Population", seeds: Sequence[int], step: int) -> dict[str, Tensor]:
        """Return numbers by name, (s,) or (s,…) each."""

    def key(self) -> str:
        """Return what tells this experiment from others, so that a folder of another one is not resumed."""
        return repr(self) if is_dataclass(self) else f"{type(self).__qualname__} steps={self.steps} lr={self.lr}"


class Population:
    """s models as one: `map` calls a function of a model and its inputs for all of them at once."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        if not models:
            raise ValueError("a population needs at least one model")
        self.device = device
        self.template = copy.deepcopy(models[0]).to(device)
        weights, self.buffers = stack_module_state([model.to(device) for model in models])
        self.weights = {name: x.detach().requires_grad_(x.requires_grad) for name, x in weights.items()}
        self.dropouts = _replace_dropouts(self.template)

    def __len__(self) -> int:
        return len(next(iter(self.weights.values())))

    def map(self, function: Callable[..., Any], *inputs: Tensor, masks: Mapping[str, Tensor] | None = None) -> Any:
        """Call function(model, *inputs of one seed) for every seed; inputs, masks and results are (s,…)."""
        call = _Call(self.template, function)
        held = {f"model.{name}": x for name, x in (self.weights | self.buffers | dict(masks or {})).items()}
        with OneProduct():
            return vmap(lambda state, *args: functional_call(call, state, args))(held, *inputs)

    def losses(
        self,
        inputs: Sequence[Tensor],
        targets: Tensor,
        masks: Mapping[str, Tensor] | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        """Return (s,) the mean of −log p(target) in nats over the scored targets of each seed.

        masks   of dropout by name; None: no dropout
        count   (s,) the number of targets of the mean, if these targets are only a part of them
        """

        logits = self.map(nn.Module.__call__, *inputs, masks=masks)
        nll = compute_nll(logits, targets)  # 0 where IGNORED
        number = count_targets(targets) if count is None else count
        return nll.flatten(1).sum(1) / number

    def get_member(self, index: int) -> nn.Module:
        """Return one of the models."""
        model = copy.deepcopy(self.template)
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name, x in (self.weights | self.buffers).items():
                own[name].copy_(x[index])
        return model


class _MaskedDropout(nn.Module):
    """Dropout with a given mask: x ∘ mask, each entry 0 or 1/(1 − p), from the generator of its seed."""

    mask: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.shape = p, torch.Size()
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x * self.mask if self.training else x


def _replace_dropouts(model: nn.Module) -> dict[str, _MaskedDropout]:
    """Replace every nn.Dropout of a model; return the new modules by the names of their masks."""
    replaced = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout) and module.p > 0:
            model.set_submodule(name, masked := _MaskedDropout(module.p))
            replaced[f"{name}.mask"] = masked
    return replaced


class Masks:
    """The dropout of a population: one generator per seed, so that its masks do not depend on other seeds."""

    def __init__(self, population: Population, seeds: Sequence[int]) -> None:
        self.population, self.device = population, population.device
        self.generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        self._shapes: dict[tuple[Any, ...], dict[str, torch.Size]] = {}

    def draw(self, batch: Stacked) -> dict[str, Tensor]:
        """Draw fresh masks for a batch, by name."""
        if not self.population.dropouts:
            return {}
        drawn = {}
        for name, shape in self.find_shapes(batch).items():
            kept, p = torch.empty(len(self.generators), *shape, device=self.device), self.population.dropouts[name].p
            for part, generator in zip(kept, self.generators, strict=True):
                part.bernoulli_(1 - p, generator=generator)
            drawn[name] = kept / (1 - p)
        return drawn

    def find_shapes(self, batch: Stacked) -> dict[str, torch.Size]:
        """Return the input shape of each dropout, by one pass without dropout per batch shape."""
        key = tuple(x.shape for x in batch)
        if key not in self._shapes:
            with torch.no_grad():
                self.population.losses(batch[:-1], batch[-1])
            self._shapes[key] = {name: module.shape for name, module in self.population.dropouts.items()}
        return self._shapes[key]


class _Call(nn.Module):
    """A function of a model, as a module for functional_call."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.model, *inputs)


def count_targets(targets: Tensor) -> Tensor:
    """Return (s,) the number of scored targets of each seed."""
    return (targets != IGNORED).flatten(1).sum(1)
