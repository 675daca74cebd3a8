"""Many seeds of one model, trained as one: weights (s,…) of s models, one pass for all, each as if it were alone.

    θ_k ← Adam(θ_k, ∇ mean_targets −log p(target; θ_k, batch_k))        k = 1 … s, side by side

An Experiment says what a seed is: its model, its batches, what is measured and when. The model is the ordinary one,
mapped over the leading axis by torch.func, so attention must be a mechanism that torch.func can map (`dot`, `uniform`,
and others by their definition). On a GPU a whole step, update included, is one CUDA graph. On a CPU stacking gains
nothing but for the smallest models, so seeds are shared out to processes of one thread each, which train them one after
the other. A seed whose loss or gradient is not finite keeps its last good weights, is marked, and the others go on.
With a folder, a run that was killed goes on from its last checkpoint.
"""

import copy
import os
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.linalg import vector_norm
from torch.nn import functional as F

from attnlab.models.affine import OneProduct
from attnlab.training.loop import catch_stop
from attnlab.training.run_folder import Checkpoint, DamagedError, read_checkpoint, write_checkpoint

Stacked = tuple[Tensor, ...]  # a batch of each seed: inputs and targets, (s,b,…) each
Feed = Callable[[int], tuple[Stacked, ...]]  # step -> the batches of the next update, passed one after another
Progress = Callable[[int, int], None]  # steps done, of how many, all seeds together
IGNORED = -100  # a target that is not scored


class Experiment(ABC):
    """What every seed does. A plain value: processes get a copy of it."""

    steps: int
    lr: float = 1e-3
    clip: float = 0.0  # the largest norm of a seed's gradient; 0: no limit
    measured_at: tuple[int, ...] = ()  # after so many updates
    checkpoint_every: int = 1000

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The model of a seed, initialised: forward(*inputs) gives logits (b,…,words)."""

    @abstractmethod
    def feed(self, seeds: Sequence[int], device: torch.device) -> Feed:
        """The batches of these seeds. What a seed's hold is a pure function of seed and step; how they are padded and
        parted may depend on what other seeds are there."""

    @abstractmethod
    def measure(self, population: "Population", seeds: Sequence[int], step: int) -> dict[str, Tensor]:
        """Numbers by name, (s,) or (s,…) each."""

    def key(self) -> str:
        """What tells this experiment from another one, so that a folder of that one is not gone on with."""
        return repr(self) if is_dataclass(self) else f"{type(self).__qualname__} steps={self.steps} lr={self.lr}"


@dataclass(frozen=True)
class Grown:
    """What came of the seeds: measures (s, times, …) at `steps`, weights (s,…), and which seeds stayed finite."""

    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    measures: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    finite: Tensor  # (s,) bool


class Population:
    """s models as one: `map` runs a function of a model and its inputs for all of them at once."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        if not models:
            raise ValueError("a population needs at least one model")
        self.device = device
        self.template = copy.deepcopy(models[0]).to(device)
        weights, self.buffers = stack_module_state([model.to(device) for model in models])
        self.weights = {name: x.detach().requires_grad_(x.requires_grad) for name, x in weights.items()}
        self.dropouts = _with_masks(self.template)

    def __len__(self) -> int:
        return len(next(iter(self.weights.values())))

    def map(self, function: Callable[..., Any], *inputs: Tensor, masks: Mapping[str, Tensor] | None = None) -> Any:
        """function(model, *inputs of one seed) for every seed; inputs, masks and what it returns are (s,…)."""
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
        """(s,) Σ over scored targets of −log p(target), in nats, by their count: the mean.

        masks   of dropout by name; None: none drops
        count   (s,) where the targets are a part of those that the mean is over, the number of these
        """

        def loss(model: nn.Module, *args: Tensor) -> Tensor:
            *given, goal, number = args
            logits = model(*given).flatten(0, -2).float()
            scored = goal.flatten() != IGNORED
            nll = F.cross_entropy(logits, goal.flatten().masked_fill(~scored, 0), reduction="none")
            return (nll * scored).sum() / number

        return self.map(loss, *inputs, targets, _count(targets) if count is None else count, masks=masks)

    def member(self, index: int) -> nn.Module:
        """One of the models, by itself."""
        model = copy.deepcopy(self.template)
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name, x in (self.weights | self.buffers).items():
                own[name].copy_(x[index])
        return model


class _Masked(nn.Module):
    """Dropout whose mask is given: x ∘ mask, the mask 0 or 1/(1 − p), drawn for each seed from its own generator."""

    mask: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.shape = p, torch.Size()
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x * self.mask if self.training else x


