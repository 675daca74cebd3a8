"""Checkpoints: the weights, optimiser state, position and random states that a run needs to resume."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.training import optimisers as optimise
from attnlab.training.run_folder import Checkpoint, RunFolder, read_checkpoint, write_checkpoint
from attnlab.training.step import Stepper

if TYPE_CHECKING:
    from attnlab.training.loop import TrainConfig


@dataclass
class Position:
    """The progress of a run: `step` updates are done, and the next one is number `index` of the epoch."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    best: float = math.inf  # validation loss, nats per target
    best_step: int = 0
    since_best: int = 0  # evaluations since the best one
    metrics_length: int = 0  # bytes
    loss: float = 0.0  # summed over `targets` since the last line of the metrics
    targets: int = 0
    finished: bool = False
    processes: int = 1  # number of processes that train together
    unevaluated: bool = False  # an evaluation is due at this step


def collect_weights(model: nn.Module, stepper: Stepper, position: Position) -> Checkpoint:
    """Return a checkpoint with the weights alone, for decoding and averaging."""
    return Checkpoint(_tensors(model, stepper), {"step": position.step, "best": position.best})


def _tensors(model: nn.Module, stepper: Stepper) -> dict[str, Tensor]:
    """Return every parameter and buffer to store; trained parameters in float32, from the master copy."""
    named = {name: x.detach() for name, x in _list_stored(model).items()}
    return {f"model/{name}": x for name, x in (named | stepper.flat.views(stepper.flat.master.data)).items()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved weights into a model. Raises ValueError unless the names and shapes are the same."""
    own = _list_stored(model)
    if set(own) != set(tensors):
        missing, extra = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
        raise ValueError(f"the weights belong to another model: missing {missing[:3]}, unknown {extra[:3]}")
    with torch.no_grad():
        for name, x in own.items():
            if x.shape != tensors[name].shape:
                shapes = f"{name} has the shape {tuple(tensors[name].shape)}, expected {tuple(x.shape)}"
                raise ValueError(f"the weights belong to another model: {shapes}")
            x.copy_(tensors[name])


def _list_stored(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a checkpoint holds, by name."""
    restored = getattr(model, "restored", frozenset[str]())
    return {name: x for name, x in [*model.named_parameters(), *model.named_buffers()] if name not in restored}


def keep_weights(folder: RunFolder, checkpoint: Checkpoint, config: "TrainConfig") -> None:
    """Keep these weights for averaging, unless the user stopped the run here; delete those that are too old.

    Weights at the steps of evaluate_at= stay.
    """
    if not _is_averaged(checkpoint.state["step"], config.checkpoint_every, config.steps):
        return
    write_checkpoint(checkpoint, folder.step_file(checkpoint.state["step"]))
    kept = _kept_steps(folder)
    newest = [step for step in kept if _is_averaged(step, config.checkpoint_every, config.steps)]
    newest = [step for step in newest if step not in config.evaluate_at][-config.keep_last :]
    for old in set(kept) - {*newest, *config.evaluate_at}:
        folder.step_file(old).unlink()


def average_checkpoints(folder: RunFolder, count: int) -> dict[str, Tensor]:
    """Return the mean weights of the last `count` kept checkpoints, without steps kept only by evaluate_at=."""
    training = folder.config().get("training", {})
    every, end = training.get("checkpoint_every", 1), training.get("steps")
    steps = [step for step in _kept_steps(folder) if _is_averaged(step, every, end)]
    paths = [folder.step_file(step) for step in steps[-count:]]
    if len(paths) < count:
        kept = f"{folder.path} keeps {len(paths)} checkpoints, fewer than the {count} to average"
        raise ValueError(f"{kept}; train with keep_last={count}")
    parts = [read_checkpoint(path).part("model/") for path in paths]
    return {
        name: torch.stack([part[name].float() for part in parts]).mean(0).to(x.dtype) for name, x in parts[0].items()
    }


def _is_averaged(step: int, every: int, end: int) -> bool:
    return step % every == 0 or step == end


def _kept_steps(folder: RunFolder) -> list[int]:
    return sorted(int(path.stem) for path in folder.step_file(0).parent.glob("*.safetensors"))


def make_checkpoint(position: Position, model: nn.Module, stepper: Stepper) -> Checkpoint:
    """Return everything that the run needs to resume. Every process must call it."""
    tensors = _tensors(model, stepper)
    tensors |= {f"optimiser/{key}": x for key, x in optimise.read_state(stepper.optimizer).items()}
    plain = []
    for rank, (torch_states, rest) in enumerate(_gather_random_states(position.processes)):
        tensors |= {f"random/{rank}/{name}": x for name, x in torch_states.items()}
        plain.append(rest)
    return Checkpoint(tensors, vars(position) | {"random": plain})


def _gather_random_states(processes: int) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Return the random states of all processes, in each of them."""
    if processes == 1:
        return [read_random_state()]
    from accelerate.utils import gather_object

    return gather_object([read_random_state()])


def restore_checkpoint(checkpoint: Checkpoint, model: nn.Module, stepper: Stepper, accelerator: Any) -> Position:
    """Load a checkpoint into the model and the stepper, and return its position.

    Raises ValueError if the number of processes differs, because each process has its own batches.
    """
    state, rank = dict(checkpoint.state), accelerator.process_index
    if "random" not in state:
        raise ValueError("this run was trained in a population and is finished: it cannot be resumed")
    plain = state.pop("random")
    if (before := state.get("processes", 1)) != accelerator.num_processes:
        now = accelerator.num_processes
        raise ValueError(f"this run was trained by {before} process(es), but now there are {now}: start {before}")
    weights = checkpoint.part("model/")
    for name, view in stepper.flat.views(stepper.flat.master.data).items():
        view.copy_(weights[name])
    load_weights(model, weights)
    optimise.write_state(stepper.optimizer, checkpoint.part("optimiser/"))
    _set_random_state(checkpoint.part(f"random/{rank}/"), plain[rank])
    position = Position(**state)
    stepper.loss.fill_(position.loss if rank == 0 else 0.0)  # position.loss is the sum over all processes
    return position


def read_random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    kind, keys, *rest = cast(Any, np.random.get_state(legacy=True))
    torch_states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        torch_states["cuda"] = torch.cuda.get_rng_state()
    version, numbers, gauss = random.getstate()
    return torch_states, {"numpy": [kind, keys.tolist(), *rest], "python": [version, list(numbers), gauss]}


def _set_random_state(torch_states: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch_states["torch"])
    if torch.cuda.is_available() and "cuda" in torch_states:
        torch.cuda.set_rng_state(torch_states["cuda"])
    kind, keys, *rest = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, numbers, gauss = plain["python"]
    random.setstate((version, tuple(numbers), gauss))
