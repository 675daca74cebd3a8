"""Updates of a population by Adam, clipped per seed.

    θ_k ← Adam(θ_k, ∇ mean_targets −log p(target; θ_k, batch_k))        k = 1 … s, side by side

A seed whose loss or gradient is not finite keeps its last good weights and is marked. On a GPU a whole step, update
included, is one CUDA graph.
"""

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from attnlab.experiments.population import Masks, Population, Stacked, count_targets
from attnlab.models.affine import has_kernels
from attnlab.training.member_step import RowAdam
from attnlab.training.plain_optimisers import Adam
from attnlab.training.step import ALIGNED


class Rows:
    """The trained weights of all seeds as one matrix (s,size); the population's weights become views of it."""

    def __init__(self, population: Population) -> None:
        trained = {name: x.detach() for name, x in population.weights.items() if x.requires_grad}
        self.numbers = {name: number for number, name in enumerate(trained)}
        self.names = sorted(trained, key=lambda name: trained[name][0].numel() % ALIGNED > 0)  # so most are aligned
        self.shapes = [trained[name].shape[1:] for name in self.names]
        *self.starts, end = accumulate((shape.numel() for shape in self.shapes), initial=0)
        self.padding = trained[self.names[0]].new_zeros(len(population), -end % ALIGNED)
        self.master = self.join([trained[name] for name in self.names])
        for name, view in self.views(self.master).items():
            population.weights[name] = view.requires_grad_()

    def views(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the part of a matrix (s,size) that belongs to each weight, (s,…), by name."""
        parts = zip(self.names, self.starts, self.shapes, strict=True)
        return {name: matrix[:, at : at + shape.numel()].view(-1, *shape) for name, at, shape in parts}

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one tensor (s,…) for each name as a matrix (s,size)."""
        return torch.cat([*(x.flatten(1) if x.dim() > 1 else x.unsqueeze(1) for x in tensors), self.padding], 1)


class Updates:
    """Steps of Adam on a population; on a GPU one CUDA graph per batch shape."""

    def __init__(self, population: Population, *, seeds: Sequence[int], lr: float, clip: float) -> None:
        self.population, self.clip = population, clip
        self.masks, self.rows = Masks(population, seeds), Rows(population)
        self.trained = [population.weights[name] for name in self.rows.names]
        master = self.rows.master
        self.device = master.device
        self.finite = torch.ones(len(population), dtype=torch.bool, device=self.device)
        self.adam = _FusedAdam(master, lr) if has_kernels(master) else _AdamOfRows(master, lr)
        self.captured = self.device.type == "cuda" and isinstance(self.adam, _FusedAdam)
        self.graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, list[Stacked]]] = {}
        stream: Any = torch.cuda.Stream
        if self.captured:  # all graphs share one memory pool of one stream: one at a time is replayed
            self.pool, self.stream = torch.cuda.graph_pool_handle(), stream(self.device)

    def __call__(self, *batches: Stacked) -> None:
        """Make one update, by the mean over the targets of all batches."""
        if any(isinstance(batch, Tensor) for batch in batches):
            raise TypeError(
                "an update takes batches, each a tuple of inputs and targets; feed returns a tuple of batches"
            )
        if not self.captured:
            return self._update(*batches)
        key = tuple(tuple((x.shape, x.dtype) for x in batch) for batch in batches)
        if key not in self.graphs:
            self._make_room(_size_largest(batches))
            buffers = [tuple(x.to(self.device, copy=True) for x in batch) for batch in batches]
            self.graphs[key] = self._capture(buffers), buffers
        graph, buffers = self.graphs[key]
        for into, batch in zip(buffers, batches, strict=True):
            for buffer, x in zip(into, batch, strict=True):
                buffer.copy_(x, non_blocking=True)
        graph.replay()
        return None

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds, by name; the tensors themselves."""
        kept = {f"weights.{name}": x.detach() for name, x in self.population.weights.items()}
        for key, moment in zip(("exp_avg", "exp_avg_sq"), self.adam.moments, strict=True):
            views = self.rows.views(moment)
            kept |= {f"adam.{number}.{key}": views[name] for name, number in self.rows.numbers.items()}
        return kept | {"adam.0.step": self.adam.steps, "finite": self.finite}

    def _update(self, *batches: Stacked) -> None:
        count = torch.stack([count_targets(targets) for *_, targets in batches]).sum(0).clamp(min=1)
        losses, gradient = self._pass(batches[0], count)
        for batch in batches[1:]:
            more, by_more = self._pass(batch, count)
            losses, gradient = losses + more, gradient.add_(by_more)
        norms = vector_norm(gradient, dim=1)  # (s,)
        self.finite &= (norms + losses).isfinite()
        factors = (self.clip / (norms + 1e-6)).clamp(max=1.0) if self.clip > 0 else torch.ones_like(norms)
        self.adam.update(gradient, factors, self.finite)

    def _pass(self, batch: Stacked, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch's part of the losses (s,) and of their gradients (s,size)."""
        losses = self.population.losses(batch[:-1], batch[-1], self.masks.draw(batch), count)
        return losses.detach(), self.rows.join(torch.autograd.grad(losses.sum(), self.trained))

    def _make_room(self, numbers: int) -> None:
        """Release all graphs before the largest batch so far: its memory suffices for smaller ones, not vice versa."""
        if self.graphs and all(numbers > _size_largest(buffers) for _, buffers in self.graphs.values()):
            torch.cuda.synchronize(self.device)
            self.graphs.clear()
            self.pool = torch.cuda.graph_pool_handle()

    def _capture(self, buffers: Sequence[Stacked]) -> torch.cuda.CUDAGraph:
        for batch in buffers:
            self.masks.find_shapes(batch)  # a separate pass, outside the graph
        before = {name: x.clone() for name, x in self.state().items()}
        states = [generator.get_state() for generator in self.masks.generators]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self._update(*buffers)
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.empty_cache()  # the memory of the rehearsals
        graph = torch.cuda.CUDAGraph()
        for generator in self.masks.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self._update(*buffers)
        with torch.no_grad():
            for name, x in self.state().items():
                x.copy_(before[name])
        for generator, state in zip(self.masks.generators, states, strict=True):
            generator.set_state(state)
        return graph