def _with_masks(model: nn.Module) -> dict[str, _Masked]:
    """Put a _Masked where the model drops out; they by the names of their masks."""
    found = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout) and module.p > 0:
            model.set_submodule(name, made := _Masked(module.p))
            found[f"{name}.mask"] = made
    return found


class Masks:
    """The dropout of a population: one generator a seed, so that a seed's masks do not depend on its company."""

    def __init__(self, population: Population, seeds: Sequence[int]) -> None:
        self.population, self.device = population, population.device
        self.generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        self._shapes: dict[tuple, dict[str, torch.Size]] = {}

    def draw(self, batch: Stacked) -> dict[str, Tensor]:
        """Fresh masks for a batch, by name."""
        if not self.population.dropouts:
            return {}
        drawn = {}
        for name, shape in self.shapes(batch).items():
            kept, p = torch.empty(len(self.generators), *shape, device=self.device), self.population.dropouts[name].p
            for part, generator in zip(kept, self.generators, strict=True):
                part.bernoulli_(1 - p, generator=generator)
            drawn[name] = kept / (1 - p)
        return drawn

    def shapes(self, batch: Stacked) -> dict[str, torch.Size]:
        """What each dropout is given for such a batch, seen once by a pass in which nothing is dropped."""
        key = tuple(x.shape for x in batch)
        if key not in self._shapes:
            with torch.no_grad():
                self.population.losses(batch[:-1], batch[-1])
            self._shapes[key] = {name: module.shape for name, module in self.population.dropouts.items()}
        return self._shapes[key]


class _Call(nn.Module):
    """A function of a model, as a module that functional_call can give other weights."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.model, *inputs)


class Updates:
    """Steps of Adam on a population; on a GPU recorded as one CUDA graph for each shape of its batches."""

    def __init__(self, population: Population, *, seeds: Sequence[int], lr: float, clip: float) -> None:
        self.population, self.clip = population, clip
        self.masks = Masks(population, seeds)
        self.trained = [x for x in population.weights.values() if x.requires_grad]
        self.device = self.trained[0].device
        self.finite = torch.ones(len(population), dtype=torch.bool, device=self.device)
        self.captured = self.device.type == "cuda"
        self.adam = torch.optim.Adam(self.trained, lr=lr, fused=self.captured, capturable=self.captured)
        for x in self.trained:  # made now, so that a checkpoint can fill it and a graph can hold it
            step = torch.zeros((), device=self.device if self.captured else "cpu")
            self.adam.state[x] = {"step": step, "exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, list[Stacked]]] = {}
        if self.captured:  # all graphs have one memory, since one at a time is replayed; and it belongs to a stream
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)

    def __call__(self, *batches: Stacked) -> None:
        """One update, by the mean over the targets of all batches."""
        if any(isinstance(batch, Tensor) for batch in batches):
            raise TypeError(
                "an update is made from batches, each a tuple of inputs and targets: feed gives a tuple of them"
            )
        if not self.captured:
            return self._update(*batches)
        key = tuple(tuple((x.shape, x.dtype) for x in batch) for batch in batches)
        if key not in self.graphs:
            self._make_room(_largest(batches))
            buffers = [tuple(x.to(self.device, copy=True) for x in batch) for batch in batches]
            self.graphs[key] = self._capture(buffers), buffers
        graph, buffers = self.graphs[key]
        for into, batch in zip(buffers, batches, strict=True):
            for buffer, x in zip(into, batch, strict=True):
                buffer.copy_(x, non_blocking=True)
        graph.replay()
        return None

    def state(self) -> dict[str, Tensor]:
        """What is needed to go on, by name; the tensors themselves."""
        kept = {f"weights.{name}": x.detach() for name, x in self.population.weights.items()}
        for number, x in enumerate(self.trained):
            kept |= {f"adam.{number}.{name}": value for name, value in self.adam.state[x].items()}
        return kept | {"finite": self.finite}

    def _update(self, *batches: Stacked) -> None:
        count = torch.stack([_count(targets) for *_, targets in batches]).sum(0).clamp(min=1)
        losses, gradients = self._pass(batches[0], count)
        for batch in batches[1:]:
            more, by_more = self._pass(batch, count)
            losses, gradients = losses + more, tuple(g + other for g, other in zip(gradients, by_more, strict=True))
        norms = vector_norm(torch.stack([vector_norm(g.flatten(1), dim=1) for g in gradients]), dim=0)  # (s,)
        self.finite &= (norms + losses).isfinite()
        factor = (self.clip / (norms + 1e-6)).clamp(max=1.0) if self.clip > 0 else None
        for x, g in zip(self.trained, gradients, strict=True):
            one_each = (-1, *[1] * (x.dim() - 1))
            kept = self.finite.view(one_each)
            x.grad = torch.where(kept, g if factor is None else g * factor.view(one_each), 0.0).contiguous()
            self.adam.state[x]["exp_avg"].mul_(kept)  # a seed that failed stays where it is
        self.adam.step()

    def _pass(self, batch: Stacked, count: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A batch's part of the losses, and of their gradients."""
        losses = self.population.losses(batch[:-1], batch[-1], self.masks.draw(batch), count)
        return losses.detach(), torch.autograd.grad(losses.sum(), self.trained)

    def _make_room(self, numbers: int) -> None:
        """Before the largest batch so far, by its numbers, let all graphs go, to be recorded again when their shape
        comes again: the memory of a large one is enough for a small one, but not the other way round."""
        if self.graphs and all(numbers > _largest(buffers) for _, buffers in self.graphs.values()):
            torch.cuda.synchronize(self.device)
            self.graphs.clear()
            self.pool = torch.cuda.graph_pool_handle()

    def _capture(self, buffers: Sequence[Stacked]) -> torch.cuda.CUDAGraph:
        for batch in buffers:
            self.masks.shapes(batch)  # a pass of its own, not to be recorded
        before = {name: x.clone() for name, x in self.state().items()}
        drawn = [generator.get_state() for generator in self.masks.generators]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self._update(*buffers)
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.empty_cache()  # the rehearsals' memory: the graph has its own
        graph = torch.cuda.CUDAGraph()
        for generator in self.masks.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self._update(*buffers)
        with torch.no_grad():
            for name, x in self.state().items():
                x.copy_(before[name])
        for generator, state in zip(self.masks.generators, drawn, strict=True):
            generator.set_state(state)
        return graph


