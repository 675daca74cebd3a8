"""Muon (Jordan et al. 2024) for the matrices inside the blocks, and AdamW for all other parameters.

Weight decay shrinks matrices only, also those of AdamW: no norm gains, biases, sinks or other vectors.

    m ← μ m + (1 − μ) g                              momentum; g is the gradient of one matrix (r,c)
    W ← (1 − η λ) W − η √max(1, r/c) NS((1 − μ) g + μ m)        η: muon_lr on the schedule of lr, λ: weight_decay

NS maps the singular values of a matrix U S Vᵀ towards 1 by matrix products alone:

    S ← S / ‖S‖,   then five times   S ← 3.4445 S − 4.775 S³ + 2.0315 S⁵

torch.optim.Muon computes the same, but it reads its learning rate on the host and has no flag for values that are not
finite, so a captured step cannot use it.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Mechanism
from attnlab.training.plain_optimisers import AdamW
from attnlab.training.step import Flat

if TYPE_CHECKING:
    from attnlab.training.loop import TrainConfig

QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPSILON = 1e-7  # smallest norm that a gradient is divided by


def list_matrices(model: nn.Module) -> list[str]:
    """Return the names of the parameters that Muon trains, those of one shape side by side.

    They are the trained weights of linear layers inside the blocks, without those inside a mechanism.
    """
    blocks = model.all_blocks() if hasattr(model, "all_blocks") else []  # type: ignore[operator]
    parts = [part for block in blocks for part in block.modules()]
    inside = {part for module in parts if isinstance(module, Mechanism) for part in module.modules()}
    weights = {id(part.weight) for part in parts if isinstance(part, nn.Linear) and part not in inside}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if id(p) in weights and p.requires_grad}
    if not shapes:
        problem = "optimiser=muon trains the matrices of attnlab's own Transformer blocks, and this model has none"
        raise ValueError(f"{problem}: use optimiser=adamw")
    return sorted(shapes, key=lambda name: shapes[name])


def is_matrix(x: Tensor) -> bool:
    """Whether a parameter extends in at least two dimensions: (h,1,1) is a vector."""
    return sum(size > 1 for size in x.shape) >= 2


class Muon(AdamW):
    """Muon on the first parameters of a flat vector, which `list_matrices` names, and AdamW on the rest."""

    def __init__(self, flat: Flat, matrices: Sequence[str], config: "TrainConfig") -> None:
        start = flat.end_of(matrices[-1])
        self.rest = nn.Parameter(flat.master.data[start:])
        self.rest.grad = flat.grad[start:]
        device = self.rest.device
        how = {"betas": config.betas, "eps": config.eps, "weight_decay": 0.0}
        super().__init__(
            [self.rest], lr=torch.zeros((), device=device), fused=True, capturable=self.rest.is_cuda, **how  # type: ignore[arg-type]
        )  # fmt: skip
        self.muon_lr, self.momentum, self.decay = (
            torch.zeros((), device=device), config.muon_momentum, config.weight_decay,
        )  # fmt: skip
        views = flat.views(flat.master.data).items()
        self.decayed = [view for name, view in views if name not in matrices and is_matrix(view)]
        buffer = torch.zeros(start, device=device)
        adam = {"exp_avg": torch.zeros_like(self.rest), "exp_avg_sq": torch.zeros_like(self.rest)}
        self.state[self.rest] = {"step": torch.zeros((), device=device), **adam, "momentum_buffer": buffer}
        vectors = (flat.master.data, flat.grad, buffer)
        runs = [list(names) for _, names in groupby(matrices, key=lambda name: flat.places[name][1])]
        self.stacks = [tuple(flat.stack(vector, names) for vector in vectors) for names in runs]  # (n,r,c) each

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, unless the flag `found_inf` is set."""
        bad = getattr(self, "found_inf", None)
        good = torch.ones((), dtype=torch.bool, device=self.muon_lr.device) if bad is None else bad == 0
        for weight, gradient, momentum in self.stacks:
            rows, columns = weight.shape[1:]
            moved = momentum.lerp(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(moved, self.momentum)) * max(1.0, rows / columns) ** 0.5
            changed = weight * (1 - self.muon_lr * self.decay) - self.muon_lr * update
            momentum.copy_(torch.where(good, moved, momentum))
            weight.copy_(torch.where(good, changed, weight))
        kept = 1 - good * self.param_groups[0]["lr"] * self.decay
        for weight in self.decayed:
            weight.mul_(kept)
        super().step()


def orthogonalise(matrices: Tensor) -> Tensor:
    """Map the singular values of each matrix (…,r,c) towards 1: the map NS above; in bfloat16 on a GPU."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    if is_tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(EPSILON)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)
