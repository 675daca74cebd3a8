"""Carries between the layers of an adapted Hugging Face model, for mechanisms such as RealFormer and CODA.

Such a mechanism receives the carry that the previous layer of its cascade returned. A CarryFlow holds these carries
from the call of the model until it returns or fails. Nothing here imports transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface.running import Running


@dataclass(frozen=True, eq=False)
class Place:
    """The position of an attention module in its model."""

    name: str
    kind: str  # a key of records.record.KINDS
    cascade: str  # name of the modules that pass a carry from one to the next: their names differ only in numbers
    layer: int  # index in the cascade, from 0
    query_projection: str = ""  # its name in the module, where the mechanism has further queries
    query_features: Tensor | None = None  # the outputs of the query projection that become queries (h·d,)


@dataclass(frozen=True, eq=False)
class LayerCarry:
    """The carry of one layer, with the mask that the layer used."""

    carry: Tensor  # (b,h,i,j), or (b,g,j,d)
    mask: Tensor | None
    place: Place


@dataclass(eq=False)
class CarryFlow:
    """The carries of one forward pass."""

    owner: nn.Module | None  # the model whose call began the flow; None while a checkpoint is recomputed
    with_gradients: bool
    carries: dict[str, LayerCarry] = field(default_factory=dict)
    outer: "CarryFlow | None" = None  # the flow of the enclosing call

    def contains(self, model: nn.Module) -> bool:
        """Return whether the model is a part of the flow's owner."""
        return self.owner is None or (model is not self.owner and any(model is part for part in self.owner.modules()))


_FLOW = Running[CarryFlow]()


def take_carry(place: Place, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Return the carry of the previous layer; None for the first. Raises an error if it does not have this shape."""
    flow = _FLOW.get()
    if flow is None:
        raise RuntimeError(
            f"{place.name} runs outside a call of its model, so it gets no carry; for checkpointing, call "
            "model.gradient_checkpointing_enable() instead of wrapping layers"
        )
    if flow.with_gradients and not torch.is_grad_enabled():
        raise RuntimeError(
            f"{place.name} runs without gradients inside a pass with gradients: reentrant checkpointing (or no_grad) "
            'drops the gradient of its carry; use gradient_checkpointing_enable({"use_reentrant": False})'
        )
    last = flow.carries.get(place.cascade)
    if last is None or last.place.layer >= place.layer:  # the model runs through its layers a second time
        return None
    if tuple(last.carry.shape) != shape:
        raise ValueError(
            f"{last.place.name} passes a carry of shape {tuple(last.carry.shape)} but {place.name} needs {shape}: "
            "layers with caches of unequal length, or with different numbers of heads, cannot share a carry"
        )
    return last.carry.to(device)


def check_mask(place: Place, mask: Tensor | None) -> None:
    """Raise ValueError if the previous layer, whose carry this one took, saw other keys."""
    flow = _FLOW.get()
    last = None if flow is None else flow.carries.get(place.cascade)
    if last is not None and not _is_same_mask(mask, last.mask):
        raise ValueError(f"{last.place.name} and {place.name} see different keys, so they cannot share a carry")


def pass_carry(place: Place, carry: Tensor | None, mask: Tensor | None) -> None:
    """Store a carry for the next layer of the cascade."""
    if carry is not None and (flow := _FLOW.get()) is not None:
        flow.carries[place.cascade] = LayerCarry(carry, mask, place)


def begin_flow(model: nn.Module, _inputs: Any = None) -> None:
    """Begin a flow before the outermost call of a model with carries (a forward pre-hook).

    A flow may be left over from an earlier call of the model, because hooks do not run after a keyboard interrupt. It
    is dropped.
    """
    flow = outer = _FLOW.get()
    if flow is not None and flow.contains(model):
        return
    while flow is not None:
        outer, flow = flow.outer if flow.owner is model else outer, flow.outer
    _FLOW.keep(CarryFlow(model, torch.is_grad_enabled(), outer=outer))
    for layer in model.modules():
        checkpoint: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpoint is not None and not isinstance(checkpoint, CarryingCheckpoint):
            layer._gradient_checkpointing_func = CarryingCheckpoint(checkpoint)  # type: ignore[assignment]


def end_flow(model: nn.Module, _inputs: Any = None, _output: Any = None) -> None:
    """End the flow after the call that began it has returned or failed (a forward hook)."""
    flow = _FLOW.get()
    if flow is not None and flow.owner is model:
        _FLOW.keep(flow.outer)


class CarryingCheckpoint:
    """Gradient checkpointing of a layer that reads a carry: its recomputation gets the same carry as the first pass."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        flow = _FLOW.get()
        if flow is None:
            return self.checkpoint(function, *inputs, **options)
        carries, recomputing = dict(flow.carries), False

        def run_again(*inputs: Any, **named: Any) -> Any:
            nonlocal recomputing
            if not recomputing:
                recomputing = True
                return function(*inputs, **named)
            before = _FLOW.get()
            _FLOW.keep(CarryFlow(None, True, dict(carries)))
            try:
                return function(*inputs, **named)
            finally:
                _FLOW.keep(before)

        return self.checkpoint(run_again, *inputs, **options)


def _is_same_mask(mask: Tensor | None, other: Tensor | None) -> bool:
    if mask is None or other is None:
        return mask is other
    return mask is other or (mask.shape == other.shape and torch.equal(mask, other.to(mask.device)))
