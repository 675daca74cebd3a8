"""Train the seeds of an Experiment as one population, with checkpoints."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.experiments.population import Experiment, Population
from attnlab.experiments.population_updates import Updates
from attnlab.training.loop import catch_stop
from attnlab.training.memory import explain_memory
from attnlab.training.run_folder import Checkpoint, DamagedError, read_checkpoint, write_checkpoint

FILE = "population.safetensors"
Progress = Callable[[int, int], None]  # steps done, of how many


@dataclass(frozen=True)
class SeedResults:
    """What the seeds came to: measures (s, times, …) at `steps`, weights (s,…), and which seeds stayed finite."""

    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    measures: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    finite: Tensor  # (s,) bool


def train_population(
    experiment: Experiment,
    seeds: Sequence[int],
    *,
    device: torch.device | str,
    folder: str | Path | None = None,
    progress: Progress = lambda done, total: None,
) -> SeedResults:
    """Train these seeds as one batched model. With a folder, a killed run resumes from its last checkpoint."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different, and at least one: got {list(seeds)}")
    if late := [step for step in experiment.measured_at if not 0 <= step <= experiment.steps]:
        raise ValueError(f"measured_at={late[0]} must be between 0 and steps={experiment.steps}")
    with explain_memory(lambda: f" for {len(seeds)} seeds as one; train fewer at once, or smaller batches"):
        return _train(
            experiment, seeds, torch.device(device), None if folder is None else Path(folder) / FILE, progress
        )


def _train(
    experiment: Experiment, seeds: Sequence[int], device: torch.device, file: Path | None, progress: Progress
) -> SeedResults:
    population = Population([experiment.model(seed).train() for seed in seeds], device)
    updates = Updates(population, seeds=seeds, lr=experiment.lr, clip=experiment.clip)
    feed = experiment.feed(seeds, device)
    measures: dict[str, list[Tensor]] = {}
    step, taken = _resume(file, experiment, seeds, updates, measures)
    times = sorted(set(experiment.measured_at) | {experiment.steps})
    with _allow_tf32(device), catch_stop() as stop:
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
    return SeedResults(tuple(seeds), tuple(times), stacked, weights, updates.finite.cpu())


def _measure(
    experiment: Experiment, population: Population, seeds: Sequence[int], step: int, measures: dict[str, list[Tensor]]
) -> None:
    population.template.eval()
    with torch.no_grad():
        for name, values in experiment.measure(population, seeds, step).items():
            measures.setdefault(name, []).append(values.detach().cpu())
    population.template.train()


def _resume(
    file: Path | None, experiment: Experiment, seeds: Sequence[int], updates: Updates, measures: dict[str, list[Tensor]]
) -> tuple[int, int]:
    """Restore a checkpoint if there is a whole one; return its step and the number of measures taken."""
    if file is None or not file.exists():
        return 0, 0
    try:
        kept = read_checkpoint(file)
    except DamagedError as error:
        warnings.warn(f"{error}; these seeds restart from step 0", stacklevel=2)
        return 0, 0
    for what, now in (("seeds", list(seeds)), ("experiment", experiment.key())):
        if kept.state[what] != now:
            raise ValueError(f"{file} holds {what} {kept.state[what]}, not {now}: use another folder, or delete it")
    with torch.no_grad():
        for name, x in updates.state().items():
            x.copy_(kept.tensors[f"state.{name}"])
    for name, values in kept.part("measures.").items():
        measures[name] = list(values.unbind(1))
    for generator, state in zip(updates.masks.generators, kept.tensors["generators"], strict=True):
        generator.set_state(state.clone())  # on a CPU torch refuses a row of a tensor
    return int(kept.state["step"]), int(kept.state["taken"])


def _save(file: Path, about: dict[str, Any], updates: Updates, measures: Mapping[str, list[Tensor]]) -> None:
    tensors = {f"state.{name}": x.cpu().contiguous() for name, x in updates.state().items()}
    tensors |= {f"measures.{name}": torch.stack(values, dim=1) for name, values in measures.items()}
    tensors["generators"] = torch.stack([generator.get_state() for generator in updates.masks.generators])
    write_checkpoint(Checkpoint(tensors, about), file)


@contextmanager
def _allow_tf32(device: torch.device) -> Iterator[None]:
    """On a GPU, multiply float32 matrices in tf32: the error is far below the spread over seeds."""
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
