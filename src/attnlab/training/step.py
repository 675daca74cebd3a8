"""One update of the parameters: accumulate the gradients of batches, clip them, and apply them if they are finite.

    g = Σ_batches ∇ (scale · Σ_targets loss)        scale = processes / targets of the whole update

All trained parameters lie in one flat float32 vector, the master, which the optimiser updates. A model in bf16
computes with a copy of it. A flag on the device is set when a loss or a gradient is not finite. While it is set, the
fused optimiser changes nothing, so the weights stay those of the last good update. The host reads the flag from time
to time.

`Captured` records the passes of each batch shape, and the update, as CUDA graphs. A step then takes the time of the
device's work, without the time of Python's launches. Batches are padded to one of a few shapes. Each replay draws new
dropout and noise. A graph of compiled blocks replaces the first one of its shape once the shape has occurred often:
compiling takes several seconds, so a short run is over before it would pay.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate, product

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.kernels.launch import compile_ahead

ALIGNED = 64  # parameters start at multiples of this in the flat vector, so that matrix products stay fast
OFTEN = 1000  # batches of one shape after which it is compiled
COMPILE_AFTER = {"auto": OFTEN, "static": 0}  # number of batches of a shape, by the setting compile=


class Flat:
    """The trained parameters of a model as one vector: `master` in float32, and `work`, with which the model computes.

    The model's parameters become views of `work`. If its dtype is float32, `work` and `master` share their memory.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, first: Sequence[str] = ()) -> None:
        """first: names of parameters that begin the vector, in this order."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.named = {name: trained[name] for name in dict.fromkeys([*first, *trained])}
        sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in self.named.values()]
        starts = [0, *accumulate(sizes)]
        self.places = {name: (start, p.shape) for start, (name, p) in zip(starts, self.named.items(), strict=False)}
        device = next(model.parameters()).device
        self.master = nn.Parameter(torch.zeros(starts[-1], device=device))
        for name, view in self.views(self.master.data).items():
            view.copy_(self.named[name].data)
        self.work = self.master.data if dtype == torch.float32 else self.master.data.to(dtype)
        for name, view in self.views(self.work).items():
            self.named[name].data = view
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.grad = self.master.grad = torch.zeros_like(self.master)
        self._added = torch.zeros_like(self.master)
        self._parts, self._added_parts = (list(self.views(flat).values()) for flat in (self.grad, self._added))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a view of a flat vector for each parameter, by name."""
        return {name: flat[start : start + shape.numel()].view(shape) for name, (start, shape) in self.places.items()}

    def end_of(self, name: str) -> int:
        """Return where the next parameter begins."""
        start, shape = self.places[name]
        return start + -(-shape.numel() // ALIGNED) * ALIGNED

    def stack(self, flat: Tensor, names: Sequence[str]) -> Tensor:
        """Return parameters of one shape that lie side by side in a flat vector as one view, (names,…)."""
        start, shape = self.places[names[0]]
        padded = flat[start : self.end_of(names[-1])].view(len(names), -1)
        return padded[:, : shape.numel()].unflatten(1, shape)

    def gather(self, *, first: bool) -> None:
        """Copy the model's gradients into the master's, or add them if not first, and clear them; absent ones are 0."""
        into, parts = (self.grad, self._parts) if first else (self._added, self._added_parts)
        pairs = [(part, p.grad) for part, p in zip(parts, self.named.values(), strict=True) if p.grad is not None]
        if len(pairs) < len(parts):
            into.zero_()
        torch._foreach_copy_([part for part, _ in pairs], [grad for _, grad in pairs])
        if not first:
            self.grad += self._added
        for parameter in self.named.values():
            parameter.grad = None

    def publish(self) -> None:
        """Copy the master into the model's working copy."""
        if self.work.data_ptr() != self.master.data_ptr():
            self.work.copy_(self.master.data)


class Stepper(ABC):
    """Accumulates gradients and applies them. Its measurements stay on the device until they are read."""

    def __init__(self, objective: nn.Module, flat: Flat, optimizer: torch.optim.Optimizer, *, clip: float) -> None:
        self.objective, self.flat, self.optimizer, self.clip = objective, flat, optimizer, clip
        self.device = flat.master.device
        self.loss = torch.zeros((), device=self.device)  # summed since it was last read
        self.norm = torch.zeros((), device=self.device)  # of the last update's gradient
        self.bad = torch.zeros((), dtype=torch.float32, device=self.device)  # 1 after a value that is not finite
        self.updates = torch.zeros((), dtype=torch.int64, device=self.device)  # number of applied updates
        self.first = True  # the next batch is the first of its update
        optimizer.found_inf, optimizer.grad_scale = self.bad, None  # type: ignore[attr-defined]

    @abstractmethod
    def accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: float) -> None:
        """Add the gradient of one batch, which may be on the CPU or on the device."""

    @abstractmethod
    def apply(self) -> None:
        """Update the parameters and start a new gradient."""

    def count_graphs(self) -> int:
        """Return the number of captured batch shapes; while it stays the same, so does the answer of has_full_speed."""
        return 0

    def has_full_speed(self, widths: Iterable[int], batches: int) -> bool:
        """Return whether updates need no more preparation, after the first one.

        widths    of the batches that occur        batches   number in an update
        """
        return True

    def read_loss(self) -> float:
        """Return the loss summed since the last call; this waits for the device."""
        value = float(self.loss)
        self.loss.zero_()
        return value

    def _accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: float | Tensor) -> None:
        loss = self.objective(inputs, targets)
        (loss * scale).backward()
        self.loss += loss.detach()
        self.flat.gather(first=self.first)

    def _apply(self) -> None:
        gradient = self.flat.grad
        self.norm.copy_(gradient.norm())
        bad = (~(self.norm + self.loss).isfinite()).to(self.bad.dtype)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)  # each process has its own loss
        self.bad.copy_(torch.maximum(self.bad, bad))
        self.updates += self.bad == 0
        if self.clip > 0:
            gradient *= (self.clip / (self.norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step()
        self.flat.publish()


class Eager(Stepper):
    """Runs each operation from Python: on a CPU, in several processes, or if shapes vary freely."""

    def accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: float) -> None:
        self._accumulate([x.to(self.device) for x in inputs], targets.to(self.device), scale)
        self.first = False

    def apply(self) -> None:
        self._apply()
        self.first = True


class Captured(Stepper):
    """Replays one CUDA graph per batch shape and one for the update, each captured at its first use.

    After compile_after batches of one shape, its graph is captured again, with the blocks compiled; None: never.
    """

    def __init__(
        self, objective: nn.Module, flat: Flat, optimizer: torch.optim.Optimizer, *, clip: float,
        compile_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(objective, flat, optimizer, clip=clip)
        self.compile_after, self.uses = compile_after, Counter[tuple]()
        self.stream = torch.cuda.Stream(self.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self.scale = torch.ones((), device=self.device)
        self.update: torch.cuda.CUDAGraph | None = None

    def accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: float) -> None:
        tensors = [*inputs, targets]
        key = (self.first, *(tuple(x.shape) for x in tensors))
        compiled = self.uses[key] == self.compile_after
        if compiled or key not in self.graphs:
            self.graphs.pop(key, None)
            buffers = [x.to(self.device) for x in tensors]
            with self.objective.use_compiled() if compiled else nullcontext():  # type: ignore[operator]
                passes = self._capture(lambda: self._accumulate(buffers[:-1], buffers[-1], self.scale))
            self.graphs[key] = passes, buffers
        self.uses[key] += 1
        graph, buffers = self.graphs[key]
        self._set_scale(scale)
        for buffer, x in zip(buffers, tensors, strict=True):
            buffer.copy_(x, non_blocking=True)
        graph.replay()
        self.first = False

    def apply(self) -> None:
        if self.update is None:
            self.update = self._capture(self._apply)
        self.update.replay()
        self.first = True

    def _set_scale(self, scale: float) -> None:
        self.scale.fill_(scale)

    def count_graphs(self) -> int:
        return len(self.graphs)

    def has_full_speed(self, widths: Iterable[int], batches: int) -> bool:
        captured = {(first, max(shape[1] for shape in shapes if len(shape) == 2)) for first, *shapes in self.graphs}
        return captured.issuperset(product((True, False)[:batches], widths))

    def _list_changed(self) -> list[Tensor]:
        """Return what a pass or an update changes, besides weights and the optimiser's state."""
        return [self.loss, self.norm, self.bad, self.updates, self.flat.grad]

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a graph of the work. Rehearsals have the flag set, so no weight changes; other state is restored.

        Before them the work runs once without our kernels, to compile these all at a time.
        """
        state = torch.cuda.get_rng_state(self.device)
        changed = self._list_changed()
        before = [x.clone() for x in changed]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.bad.fill_(1.0)
            with compile_ahead(self.device):
                work()
            work()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.empty_cache()  # frees the rehearsals' memory: the graph has its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            work()
        for x, old in zip(changed, before, strict=True):
            x.copy_(old)
        torch.cuda.set_rng_state(state, self.device)
        return graph


def choose_widths(
    lengths: np.ndarray, rungs: int = 8, multiple: int = 8, *, together: int = 1, batches: int = 1
) -> np.ndarray:
    """Choose at most `rungs` widths with the least padding, so that every length fits: (rungs,), rising.

    multiple   each width is a multiple of this, or the largest length
    together   number of examples of any length in a batch; 1 if a batch holds examples of similar length
    batches    number of independent batches that are padded to the same width

    The exact optimum over the lengths that occur: cost(a, b) = width(b) · P(a < longest of all ≤ b).
    """
    rounded = np.minimum(-(-np.maximum(lengths, 1) // multiple) * multiple, max(lengths.max(), 1))
    widths, counts = np.unique(rounded, return_counts=True)
    upto = _probability_within(np.concatenate([[0], np.cumsum(counts)]), min(together, len(lengths))) ** batches
    best = np.full((rungs + 1, len(widths) + 1), np.inf)
    came = np.zeros_like(best, dtype=int)
    best[:, 0] = 0.0
    for rung in range(1, rungs + 1):
        for end in range(1, len(widths) + 1):
            costs = best[rung - 1, :end] + widths[end - 1] * (upto[end] - upto[:end])
            came[rung, end] = int(costs.argmin())
            best[rung, end] = costs[came[rung, end]]
    chosen, end = [], len(widths)
    for rung in range(rungs, 0, -1):
        if end == 0:
            break
        chosen.append(widths[end - 1])
        end = came[rung, end]
    return np.array(chosen[::-1])


def _probability_within(among: np.ndarray, draws: int) -> np.ndarray:
    """Return the probability that all draws without replacement are in the first `among`: C(among, n) / C(all, n)."""
    left = among[:, None] - np.arange(draws)  # one fewer after each draw
    return np.prod(np.maximum(left, 0) / left[-1], axis=1)


def pad_tensors(tensors: Iterable[Tensor], rows: int, width: int, padding: int = 0) -> list[Tensor]:
    """Pad tensors (b,n) to `rows` and `width`, and tensors (b,), the classes, to `rows`."""
    return [
        F.pad(x, (0, width - x.shape[1], 0, rows - len(x)), value=padding) if x.dim() == 2
        else F.pad(x, (0, rows - len(x)), value=-100)
        for x in tensors
    ]  # fmt: skip
