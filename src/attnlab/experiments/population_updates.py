"""Updates of a population by Adam, clipped per seed.

    θ_k ← Adam(θ_k, ∇ mean_targets −log p(target; θ_k, batch_k))        k = 1 … s, side by side

A seed whose loss or gradient is not finite keeps its last good weights and is marked. On a GPU a whole step, update
included, is one CUDA graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from attnlab.experiments.population import Masks, Population, Stacked, count_targets
from attnlab.training.plain_optimisers import Adam


class Updates:
    """Steps of Adam on a population; on a GPU one CUDA graph per batch shape."""

    def __init__(self, population: Population, *, seeds: Sequence[int], lr: float, clip: float) -> None:
        self.population, self.clip = population, clip
        self.masks = Masks(population, seeds)
        self.trained = [x for x in population.weights.values() if x.requires_grad]
        self.device = self.trained[0].device
        self.finite = torch.ones(len(population), dtype=torch.bool, device=self.device)
        self.captured = self.device.type == "cuda"
        self.adam = Adam(self.trained, lr=lr, fused=self.captured, capturable=self.captured)
        for x in self.trained:  # created now, so that a checkpoint can fill it and a graph can hold it
            step = torch.zeros((), device=self.device if self.captured else "cpu")
            self.adam.state[x] = {"step": step, "exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}
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
        for number, x in enumerate(self.trained):
            kept |= {f"adam.{number}.{name}": value for name, value in self.adam.state[x].items()}
        return kept | {"finite": self.finite}

    def _update(self, *batches: Stacked) -> None:
        count = torch.stack([count_targets(targets) for *_, targets in batches]).sum(0).clamp(min=1)
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
            self.adam.state[x]["exp_avg"].mul_(kept)  # a failed seed keeps its weights
        self.adam.step()

    def _pass(self, batch: Stacked, count: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return a batch's part of the losses and of their gradients."""
        losses = self.population.losses(batch[:-1], batch[-1], self.masks.draw(batch), count)
        return losses.detach(), torch.autograd.grad(losses.sum(), self.trained)

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
