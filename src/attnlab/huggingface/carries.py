"""What the layers of an adapted Hugging Face model hand on: the carries of mechanisms such as RealFormer and CODA.

A mechanism that carries gets what the layer before it in its cascade returned. These carries live in a Flow, from the
moment the model is called until it returns or fails. Nothing here imports transformers.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Cascade:
    """The attention modules that carry one to the next: those whose names differ in numbers only."""

    name: str


@dataclass(frozen=True, eq=False)
class Place:
    """Where an attention module stands in its model."""

    name: str
    kind: str  # a key of recording.KINDS
    cascade: Cascade
    layer: int  # its number in the cascade, from 0


@dataclass(frozen=True, eq=False)
class Carried:
    """What one layer hands to the next, with what it could see."""

    carry: Tensor  # (b,h,i,j)
    mask: Tensor | None
    place: Place


@dataclass(eq=False)
class CarryFlow:
    """The carries of one forward pass."""

    owner: nn.Module | None  # the model whose call began it; None while a checkpoint is recomputed
    with_gradients: bool
    carries: dict[Cascade, Carried] = field(default_factory=dict)
    outer: "CarryFlow | None" = None  # that of the call within which this one began

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is called as a part of the one that began this."""
        return self.owner is None or (model is not self.owner and any(model is part for part in self.owner.modules()))


_FLOW: ContextVar[CarryFlow | None] = ContextVar("attnlab_flow", default=None)


def arriving(place: Place, heads: int, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The carry of a layer before, of so many heads; None for the first. Refuses where it would be silently wrong."""
    flow = _FLOW.get()
    if flow is None:
        raise RuntimeError(
            f"{place.name} was called outside a call of its model, so there is no carry to hand it; "
            "checkpoint with model.gradient_checkpointing_enable(), not by hand"
        )
    if flow.with_gradients and not torch.is_grad_enabled():
        raise RuntimeError(
            f"{place.name} runs without gradients inside a pass with them: reentrant checkpointing (or no_grad) "
            'would cut its carry out of the gradient; use gradient_checkpointing_enable({"use_reentrant": False})'
        )
    last = flow.carries.get(place.cascade)
    if last is None or last.place.layer >= place.layer:  # the model goes through its layers again
        return None
    shape = (len(query), heads, query.shape[2], key.shape[2])
    if tuple(last.carry.shape) != shape:
        raise ValueError(
            f"{last.place.name} hands on a carry of shape {tuple(last.carry.shape)} and {place.name} needs {shape}: "
            "layers with caches of unequal length, or of different heads, cannot carry"
        )
    if not _same(mask, last.mask):
        raise ValueError(
            f"{last.place.name} and {place.name} see different keys, so a carry between them means nothing"
        )
    return last.carry.to(query.device)


def hand_on(place: Place, carry: Tensor | None, mask: Tensor | None) -> None:
    """Leave a carry for the next layer of the cascade."""
    if carry is not None and (flow := _FLOW.get()) is not None:
        flow.carries[place.cascade] = Carried(carry, mask, place)


def begin(model: nn.Module, _inputs: Any = None) -> None:
    """Before a model whose mechanisms carry, or a model inside it, is called: the outermost call begins a flow.

    One of its own may be left over, and is dropped: hooks after a call do not run if the keyboard interrupted it.
    """
    flow = outer = _FLOW.get()
    if flow is not None and flow.holds(model):
        return
    while flow is not None:
        outer, flow = flow.outer if flow.owner is model else outer, flow.outer
    _FLOW.set(CarryFlow(model, torch.is_grad_enabled(), outer=outer))
    for layer in model.modules():
        checkpoint: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpoint is not None and not isinstance(checkpoint, CarryingCheckpoint):
            layer._gradient_checkpointing_func = CarryingCheckpoint(checkpoint)  # type: ignore[assignment]


def end(model: nn.Module, _inputs: Any = None, _output: Any = None) -> None:
    """After it returned or failed: a flow ends with the call that began it."""
    flow = _FLOW.get()
    if flow is not None and flow.owner is model:
        _FLOW.set(flow.outer)


class CarryingCheckpoint:
    """Checkpointing of a layer that also reads a carry: its recomputation, in the backward pass, gets the same one."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        flow = _FLOW.get()
        if flow is None:
            return self.checkpoint(function, *inputs, **options)
        arrived, recomputing = dict(flow.carries), False

        def again(*inputs: Any, **named: Any) -> Any:
            nonlocal recomputing
            if not recomputing:
                recomputing = True
                return function(*inputs, **named)
            token = _FLOW.set(CarryFlow(None, True, dict(arrived)))
            try:
                return function(*inputs, **named)
            finally:
                _FLOW.reset(token)

        return self.checkpoint(again, *inputs, **options)


def _same(mask: Tensor | None, other: Tensor | None) -> bool:
    if mask is None or other is None:
        return mask is other
    return mask is other or (mask.shape == other.shape and torch.equal(mask, other.to(mask.device)))