def _count(targets: Tensor) -> Tensor:
    """(s,) how many of a seed's are scored."""
    return (targets != IGNORED).flatten(1).sum(1)


def _largest(batches: Sequence[Stacked]) -> int:
    """The numbers of the largest batch."""
    return max(sum(x.numel() for x in batch) for batch in batches)


def grow(
    experiment: Experiment,
    seeds: Sequence[int],
    *,
    device: torch.device | str,
    folder: str | Path | None = None,
    processes: int | None = None,
    as_one: bool = False,
    progress: Progress = lambda done, total: None,
) -> Grown:
    """Train all seeds.

    processes   on a CPU, how many seeds train at a time; None: one for each core
    as_one      also on a CPU as one batched model, as on a GPU: for models so small that Python takes the time
    """
    folder, device = None if folder is None else Path(folder), torch.device(device)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different, and at least one, not {list(seeds)}")
    if late := [step for step in experiment.measured_at if not 0 <= step <= experiment.steps]:
        raise ValueError(f"measured_at={late[0]} is not between 0 and steps={experiment.steps}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if as_one and processes is not None:
        raise ValueError(f"processes={processes} has no meaning with as_one=True: say one of them")
    if device.type != "cpu" or as_one:
        return _together(experiment, seeds, device, folder and folder / "population.safetensors", progress)
    files = [folder and folder / f"seed-{seed}.safetensors" for seed in seeds]
    workers = min(processes or len(os.sched_getaffinity(0)), len(seeds))
    total = experiment.steps * len(seeds)
    if workers == 1:
        parts = []
        for number, (seed, file) in enumerate(zip(seeds, files, strict=True)):
            told = partial(_shifted, progress, number * experiment.steps, total)
            parts.append(_together(experiment, [seed], device, file, told))
        return _joined(parts)
    spawning = get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, spawning, initializer=_one_thread, initargs=(os.getpid(),)) as pool:
            jobs = {
                pool.submit(_together, experiment, [seed], device, file, _silent): seed
                for seed, file in zip(seeds, files, strict=True)
            }
            for number, job in enumerate(as_completed(jobs), start=1):
                job.result()  # a seed that failed is told now, not when all are done
                progress(number * experiment.steps, total)
            done = {seed: job.result() for job, seed in jobs.items()}
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that trains seeds ended before it was done. In a script, call grow under "
            'if __name__ == "__main__":, since processes read the script again, or say processes=1. Else it was '
            "killed, as for want of memory"
        ) from error
    return _joined([done[seed] for seed in seeds])


