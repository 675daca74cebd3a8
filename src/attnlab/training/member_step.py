"""Updates of many models at once, which `models/members.py` has stacked into one.

The parameters of all members are one matrix (s,parameters) in float32, with one optimiser for each row. So members may
differ in every number of their training. A member whose loss or gradient is not finite keeps its last good weights,
while the others go on.
"""

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnlab.models.affine import has_kernels
from attnlab.training.optimisers import build_optimiser, read_state, set_learning_rate, write_state
from attnlab.training.step import ALIGNED, Captured, Eager, Stepper

if TYPE_CHECKING:
    from attnlab.training.loop import TrainConfig


class MemberFlat:
    """The trained parameters of all members as one matrix: `master` in float32, and `work`, with which they compute."""

    def __init__(self, model: nn.Module, members: int, dtype: torch.dtype) -> None:
        self.members, self.named = members, _list_trained(model, members)
        sizes = [-(-_shape(each).numel() // ALIGNED) * ALIGNED for each in self.named.values()]
        starts = [0, *accumulate(sizes)]
        self.places = {name: (at, _shape(each)) for at, (name, each) in zip(starts, self.named.items(), strict=False)}
        self.master = torch.zeros(members, starts[-1], device=next(model.parameters()).device)
        for own, view in self._pairs(self.master):
            view.copy_(own.detach())
        self.work = self.master if dtype == torch.float32 else self.master.to(dtype)
        for own, view in self._pairs(self.work):
            own.data = view
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.grad, self._added = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self._parts, self._added_parts = self._pairs(self.grad), self._pairs(self._added)

    def views(self, flat: Tensor, member: int) -> dict[str, Tensor]:
        """Return a view of one row of a flat matrix for each parameter, by its name in an ordinary model."""
        return {name: flat[member, at : at + shape.numel()].view(shape) for name, (at, shape) in self.places.items()}

    def gather(self, *, first: bool) -> None:
        """Copy the gradients into the master's, or add them if not first, and clear them; absent ones are 0."""
        into, parts = (self.grad, self._parts) if first else (self._added, self._added_parts)
        pairs = [(view, own.grad) for own, view in parts if own.grad is not None]
        if len(pairs) < len(parts):
            into.zero_()
        torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        if not first:
            self.grad += self._added
        for own, _ in parts:
            own.grad = None

    def publish(self) -> None:
        """Copy the master into the working copy."""
        if self.work is not self.master:
            self.work.copy_(self.master)

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

    def step(self, factors: Tensor) -> None:
        """Update all rows by their gradients times these factors, (s,), and the working copy."""
        self.flat.grad *= factors[:, None]
        for optimiser in self.rows:
            optimiser.step()
        self.flat.publish()

    def read_state(self, number: int) -> dict[str, Tensor]:
        """Return the state of a row, as of the optimiser of a single run."""
        return read_state(self.rows[number])

    def write_state(self, number: int, tensors: dict[str, Tensor]) -> None:
        write_state(self.rows[number], tensors)


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

    def step(self, factors: Tensor) -> None:
        from attnlab.training.adam_kernel import update_rows

        self.steps += self.flags == 0
        corrections = 1.0 - self.betas ** self.steps[:, None]  # in float64
        corrections[:, 1].sqrt_()
        flat, given = self.flat, (*self.moments, self.numbers, factors, corrections.float(), self.flags)
        update_rows(flat.master, flat.work, flat.grad, *given, decoupled=self.decoupled)

    def read_state(self, number: int) -> dict[str, Tensor]:
        first, second = (moment[number] for moment in self.moments)
        return {"step": self.steps[number], "exp_avg": first, "exp_avg_sq": second}

    def write_state(self, number: int, tensors: dict[str, Tensor]) -> None:
        for name, own in self.read_state(number).items():
            own.copy_(tensors[name])


def build_row_optimisers(flat: MemberFlat, configs: Sequence["TrainConfig"]) -> RowOptimisers | RowAdam:
    """Return what updates the rows: one kernel for Adam and AdamW on a GPU, else an optimiser of torch for each."""
    by_kernel = has_kernels(flat.master) and configs[0].optimiser in ("adam", "adamw")
    return RowAdam(flat, configs) if by_kernel else RowOptimisers(flat, configs)


class _Members(Stepper):
    """What differs in the steps of many members: every measurement has one entry for each."""

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
        optimizer.share_flags(self.bad)

    def read_losses(self) -> list[float]:
        """Return the losses summed since the last call; this waits for the device."""
        values: list[float] = self.loss.tolist()
        self.loss.zero_()
        return values

    def _accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: Any) -> None:
        losses = self.objective(inputs, targets)
        torch.where(self.bad > 0, 0.0, losses * scale).sum().backward()  # a failed member does not spoil the others
        self.loss += losses.detach()
        self.flat.gather(first=self.first)

    def _apply(self) -> None:
        gradient = self.flat.grad
        self.norm.copy_(gradient.norm(dim=1))
        self.bad.copy_(torch.maximum(self.bad, (~(self.norm + self.loss).isfinite()).to(self.bad.dtype)))
        self.updates += self.bad == 0
        factors = (self.clips / (self.norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        self.optimizer.step(factors)  # type: ignore[call-overload]


class EagerMembers(_Members, Eager):
    """Runs each operation from Python."""

    def accumulate(self, inputs: Sequence[Tensor], targets: Tensor, scale: Any) -> None:
        super().accumulate(inputs, targets, scale.to(self.device))


class CapturedMembers(_Members, Captured):
    """Replays CUDA graphs, as `step.Captured` does."""

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
