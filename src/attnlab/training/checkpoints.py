"""What a run needs to go on: weights, optimiser, position, and the random state of every process."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.training import optimisers as optimise
from attnlab.training.run_folder import Checkpoint, RunFolder, read_checkpoint, write_checkpoint
from attnlab.training.step import Stepper


@dataclass
class Position:
    """Where a run stands: after `step` updates, the next being number `index` of the epoch."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    best: float = math.inf  # validation loss, nats a target
    best_step: int = 0
    since_best: int = 0  # evaluations
    metrics_length: int = 0
    loss: float = 0.0  # summed since the last line of the metrics, over so many targets
    targets: int = 0
    finished: bool = False
    processes: int = 1  # that train together
    unevaluated: bool = False  # an evaluation is due at this step

    @property
    def epoch_of_last(self) -> int:
        """The epoch that the last update was of."""
        return self.epoch - (self.index == 0 and self.epoch > 0)


def collect_weights(model: nn.Module, stepper: Stepper, position: Position) -> Checkpoint:
    return Checkpoint(_tensors(model, stepper), {"step": position.step, "best": position.best})


def _tensors(model: nn.Module, stepper: Stepper) -> dict[str, Tensor]:
    """Every parameter and buffer once; the trained ones in float32, as the master has them."""
    named = {name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    return {f"model/{name}": x for name, x in (named | stepper.flat.views(stepper.flat.master.data)).items()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved weights into a model, each of them, and nothing else."""
    own = dict([*model.named_parameters(), *model.named_buffers()])
    if set(own) != set(tensors):
        missing, extra = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
        raise ValueError(f"the weights are of another model: missing {missing[:3]}, unknown {extra[:3]}")
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(tensors[name])


def keep_weights(folder: RunFolder, checkpoint: Checkpoint, *, last: int, evaluated: Sequence[int]) -> None:
    """Keep the weights of this checkpoint, and of no more than so many before it; those evaluated stay."""
    write_checkpoint(checkpoint, folder.step_file(checkpoint.state["step"]))
    for old in [step for step in _kept_steps(folder) if step not in evaluated][:-last]:
        folder.step_file(old).unlink()


def average_checkpoints(folder: RunFolder, count: int) -> dict[str, Tensor]:
    """The mean of the weights kept at the last so many checkpoints; not of steps that were only evaluated."""
    training = folder.config().get("training", {})
    every, end = training.get("checkpoint_every", 1), training.get("steps")
    steps = [step for step in _kept_steps(folder) if step % every == 0 or step == end]
    paths = [folder.step_file(step) for step in steps[-count:]]
    if len(paths) < count:
        raise ValueError(
            f"{folder.path} keeps {len(paths)} checkpoints, fewer than the {count} to average; train with keep_last="
        )
    parts = [read_checkpoint(path).part("model/") for path in paths]
    return {
        name: torch.stack([part[name].float() for part in parts]).mean(0).to(x.dtype) for name, x in parts[0].items()
    }


def _kept_steps(folder: RunFolder) -> list[int]:
    return sorted(int(path.stem) for path in folder.step_file(0).parent.glob("*.safetensors"))


def make_checkpoint(position: Position, model: nn.Module, stepper: Stepper, accelerator: Any) -> Checkpoint:
    from accelerate.utils import gather_object

    tensors = _tensors(model, stepper)
    tensors |= {f"optimiser/{key}": x for key, x in optimise.read_state(stepper.optimizer).items()}
    plain = []
    for rank, (torch_states, rest) in enumerate(gather_object([_random_state()])):
        tensors |= {f"random/{rank}/{name}": x for name, x in torch_states.items()}
        plain.append(rest)
    return Checkpoint(tensors, vars(position) | {"random": plain})


def restore_checkpoint(checkpoint: Checkpoint, model: nn.Module, stepper: Stepper, accelerator: Any) -> Position:
    """Put back what a checkpoint holds. Batches are shared out to processes, so there must be as many as before."""
    state, rank = dict(checkpoint.state), accelerator.process_index
    if "random" not in state:
        raise ValueError("this run was trained as one with others and is finished: nothing is left to train")
    plain = state.pop("random")
    if (before := state.get("processes", 1)) != accelerator.num_processes:
        now = accelerator.num_processes
        raise ValueError(f"this run was trained by {before} process(es), and now there are {now}: start as many again")
    weights = checkpoint.part("model/")
    for name, view in stepper.flat.views(stepper.flat.master.data).items():
        view.copy_(weights[name])
    load_weights(model, weights)
    optimise.write_state(stepper.optimizer, checkpoint.part("optimiser/"))
    _set_random_state(checkpoint.part(f"random/{rank}/"), plain[rank])
    position = Position(**state)
    stepper.loss.fill_(position.loss if rank == 0 else 0.0)  # it is the sum over all processes
    return position


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
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