def _size_largest(batches: Sequence[Stacked]) -> int:
    """Return how many numbers the largest batch has."""
    return max(sum(x.numel() for x in batch) for batch in batches)


class _FusedAdam(RowAdam):
    """Adam of all rows by one kernel."""

    def __init__(self, master: Tensor, lr: float) -> None:
        config: Any = SimpleNamespace(optimiser="adam", betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        flat: Any = SimpleNamespace(master=master, work=master, grad=None)
        super().__init__(flat, [config] * len(master))
        self.numbers[:, 0].fill_(lr)

    def update(self, gradient: Tensor, factors: Tensor, finite: Tensor) -> None:
        """Update the rows that are finite by their gradients times these factors."""
        self.flags.copy_(~finite)
        self.step(gradient, factors)


class _AdamOfRows:
    """torch's Adam, with a row as each parameter."""

    def __init__(self, master: Tensor, lr: float) -> None:
        self.parameters = [nn.Parameter(row) for row in master]
        self.moments, self.steps = (torch.zeros_like(master), torch.zeros_like(master)), torch.zeros(len(master))
        self.adam = Adam(self.parameters, lr=lr)
        for parameter, step, first, second in zip(self.parameters, self.steps, *self.moments, strict=True):
            self.adam.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def update(self, gradient: Tensor, factors: Tensor, finite: Tensor) -> None:
        """Update the rows that are finite by their gradients times these factors."""
        gradient.mul_(factors[:, None])
        for parameter, row, kept in zip(self.parameters, gradient, finite.tolist(), strict=True):
            parameter.grad = row if kept else None
        self.adam.step()