def _together(
    experiment: Experiment, seeds: Sequence[int], device: torch.device, file: Path | None, progress: Progress
) -> Grown:
    """Train these seeds as one batched model."""
    population = Population([experiment.model(seed).train() for seed in seeds], device)
    updates = Updates(population, seeds=seeds, lr=experiment.lr, clip=experiment.clip)
    feed = experiment.feed(seeds, device)
    measures: dict[str, list[Tensor]] = {}
    step, taken = _resumed(file, experiment, seeds, updates, measures)
    times = sorted(set(experiment.measured_at) | {experiment.steps})
    with _fast_products(device), catch_stop() as stop:
        while True:
            if step in times[taken:]:
                _measure(experiment, population, seeds, step, measures)
                taken += 1
            done = step == experiment.steps
            if file is not None and (done or stop.is_set() or (step and step % experiment.checkpoint_every == 0)):
                about = {"experiment": experiment.key(), "seeds": list(seeds), "step": step, "taken": taken}
                _save(file, about, updates, measures)
            progress(step, experiment.steps)
            if done:
                break
            if stop.is_set():
                raise KeyboardInterrupt
            updates(*feed(step))
            step += 1
    weights = {name: x.detach().cpu() for name, x in population.weights.items()}
    stacked = {name: torch.stack(values, dim=1) for name, values in measures.items()}
    return Grown(tuple(seeds), tuple(times), stacked, weights, updates.finite.cpu())


def _measure(
    experiment: Experiment, population: Population, seeds: Sequence[int], step: int, measures: dict[str, list[Tensor]]
) -> None:
    population.template.eval()
    with torch.no_grad():
        for name, values in experiment.measure(population, seeds, step).items():
            measures.setdefault(name, []).append(values.detach().cpu())
    population.template.train()


def _resumed(
    file: Path | None, experiment: Experiment, seeds: Sequence[int], updates: Updates, measures: dict[str, list[Tensor]]
) -> tuple[int, int]:
    """Put back what the file holds, if it is there and whole; the step it was written at, and measures taken."""
    if file is None or not file.exists():
        return 0, 0
    try:
        kept = read_checkpoint(file)
    except DamagedError as error:
        warnings.warn(f"{error}; these seeds start again", stacklevel=2)
        return 0, 0
    for what, now in (("seeds", list(seeds)), ("experiment", experiment.key())):
        if kept.state[what] != now:
            raise ValueError(f"{file} holds {what} {kept.state[what]}, not {now}: give another folder, or delete it")
    with torch.no_grad():
        for name, x in updates.state().items():
            x.copy_(kept.tensors[f"state.{name}"])
    for name, values in kept.part("measures.").items():
        measures[name] = list(values.unbind(1))
    for generator, state in zip(updates.masks.generators, kept.tensors["generators"], strict=True):
        generator.set_state(state.clone())  # torch refuses a row of a tensor, on a CPU
    return int(kept.state["step"]), int(kept.state["taken"])


def _save(file: Path, about: dict[str, Any], updates: Updates, measures: Mapping[str, list[Tensor]]) -> None:
    tensors = {f"state.{name}": x.cpu().contiguous() for name, x in updates.state().items()}
    tensors |= {f"measures.{name}": torch.stack(values, dim=1) for name, values in measures.items()}
    tensors["generators"] = torch.stack([generator.get_state() for generator in updates.masks.generators])
    write_checkpoint(Checkpoint(tensors, about), file)


def _joined(parts: Sequence[Grown]) -> Grown:
    def cat(of: Callable[[Grown], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([of(part)[name] for part in parts]) for name in of(parts[0])}

    seeds = tuple(seed for part in parts for seed in part.seeds)
    finite = torch.cat([part.finite for part in parts])
    return Grown(seeds, parts[0].steps, cat(lambda g: g.measures), cat(lambda g: g.weights), finite)


@contextmanager
def _fast_products(device: torch.device) -> Iterator[None]:
    """On a GPU matrix products of float32 in tf32, which the spread over seeds hides; sums stay in float32."""
    if device.type != "cuda":
        with nullcontext():
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _one_thread(parent: int) -> None:
    """How a process begins: with one thread, and another that ends it when the one that started it is gone."""
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _shifted(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    """Progress of one seed as progress of all."""
    progress(before + done, total)


def _silent(done: int, total: int) -> None:
    """Progress of a process by itself is not told."""
