"""A Hugging Face model with another attention: what its attention modules call, and what their layers hand on.

Each adapted attention module holds its mechanism as the submodule `attnlab` and its `Place` beside it. A mechanism that
carries (RealFormer, CODA) gets what the layer before it in its cascade returned. These carries live in a Flow, from the
moment the model is called until it returns or fails. Nothing here imports transformers.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms import Mechanism
from attnlab.models import native

IMPLEMENTATION = "attnlab"  # the name of this attention among the implementations of transformers


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
class Flow:
    """The carries of one forward pass."""

    owner: nn.Module | None  # the model whose call began it
    with_gradients: bool
    carries: dict[Cascade, Carried] = field(default_factory=dict)


_FLOW: ContextVar[Flow | None] = ContextVar("attnlab_flow", default=None)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What an adapted model calls as its attention: (b,h,i,d), (b,g,j,d), (b,g,j,d) -> (b,i,h,d).

    A module that was left as it was keeps its own attention, on the same bool mask.
    """
    if not isinstance(mechanism := getattr(module, "attnlab", None), Mechanism):
        if not native.fused_refuses(options):
            return native.fused(module, query, key, value, attention_mask, options), None
        seen = native.visible(module, query, key, attention_mask, options)
        return native.eager_context(module, query, key, value, seen, options), None
    given = arguments(module, mechanism, query, key, attention_mask, options)
    mixed, carry = mechanism(query, key, value, **given)
    hand_on(module, carry, attention_mask)
    return mixed.transpose(1, 2).contiguous(), None


def arguments(
    module: nn.Module,
    mechanism: Mechanism,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """mask, carry, causal and bias for the mechanism, from what the attention module was going to call."""
    place: Place = module.attnlab_place  # type: ignore[assignment]
    given = understood(place.name, attention_mask, options) | {"causal": native.causal(module, attention_mask, options)}
    decoding = query.shape[2] < key.shape[2]
    if mechanism.self_only and decoding and attention_mask is not None and not attention_mask[..., -1, -1].any():
        kind = type(mechanism).__name__
        raise ValueError(f"{place.name}: with a static cache, {kind} cannot know which key is a query's own")
    if mechanism.training:
        mechanism.dropout = float(options.get("dropout") or 0.0)  # the model says it at each call
    carry = arriving(place, query, key, attention_mask) if mechanism.carries else None
    return given | {"carry": carry}


def understood(name: str, attention_mask: Tensor | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The mask and the bias among an attention module's arguments; refuses those that a mechanism has no place for."""
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(
            f"{name} was given a mask of {attention_mask.dtype}, not bool: either the attention_mask passed was "
            "additive (pass a bool one), or this architecture makes its masks by itself and is not supported"
        )
    if options.get("softcap") is not None:
        raise ValueError(
            f"{name} caps its logits (softcap={options['softcap']}), which no mechanism here has: not supported"
        )
    for option, value in options.items():
        if isinstance(value, Tensor) and option not in ("position_bias", *native.HARMLESS):
            raise ValueError(
                f"{name} passes the tensor {option!r} to its attention, which no mechanism here has: not supported"
            )
    return {"mask": attention_mask, "bias": options.get("position_bias")}


def arriving(place: Place, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The carry of the layer before, or None for the first; refuses where it would be silently wrong."""
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
    if (last := flow.carries.get(place.cascade)) is None:
        return None
    shape = (*query.shape[:3], key.shape[2])
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


def hand_on(module: nn.Module, carry: Tensor | None, mask: Tensor | None) -> None:
    """Leave a carry for the next layer of the cascade."""
    place: Place = module.attnlab_place  # type: ignore[assignment]
    if carry is not None and (flow := _FLOW.get()) is not None:
        flow.carries[place.cascade] = Carried(carry, mask, place)


def guard(model: nn.Module, _inputs: tuple, named: dict[str, Any]) -> None:
    """Before an adapted model is called: refuse if it would not use its mechanisms, or could not do what is asked."""
    if named.get("output_attentions"):
        raise ValueError("an adapted model returns no attentions under output_attentions: attnlab.record shows them")
    chosen = str(model.config._attn_implementation)  # type: ignore[union-attr]
    if not chosen.startswith(IMPLEMENTATION):
        raise RuntimeError(
            f"this model was adapted, but its attention implementation is now {chosen!r}, which knows nothing of that; "
            f"set_attn_implementation({IMPLEMENTATION!r}) sets it back"
        )


def begin(model: nn.Module, _inputs: Any = None) -> None:
    """Before a model whose mechanisms carry, or a model inside it, is called: the outermost call begins a flow."""
    flow = _FLOW.get()
    if flow is not None and flow.owner is not model:
        return
    _FLOW.set(Flow(model, torch.is_grad_enabled()))
    for layer in model.modules():
        checkpoint: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpoint is not None and not isinstance(checkpoint, CarryingCheckpoint):
            layer._gradient_checkpointing_func = CarryingCheckpoint(checkpoint)  # type: ignore[assignment]


def end(model: nn.Module, _inputs: Any = None, _output: Any = None) -> None:
    """After it returned or failed: a flow ends with the call that began it."""
    flow = _FLOW.get()
    if flow is not None and flow.owner is model:
        _FLOW.set(None)


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
            token = _FLOW.set(Flow(None, True, dict(arrived)))
            try:
                return function(*inputs, **named)
            finally:
                _FLOW.reset(token)

        return self.checkpoint(again, *inputs, **options)


def _same(mask: Tensor | None, other: Tensor | None) -> bool:
    if mask is None or other is None:
        return mask is other
    return mask is other or (mask.shape == other.shape and torch.equal(mask, other.to(mask.device)))
