"""The mechanism of each member: one call for all members where it can be, else one call for each.

A mechanism without parameters is called once for all members while it draws nothing. On a GPU those whose kernels read
a seed and parameters of each member are called once in training, too, as softmax, sigmoid, CODA and daGPAM
(Mechanism.takes_members). Any other is called once for each member.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import Mechanism, Sides, WithCarry
from attnlab.models.crew import Crew


class MemberMechanism(nn.Module):
    """The mechanism of each member. What it lacks is looked up in the first.

    stacks   whose tokens are the queries and the keys: "encoder" or "decoder"
    """

    def __init__(self, parts: Sequence[Mechanism], crew: Crew, stacks: tuple[str, str]) -> None:
        super().__init__()
        self.crew, self.stacks = crew, stacks
        is_alike = all(_options(x) == _options(parts[0]) for x in parts)
        is_stacked = is_alike and "takes_members" in vars(type(parts[0]))
        self.is_shared = is_alike and next(parts[0].parameters(), None) is None
        self.whole = _stack_parameters(parts) if is_stacked else None  # one with the parameters of all, (s,…)
        self.parts = nn.ModuleList([] if is_stacked else parts)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("parts", "whole"):
                raise
            return getattr(self._first(), name)

    def _first(self) -> Any:
        return self.parts[0] if self.whole is None else self.whole

    def take_seeds(self, seeds: Tensor) -> None:
        """Let each member draw from its own seeds, (2,s)."""
        if self.whole is not None:
            self.whole.take_seeds(seeds)
        for number, part in enumerate(self.parts):
            part.take_seeds(seeds[:, number : number + 1])  # type: ignore[operator]

    def query_side(self, x: Tensor) -> Tensor | None:
        return self._join("query_side", x)

    def key_side(self, x: Tensor) -> Tensor | None:
        return self._join("key_side", x)

    def _join(self, method: str, x: Tensor) -> Tensor | None:
        if self.whole is not None:
            whole: Tensor | None = getattr(self.whole, method)(x)
            return whole
        sides = [getattr(part, method)(own) for part, own in zip(self.parts, self.crew.split(x), strict=True)]
        return None if sides[0] is None else torch.cat(sides)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                sides: Sides = (None, None), **options: Any) -> WithCarry:  # fmt: skip
        first = self._first()
        each: Sequence[Any] = [first] if self.whole is not None else list(self.parts)
        draws = self.training and any(x.stochastic or x.dropout > 0 for x in each)
        if (q.is_cuda or not draws) and self._is_one_call(draws, q, k, v, **options):
            result: WithCarry = first(q, k, v, mask, carry, sides=sides, **options)
            return result
        contexts: list[Tensor] = []
        carries: list[Any] = []
        inputs = zip(*(self.crew.split(x) for x in (q, k, v, mask, carry, *sides)), strict=True)
        for member, given in enumerate(inputs):
            context, carried = self._attend(member, draws and not q.is_cuda, *given, **options)
            contexts.append(context)
            carries.append(carried)
        return torch.cat(contexts), None if carries[0] is None else torch.cat(carries)

    def _is_one_call(self, draws: bool, q: Tensor, k: Tensor, v: Tensor, *, at: Tensor | None = None,
                     bias: Tensor | None = None, **options: Any) -> bool:  # fmt: skip
        """Whether one call of the mechanism serves all members; draws: it draws noise or dropout."""
        if self.whole is not None:
            return self.whole.takes_members(q, k, v, at, bias)
        return self.is_shared and not draws

    def _call(self, member: int, *inputs: Any, **options: Any) -> WithCarry:
        """Call the mechanism of one member."""
        result: WithCarry
        if self.whole is None:
            result = self.parts[member](*inputs, **options)
            return result
        own, seeds = {name: x[member] for name, x in self.whole.named_parameters()}, self.whole.seeds
        self.whole.members, self.whole.seeds = 1, None if seeds is None else seeds[:, member : member + 1]
        try:
            result = functional_call(self.whole, own, inputs, options)
            return result
        finally:
            self.whole.members, self.whole.seeds = len(self.crew), seeds

    def _attend(self, member: int, cut: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
                carry: Tensor | None, query_side: Tensor | None, key_side: Tensor | None, **options: Any
                ) -> WithCarry:  # fmt: skip
        """Attend in one member; cut: without the padding, so that nothing is drawn for it."""
        (rows, i), (_, j) = ((len(q), x.shape[2]) for x in (q, k))
        if cut:
            (rows, i), (_, j) = (self.crew.sizes[stack][member] for stack in self.stacks)
        pairs = self._first().carry_of == "pairs"
        size = (i, j) if pairs else (j, v.shape[3])
        given = [_cut(q, rows, i), _cut(k, rows, j), _cut(v, rows, j), None if mask is None else mask[:rows, ..., :j]]
        given.append(None if carry is None else carry[:rows, :, : size[0], : size[1]])
        sides = (_cut(query_side, rows, i), _cut(key_side, rows, j))
        with self.crew.be_member(member) if cut else nullcontext():
            context, carried = self._call(member, *given, sides=sides, **options)
        context = _fill(context, len(q), q.shape[2])
        if carried is not None:
            carried = _fill(carried, len(q), *((q.shape[2], k.shape[2]) if pairs else (k.shape[2],)))
        return context, carried


def _options(mechanism: Mechanism) -> dict[str, Any]:
    """The plain options of a mechanism, and what its parameters are like, by name."""
    options = {name: x for name, x in vars(mechanism).items() if isinstance(x, bool | int | float | str | tuple | None)}
    return options | {name: (x.shape, x.requires_grad) for name, x in mechanism.named_parameters()}


def _stack_parameters(parts: Sequence[Mechanism]) -> Mechanism:
    """Give the first mechanism the parameters of all, (s,…), and return it."""
    whole = parts[0]
    whole.members = len(parts)
    for name, first in list(whole.named_parameters()):
        data = torch.stack([part.get_parameter(name).detach() for part in parts])
        owner, _, last = name.rpartition(".")
        setattr(whole.get_submodule(owner), last, nn.Parameter(data, requires_grad=first.requires_grad))
    return whole


def _cut(x: Tensor | None, rows: int, length: int) -> Tensor | None:
    """Cut (b,·,n,·) to the first rows and tokens."""
    return None if x is None else x[:rows, :, :length]


def _fill(x: Tensor, rows: int, *lengths: int) -> Tensor:
    """Pad (b,·,n,·) with zeros to these rows, and to these sizes of the axes after the heads."""
    if (len(x), *x.shape[2 : 2 + len(lengths)]) == (rows, *lengths):
        return x
    more = [length - size for length, size in zip(lengths, x.shape[2:], strict=False)]
    more += [0] * (x.dim() - 2 - len(more))
    return F.pad(x, [n for extra in reversed((rows - len(x), 0, *more)) for n in (0, extra)])
