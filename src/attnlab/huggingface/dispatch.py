"""The attention functions that Hugging Face models call through attnlab, and switching between them.

Each adapted attention module holds its mechanism as the submodule `attnlab`, and its `Place` as `attnlab_place`.
Nothing here imports transformers.
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
from attnlab.huggingface.native import AttentionCall
from attnlab.mechanisms import Mechanism

# names under which transformers knows these implementations
ADAPTED = "attnlab"
WATCHED = "attnlab-watched"  # with additive masks, like the eager implementation
WATCHED_BOOL = "attnlab-watched-bool"

Attend = Callable[[AttentionCall], tuple[Tensor, Tensor | None]]

_ATTEND: ContextVar[Attend] = ContextVar("attnlab_attend")


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute the attention of an adapted model: (b,h,i,d), (b,g,j,d), (b,g,j,d) -> (b,i,h,d).

    A module into which no mechanism was installed keeps its own attention, with the same bool mask.
    """
    call = AttentionCall(module, query, key, value, attention_mask, options)
    if (mechanism := find_mechanism(module)) is None:
        return call.run_eager_in_chunks(call.build_bool_mask()) if call.needs_eager() else call.run_fused(), None
    given = build_arguments(call, mechanism)
    mixed, carry = module.attnlab(query, key, value, **given)  # type: ignore[operator]
    cascade.pass_carry(get_place(module), carry, attention_mask)
    return mixed.transpose(1, 2).contiguous(), None


def attend_watched(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the function that the watched model was switched to."""
    return _ATTEND.get()(AttentionCall(module, query, key, value, attention_mask, options))


def find_mechanism(module: nn.Module) -> Mechanism | None:
    """Return the mechanism installed in an attention module, also one inside a wrapper (torch.compile, PEFT), or None.

    Of several in one wrapper, it is the first: they are copies. Raises ValueError if the installed mechanism is gone.
    """
    if not hasattr(module, "attnlab_place"):
        return None
    if found := list_mechanisms(held := getattr(module, "attnlab", None)):
        return found[0]
    lost = f"{get_place(module).name} has lost its mechanism: its submodule attnlab is {type(held).__name__}"
    raise ValueError(f"{lost}; load or adapt the model again")


def list_mechanisms(held: Any) -> list[Mechanism]:
    """Return what an attention module holds as `attnlab`: a mechanism, or those inside a wrapper."""
    if isinstance(held, Mechanism):
        return [held]
    return [each for each in held.modules() if isinstance(each, Mechanism)] if isinstance(held, nn.Module) else []


def find_running_mechanism(module: nn.Module, *given: Tensor, **named: Any) -> Mechanism:
    """Return the mechanism that computes the attention of a module: of several in a wrapper, the one that it calls."""
    held: Any = module.attnlab
    if isinstance(held, Mechanism):
        return held
    ran: list[Mechanism] = []
    hooks = [each.register_forward_hook(lambda one, *_: ran.append(one)) for each in list_mechanisms(held)]
    try:
        held(*given, **named)
    finally:
        for hook in hooks:
            hook.remove()
    if len(ran) != 1:
        where = f"{get_place(module).name} is wrapped in {type(held).__name__}, which calls {len(ran)} mechanisms"
        raise ValueError(f"{where}; a record shows exactly one")
    return ran[0]


def build_arguments(call: AttentionCall, mechanism: Mechanism) -> dict[str, Any]:
    """Return mask, carry, causal and bias for the mechanism, from the arguments of the attention module's call."""
    place, query, key, mask = get_place(call.module), call.query, call.key, call.mask
    given = read_mask_and_bias(place.name, call)
    decoding = query.shape[2] < key.shape[2]
    if mechanism.self_only and decoding and mask is not None and not mask[..., -1, -1].any():
        kind = type(mechanism).__name__
        raise ValueError(f"{place.name}: with a static cache, {kind} cannot find a query's own key; use another cache")
    if mechanism.training:
        for each in list_mechanisms(call.module.attnlab):
            each.dropout = float(call.options.get("dropout") or 0.0)  # the model passes it at each call
    carry = cascade.take_carry(place, mechanism.carry_heads, query, key, mask) if mechanism.carries else None
    return given | {"carry": carry}


def read_mask_and_bias(name: str, call: AttentionCall) -> dict[str, Any]:
    """Return mask, causal and bias of an attention call. Raises ValueError for arguments that no mechanism has."""
    if call.mask is not None and call.mask.dtype != torch.bool:
        raise ValueError(
            f"{name} got a mask of {call.mask.dtype}, expected bool: either the attention_mask is additive "
            "(pass a bool one), or this architecture builds its own masks and is not supported"
        )
    if (softcap := call.options.get("softcap")) is not None:
        raise ValueError(f"{name} caps its logits (softcap={softcap}), which no mechanism of attnlab supports")
    for option, value in call.options.items():
        if isinstance(value, Tensor) and option not in ("position_bias", *native.HARMLESS):
            lack = "which no mechanism of attnlab supports"
            raise ValueError(f"{name} passes the tensor {option!r} to its attention, {lack}")
    return {"mask": call.mask, "causal": call.is_causal(), "bias": call.options.get("position_bias")}


def check_call(model: nn.Module, _inputs: tuple, named: dict[str, Any]) -> None:
    """Refuse a call of an adapted model that would bypass its mechanisms or asks for attentions (a pre-hook)."""
    if named.get("output_attentions"):
        raise ValueError("an adapted model does not support output_attentions; use attnlab.record to see its weights")
    chosen = str(model.config._attn_implementation)  # type: ignore[union-attr]
    if not chosen.startswith(ADAPTED):
        raise RuntimeError(
            f"this model is adapted, but its attention implementation is {chosen!r}, which bypasses the mechanisms; "
            f"call set_attn_implementation({ADAPTED!r})"
        )


def run_forward(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> Any:
    """Run one forward pass without a cache."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(**inputs, **options, return_dict=True)


@contextmanager
def switch_attention(model: nn.Module, implementation: str, function: Attend | None = None) -> Iterator[None]:
    """Switch the model to an attention implementation while the context is open; watched ones call the function."""
    configs = [part.config for part in list_models(model)]
    for config in configs:  # the list grows by the configs inside them
        configs += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    before = [(config, config._attn_implementation) for config in configs]
    token = None if function is None else _ATTEND.set(function)
    try:
        set_implementation(model, implementation)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own  # setting the property would change other configs too
        if token is not None:
            _ATTEND.reset(token)


def set_implementation(model: nn.Module, implementation: str) -> None:
    """Set the implementation of the model and all models in it."""
    for part in list_models(model):  # older transformers skip inner models whose config has the same class (T5)
        if part.config._attn_implementation != implementation:
            part.set_attn_implementation(implementation)


def list_models(model: nn.Module) -> list[Any]:
    """Return the model and the models inside it."""
    return [part for part in model.modules() if hasattr(part, "set_attn_implementation")]


def get_place(module: nn.Module) -> cascade.Place:
    return module.attnlab_place  # type: ignore[return-value]


def find_adaptation(model: nn.Module) -> Any:
    """Return the adaptation of the model or of a model in it, or None."""
    return next((vars(m)["attnlab_adaptation"] for m in model.modules() if "attnlab_adaptation" in vars(m)), None)


def explain_refusal(model: nn.Module) -> str:
    """Return the error message for a model that does not use transformers' AttentionInterface."""
    return (
        f"{type(model).__name__} is not supported: it computes attention in its own code, not through transformers' "
        "AttentionInterface, so it cannot be recorded or adapted"
    )
