"""A trial of the laws: a mechanism with random arguments, and ways to select or change some of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, Sides

Build = Callable[[int], Mechanism]  # the mechanism of a layer

BATCH, LENGTH, FAR = 2, 7, 1e3


@dataclass(frozen=True)
class LawTrial:
    """A mechanism with perturbed parameters, since initial values may be special, and arguments for it.

    x and y are the inputs of the layer that queries and keys read: in self-attention the same sequence, but here apart,
    so that a law can change one of them.
    """

    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    carry: Tensor | None
    x: Tensor
    y: Tensor
    build: Build

    def place(self, x: Tensor) -> Tensor:
        """Return a mask or an index on the device of the arguments."""
        return x.to(self.q.device)

    @property
    def sides(self) -> Sides:
        return self.mechanism.query_side(self.x), self.mechanism.key_side(self.y)

    @property
    def values(self) -> Tensor:
        """What is mixed: v, unless the mechanism carries values."""
        return self.mechanism.values(self.v, self.carry)[0] if self.mechanism.carry_of == "keys" else self.v

    @property
    def logits_carry(self) -> Tensor | None:
        return None if self.mechanism.carry_of == "keys" else self.carry

    def weights(self, mask: Tensor | None = None, **options: Any) -> Tensor:
        given = options | self.mechanism.give_sides(self.sides)
        return self.mechanism.weights(self.q, self.k, mask, self.logits_carry, **given)[0]

    def mix(self, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        given = options | self.mechanism.give_sides(self.sides)
        return self.mechanism.mix(self.q, self.k, self.values, mask, self.logits_carry, **given)

    def context(self, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self.mix(mask, **options)[0]

    def forward(self, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        return self.mechanism.forward(self.q, self.k, self.v, mask, self.carry, **options, sides=self.sides)

    def output(self, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self.forward(mask, **options)[0]

    def select_queries(self, rows: Any) -> "LawTrial":
        """Return the trial of some queries, (n,) or a slice, with all keys."""
        carry = self.carry
        if carry is not None and self.mechanism.carry_of == "pairs":
            carry = carry[:, :, rows]
        return replace(self, q=self.q[:, :, rows], x=self.x[:, rows], carry=carry)

    def select_keys(self, columns: Any) -> "LawTrial":
        """Return the trial of some keys, in this order, with all queries."""
        carry = self.carry
        if carry is not None:
            carry = carry[..., columns] if self.mechanism.carry_of == "pairs" else carry[:, :, columns]
        return replace(
            self, k=self.k[:, :, columns], v=self.v[:, :, columns], y=self.y[:, columns], carry=carry
        )  # fmt: skip

    def select_examples(self, rows: Any) -> "LawTrial":
        """Return the trial of some examples, (n,) or a slice."""
        parts: dict[str, Any] = {name: getattr(self, name)[rows] for name in {*self.arguments, "x", "y"}}
        return replace(self, **parts)

    def change_keys(self, hidden: Tensor) -> "LawTrial":
        """Return the trial with everything that belongs to these keys, (b|1,j) bool, replaced by large numbers."""
        column = hidden[:, None, :, None]
        moved: dict[str, Any] = {"k": self.k.masked_fill(column, FAR), "v": self.v.masked_fill(column, FAR)}
        moved["y"] = self.y.masked_fill(hidden[..., None], FAR)
        if self.carry is not None and self.mechanism.carry_of == "keys":
            moved["carry"] = self.carry.masked_fill(column, FAR)
        return replace(self, **moved)

    @property
    def arguments(self) -> list[str]:
        """Names of the tensors that the mechanism reads."""
        read = {"carry": self.carry, "x": self.sides[0], "y": self.sides[1]}
        return ["q", "k", "v", *(name for name, x in read.items() if x is not None)]


def make_trial(
    build: Build, *, batch: int = BATCH, queries: int = LENGTH, keys: int = LENGTH, groups: int | None = None,
    dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 1,
) -> LawTrial:  # fmt: skip
    """Draw random arguments. A mechanism that carries is built for layer 1 and gets the carry of a layer 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = shake_parameters(build(0))
        size = first.head_dim
        q0, q = torch.randn(2, batch, first.query_heads, queries, size, dtype=torch.float64)
        k0, k, v0, v = torch.randn(4, batch, groups or first.heads, keys, size, dtype=torch.float64)
        x = torch.randn(batch, queries, first.model_size, dtype=torch.float64)
        y = torch.randn(batch, keys, first.model_size, dtype=torch.float64)
        trial = LawTrial(first, q, k, v, None, x, y, build)
        if first.carries:
            first.impl = "reference"  # kernels do not compute in float64
            carry = replace(trial, q=q0, k=k0, v=v0).forward()[1]
            trial = replace(trial, mechanism=shake_parameters(build(1)), carry=carry)
        tensors = {name: getattr(trial, name).to(device, dtype) for name in {*trial.arguments, "x", "y"}}
        return replace(trial, mechanism=trial.mechanism.to(device, dtype), **tensors)


def shake_parameters(mechanism: Mechanism) -> Mechanism:
    """Add noise to all trained parameters; return the mechanism in float64, for evaluation."""
    for parameter in mechanism.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return mechanism.double().eval()
