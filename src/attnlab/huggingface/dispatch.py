"""What the attention modules of a Hugging Face model call, and how to have them call something else for a while.

Each adapted attention module holds its mechanism as the submodule `attnlab` and its `Place` beside it. Nothing here
imports transformers: its models are known by what they can do.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import carries as cascade
from attnlab.huggingface import native
from attnlab.mechanisms import Mechanism

# names among the implementations of transformers
ADAPTED = "attnlab"
WATCHED = "attnlab-watched"  # with additive masks, as the eager implementation has them
WATCHED_BOOL = "attnlab-watched-bool"

Attend = Callable[..., tuple[Tensor, Tensor | None]]

_ATTEND: ContextVar[Attend] = ContextVar("attnlab_attend")


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
    cascade.hand_on(place_of(module), carry, attention_mask)
    return mixed.transpose(1, 2).contiguous(), None


def watched(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """What a watched model calls: the function that it was switched to."""
    return _ATTEND.get()(module, *tensors, **options)


def arguments(
    module: nn.Module,
    mechanism: Mechanism,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """mask, carry, causal and bias for the mechanism, from what the attention module was going to call."""
    place = place_of(module)
    given = understood(place.name, attention_mask, options) | {"causal": native.causal(module, attention_mask, options)}
    decoding = query.shape[2] < key.shape[2]
    if mechanism.self_only and decoding and attention_mask is not None and not attention_mask[..., -1, -1].any():
        kind = type(mechanism).__name__
        raise ValueError(f"{place.name}: with a static cache, {kind} cannot know which key is a query's own")
    if mechanism.training:
        mechanism.dropout = float(options.get("dropout") or 0.0)  # the model says it at each call
    heads = mechanism.carry_heads
    carry = cascade.arriving(place, heads, query, key, attention_mask) if mechanism.carries else None
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


def guard(model: nn.Module, _inputs: tuple, named: dict[str, Any]) -> None:
    """Before an adapted model is called: refuse if it would not use its mechanisms, or could not do what is asked."""
    if named.get("output_attentions"):
        raise ValueError("an adapted model returns no attentions under output_attentions: attnlab.record shows them")
    chosen = str(model.config._attn_implementation)  # type: ignore[union-attr]
    if not chosen.startswith(ADAPTED):
        raise RuntimeError(
            f"this model was adapted, but its attention implementation is now {chosen!r}, which knows nothing of that; "
            f"set_attn_implementation({ADAPTED!r}) sets it back"
        )


def call(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> Any:
    """One forward pass, without a cache."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(**inputs, **options, return_dict=True)


@contextmanager
def switched(model: nn.Module, implementation: str, function: Attend | None = None) -> Iterator[None]:
    """Within, the model's attention is of this implementation; a watched one calls the function."""
    configs = [part.config for part in parts(model)]
    for config in configs:  # and those inside them, which join the list
        configs += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    before = [(config, config._attn_implementation) for config in configs]
    token = None if function is None else _ATTEND.set(function)
    try:
        set_implementation(model, implementation)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own  # the property would hand it down to other configs
        if token is not None:
            _ATTEND.reset(token)


def set_implementation(model: nn.Module, implementation: str) -> None:
    """Of the model and all models in it: older transformers pass over those with a config of the same class (T5)."""
    for part in parts(model):
        if part.config._attn_implementation != implementation:
            part.set_attn_implementation(implementation)


def parts(model: nn.Module) -> list[Any]:
    """The model and the models inside it."""
    return [part for part in model.modules() if hasattr(part, "set_attn_implementation")]


def encoder(model: Any) -> nn.Module | None:
    """That of an encoder-decoder model."""
    return model.get_encoder() if model.config.is_encoder_decoder else None


def place_of(module: nn.Module) -> cascade.Place:
    """Where an adapted attention module stands."""
    return module.attnlab_place  # type: ignore[return-value]


def adaptation_of(model: nn.Module) -> Any:
    """What was put into the model, or a model in it; None if nothing was."""
    return next((vars(m)["attnlab_adaptation"] for m in model.modules() if "attnlab_adaptation" in vars(m)), None)


def by_itself(model: nn.Module) -> str:
    """Why a model that calls nothing of this is refused."""
    return (
        f"{type(model).__name__} computes its attention by itself, not through transformers' AttentionInterface, "
        "so it can neither be recorded nor adapted: not supported"
    )
