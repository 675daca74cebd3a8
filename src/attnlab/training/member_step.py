"""Updates of many models at once, which `models/members.py` has stacked into one.

The parameters of all members are one matrix (s,parameters) in float32, with one optimiser for each row. So members may
differ in every number of their training. A member whose loss or gradient is not finite keeps its last good weights,
while the others go on.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.models.affine import has_kernels
from attnlab.models.attention import MultiHead
from attnlab.models.member_maps import Layer, Maps, can_write, link_biases, list_layers
from attnlab.training.optimisers import build_optimiser, read_state, set_learning_rate, write_state
from attnlab.training.step import ALIGNED, Captured, Eager, Stepper

if TYPE_CHECKING:
    from attnlab.training.loop import TrainConfig


class MemberFlat:
    """The trained parameters of all members as one matrix: `master` in float32, and `work`, with which they compute.

    fresh   gradients of the last batch, in the type of `work`; most layers write theirs there (models/member_maps.py)
    grad    sum of the gradients of the update's batches before it, in float32

    Weights of linear maps of one input lie side by side, so the order is not that of `step.Flat`.
    """

    def __init__(self, model: nn.Module, members: int, dtype: torch.dtype) -> None:
        self.members, self.named = members, _list_trained(model, members)
        layers = [each for each in list_layers(model) if can_write(each[1])]
        self._names = {id(each): name for name, each in self.named.items()}
        self.places = self._lay_out([kind for _, own in layers for kind in _list_kinds(own)])
        self.master = torch.zeros(members, self._size, device=next(model.parameters()).device)
        for own, view in self._pairs(self.master):
            view.copy_(own.detach())
        self.work = self.master if dtype == torch.float32 else self.master.to(dtype)
        for own, view in self._pairs(self.work):
            own.data = view
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.fresh, self.grad = torch.zeros_like(self.work), torch.zeros_like(self.master)
        self._parts, self._maps = self._pairs(self.fresh), dict[tuple[int, ...], Maps]()
        for attention, group in layers:
            self._attach(attention, group)
        link_biases(model)

    def views(self, flat: Tensor, member: int) -> dict[str, Tensor]:
        """Return a view of one row of a flat matrix for each parameter, by its name in an ordinary model."""
        return {name: flat[member, at : at + shape.numel()].view(shape) for name, (at, shape) in self.places.items()}

    def gather(self) -> None:
        """Complete `fresh` after a backward pass by the gradients that autograd stored, and clear these."""
        maps = list(self._maps.values())
        written = {id(p) for own in maps if own.is_written for p in own.weights}
        written |= {id(p) for own in maps if own.is_summed for p in own.biases}
        copied, added, absent = list[Any](), list[Any](), list[Tensor]()
        for p, view in self._parts:
            if p.grad is not None:
                (added if id(p) in written else copied).append((view, p.grad))
            elif id(p) not in written:
                absent.append(view)
            p.grad = None
        if copied:
            torch._foreach_copy_([view for view, _ in copied], [grad for _, grad in copied])
        if added:
            torch._foreach_add_([view for view, _ in added], [grad for _, grad in added])
        for view in absent:
            view.zero_()
        for own in maps:
            own.is_written = own.is_summed = False

    def publish(self) -> None:
        """Copy the master into the working copy."""
        if self.work is not self.master:
            self.work.copy_(self.master)

    def to_ordinary(self, flat: Tensor) -> Tensor:
        """Return flat numbers (…,parameters) on the CPU in the order of `step.Flat`, as checkpoints have them."""
        given, parts = flat.detach().cpu(), []
        for at, shape in self.places.values():
            size = shape.numel()
            parts.append(F.pad(given[..., at : at + size], (0, _round(size) - size)))
        return torch.cat(parts, dim=-1)

    def from_ordinary(self, flat: Tensor) -> Tensor:
        """Return flat numbers of the order of `step.Flat` in the order of this matrix."""
        out, start = flat.new_zeros(*flat.shape[:-1], self._size), 0
        for at, shape in self.places.values():
            out[..., at : at + shape.numel()] = flat[..., start : start + shape.numel()]
            start += _round(shape.numel())
        return out

    def _lay_out(self, groups: Sequence[Sequence[nn.Parameter]]) -> dict[str, tuple[int, torch.Size]]:
        """Return where each parameter starts, and its shape; groups: those to lie side by side."""
        together: dict[str, list[str]] = {}
        for group in groups:
            names = [self._names[id(p)] for p in group]
            together |= {name: names for name in names if not together.keys() & set(names)}
        starts, at = dict[str, int](), 0
        for name in self.named:
            if name not in starts:
                for each in together.get(name, [name]):
                    starts[each] = at
                    at += _shape(self.named[each]).numel()
                at = _round(at)
        self._size = at
        return {name: (starts[name], _shape(each)) for name, each in self.named.items()}

    def _attach(self, attention: MultiHead | None, layers: Sequence[Layer]) -> None:
        """Let layers write their gradients, if their parameters lie side by side."""
        weights, biases = [*_list_kinds(layers), []][:2]
        key = tuple(map(id, (*weights, *biases)))
        if key not in self._maps:
            work, fresh = ([self._span(flat, own) for own in (weights, biases)] for flat in (self.work, self.fresh))
            if work[0] is None or (biases and work[1] is None):
                return
            self._maps[key] = Maps(layers, work, fresh)
        if attention is None:
            layers[0].maps = self._maps[key]
        else:
            attention.joint = self._maps[key].project

    def _span(self, flat: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Return parameters that lie side by side as one view of a flat matrix, (s,Σ first sizes,…), else None."""
        places = [self.places[self._names[id(p)]] for p in parameters]
        if not places or any(at + shape.numel() != after for (at, shape), (after, _) in pairwise(places)):
            return None
        (start, first), (last, shape) = places[0], places[-1]
        return flat[:, start : last + shape.numel()].unflatten(1, (-1, *first[1:]))

    def _pairs(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return every parameter of the stacked model with its view of a flat matrix."""
        pairs = []
        for name, each in self.named.items():
            start, shape = self.places[name]
            part = flat[:, start : start + shape.numel()]
            if isinstance(each, list):
                pairs += [(own, row.view(shape)) for own, row in zip(each, part, strict=True)]
            else:
                pairs.append((each, part.unflatten(1, shape) if shape else part.squeeze(1)))
        return pairs


class RowOptimisers:
    """One optimiser of torch for each row of a matrix of parameters."""

    def __init__(self, flat: MemberFlat, configs: Sequence["TrainConfig"]) -> None:
        self.flat, self.rows = flat, list[Any]()
        for row, grad, config in zip(flat.master, flat.grad, configs, strict=True):
            master = nn.Parameter(row)
            master.grad = grad
            self.rows.append(build_optimiser(SimpleNamespace(master=master), config))  # type: ignore[arg-type]

    def share_flags(self, bad: Tensor) -> None:
        """Let each optimiser change nothing while its entry of `bad` is set."""
        for optimiser, flag in zip(self.rows, bad, strict=True):
            optimiser.found_inf, optimiser.grad_scale = flag, None

    def set_rates(self, rates: Sequence[float]) -> None:
        for optimiser, rate in zip(self.rows, rates, strict=True):
            set_learning_rate(optimiser, rate)

    def step(self, gradient: Tensor, factors: Tensor) -> None:
        """Update all rows by their gradients times these factors, (s,), and the working copy; clear `flat.grad`."""
        torch.mul(gradient, factors[:, None], out=self.flat.grad)
        for optimiser in self.rows:
            optimiser.step()
        self.flat.publish()
        self.flat.grad.zero_()

    def read_state(self, number: int) -> dict[str, Tensor]:
        """Return the state of a row, as of the optimiser of a single run."""
        state = read_state(self.rows[number])
        return {name: self.flat.to_ordinary(x) if x.dim() else x for name, x in state.items()}

    def write_state(self, number: int, tensors: dict[str, Tensor]) -> None:
        given = {name: self.flat.from_ordinary(x) if x.dim() else x for name, x in tensors.items()}
        write_state(self.rows[number], given)


class RowAdam:
    """Adam or AdamW of all rows by one kernel, with the interface of RowOptimisers."""

    def __init__(self, flat: MemberFlat, configs: Sequence["TrainConfig"]) -> None:
        self.flat, self.decoupled = flat, configs[0].optimiser == "adamw"
        self.moments = torch.zeros_like(flat.master), torch.zeros_like(flat.master)
        shares = [[1.0 - beta for beta in config.betas] for config in configs]  # in float64, for their digits
        given = [(0.0, *own, config.eps, config.weight_decay) for own, config in zip(shares, configs, strict=True)]
        self.numbers = torch.tensor(given, device=flat.master.device)  # (s,5), of adam_kernel.NUMBERS
        betas = [config.betas for config in configs]
        self.betas = torch.tensor(betas, dtype=torch.float64, device=flat.master.device)  # (s,2)
        self.steps = torch.zeros(len(configs), device=flat.master.device)
        self.flags = torch.zeros(len(configs), device=flat.master.device)

    def share_flags(self, bad: Tensor) -> None:
        self.flags = bad

    def set_rates(self, rates: Sequence[float]) -> None:
        self.numbers[:, 0].copy_(torch.tensor(rates).pin_memory(), non_blocking=True)

    def step(self, gradient: Tensor, factors: Tensor) -> None:
        from attnlab.training.adam_kernel import update_rows

        self.steps += self.flags == 0
        corrections = 1.0 - self.betas ** self.steps[:, None]  # in float64
        corrections[:, 1].sqrt_()
        flat, given = self.flat, (*self.moments, self.numbers, factors, corrections.float(), self.flags)
        update_rows(flat.master, flat.work, gradient, *given, decoupled=self.decoupled)
        if gradient is flat.grad:
            flat.grad.zero_()

    def read_state(self, number: int) -> dict[str, Tensor]:
        first, second = (self.flat.to_ordinary(moment[number]) for moment in self.moments)
        return {"step": self.steps[number], "exp_avg": first, "exp_avg_sq": second}

    def write_state(self, number: int, tensors: dict[str, Tensor]) -> None:
        self.steps[number].copy_(tensors["step"])
        for moment, name in zip(self.moments, ("exp_avg", "exp_avg_sq"), strict=True):
            moment[number].copy_(self.flat.from_ordinary(tensors[name]))


def build_row_optimisers(flat: MemberFlat, configs: Sequence["TrainConfig"]) -> RowOptimisers | RowAdam:
    """Return what updates the rows: one kernel for Adam and AdamW on a GPU, else an optimiser of torch for each."""
    by_kernel = has_kernels(flat.master) and configs[0].optimiser in ("adam", "adamw")
    return RowAdam(flat, configs) if by_kernel else RowOptimisers(flat, configs)


class _Members(Stepper):
    """What differs in the steps of many members: every measurement has one entry for each."""

    flat: Any  # a MemberFlat
    optimizer: Any

    def __init__(
        self,
        objective: nn.Module,
        flat: MemberFlat,
        optimizer: RowOptimisers | RowAdam,
        *,
        clips: Sequence[float],
        **options: Any,
    ) -> None:
        super().__init__(objective, flat, optimizer, clip=0.0, **options)  # type: ignore[arg-type]
        self.loss, self.norm = (torch.zeros(flat.members, device=self.device) for _ in range(2))
        self.bad = torch.zeros(flat.members, dtype=torch.float32, device=self.device)
        self.updates = torch.zeros(flat.members, dtype=torch.int64, device=self.device)
        self.clips = torch.tensor([clip or torch.inf for clip in clips], device=self.device)
        self.scale = torch.ones(flat.members, device=self.device)
        self.is_single = True  # the update has one batch so far
        optimizer.share_flags(self.bad)

    def read_losses(self) -> list[float]:
        """Return the losses summed since the last call; this waits for the device."""
        values: list[float] = self.loss.tolist()
        self.loss.zero_()
        return values

    def _accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: Any) -> None:
        if not self.first:
            self.flat.grad += self.flat.fresh
        losses = self.objective(inputs, targets)
        torch.where(self.bad > 0, 0.0, losses * scale).sum().backward()  # a failed member does not spoil the others
        self.loss += losses.detach()
        self.flat.gather()

    def _apply(self) -> None:
        gradient = self.flat.fresh if self.is_single else self.flat.grad.add_(self.flat.fresh)
        self.norm.copy_(torch.linalg.vector_norm(gradient, dim=1, dtype=self.norm.dtype))
        self.bad.copy_(torch.maximum(self.bad, (~(self.norm + self.loss).isfinite()).to(self.bad.dtype)))
        self.updates += self.bad == 0
        factors = (self.clips / (self.norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        self.optimizer.step(gradient, factors)


class EagerMembers(_Members, Eager):
    """Runs each operation from Python."""

    def accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: Any) -> None:
        self.is_single = self.first
        super().accumulate(inputs, targets, scale.to(self.device))


class CapturedMembers(_Members, Captured):
    """Replays CUDA graphs, as `step.Captured` does; an update of several batches has a graph of its own."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.applied: dict[bool, torch.cuda.CUDAGraph] = {}

    def accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: Any) -> None:
        self.is_single = self.first
        super().accumulate(inputs, targets, scale)

    def apply(self) -> None:
        self.update = self.applied.get(self.is_single)
        super().apply()
        assert self.update is not None
        self.applied[self.is_single] = self.update

    def _list_changed(self) -> list[Tensor]:
        return [*super()._list_changed(), self.flat.fresh]

    def _set_scale(self, scale: Any) -> None:
        self.scale.copy_(scale.pin_memory(), non_blocking=True)  # a copy from other memory waits for the device


def _list_trained(model: nn.Module, members: int) -> dict[str, nn.Parameter | list[nn.Parameter]]:
    """Return the trained parameters by their names in an ordinary model: one (s,…), or one for each member."""
    named: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        before, _, after = name.partition(".mechanism.parts.")
        if not parameter.requires_grad:
            continue
        if after:
            named.setdefault(f"{before}.mechanism.{after.split('.', 1)[1]}", []).append(parameter)
        else:
            named[name.replace(".mechanism.whole.", ".mechanism.")] = parameter
    return named


def _shape(each: nn.Parameter | list[nn.Parameter]) -> torch.Size:
    """The shape of a parameter in an ordinary model."""
    return each[0].shape if isinstance(each, list) else each.shape[1:]


def _list_kinds(layers: Sequence[Layer]) -> list[list[Any]]:
    """Return the weights of the layers, and their biases where they have them."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return [weights] if biases[0] is None else [weights, biases]


def _round(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
