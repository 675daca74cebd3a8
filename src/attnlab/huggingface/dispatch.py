"""The attention functions that Hugging Face models call through attnlab, and switching between them.

Each adapted attention module holds its mechanism as the submodule `attnlab`, and its `Place` as `attnlab_place`.
Nothing here imports transformers.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import carries as cascade
from attnlab.huggingface import layer_inputs, native, readers
from attnlab.huggingface.caps_and_sinks import add_cap_and_sink
from attnlab.huggingface.layer_inputs import LayerInputs
from attnlab.huggingface.native import AttentionCall
from attnlab.huggingface.query_history import extend_mask, look_back
from attnlab.huggingface.query_projection import compute_queries, join_groups
from attnlab.mechanisms import Mechanism
from attnlab.mechanisms.mechanism import position

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
    layer_inputs.capture_query(query)
    call = AttentionCall(module, query, key, value, attention_mask, options)
    if (mechanism := find_mechanism(module)) is None:
        return call.run_eager_in_chunks(call.find_visible()) if call.needs_eager() else call.run_fused(), None
    ready = prepare_call(call, mechanism)
    mixed, carry = module.attnlab(ready.query, ready.key, ready.value, **ready.given)  # type: ignore[operator]
    cascade.pass_carry(get_place(module), carry, attention_mask)
    return mixed[:, :, ready.former :].transpose(1, 2).contiguous(), None


def attend_watched(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the function that the watched model was switched to."""
    layer_inputs.capture_query(query)
    return _ATTEND.get()(AttentionCall(module, query, key, value, attention_mask, options))


@contextmanager
def replace_context(context: Tensor, begin: Callable[[], None]) -> Iterator[None]:
    """Let watched attention call `begin` and return this context (b,h,i,d) while the context manager is open."""

    def attend_so(_call: AttentionCall) -> tuple[Tensor, None]:
        begin()
        return context.transpose(1, 2), None

    token = _ATTEND.set(attend_so)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def find_mechanism(module: nn.Module) -> Mechanism | None:
    """Return the mechanism that computes the attention of a module, or None if none was installed.

    A wrapper (torch.compile, PEFT) hands its attributes on from the mechanism that it calls. Raises ValueError if the
    mechanism is gone, or if a wrapper holds several and does not say which of them it calls.
    """
    if not hasattr(module, "attnlab_place"):
        return None
    held = getattr(module, "attnlab", None)
    active = getattr(getattr(held, "weights", None), "__self__", None)
    if isinstance(active, Mechanism):
        return active
    inside = [each for each in held.modules() if isinstance(each, Mechanism)] if isinstance(held, nn.Module) else []
    if len(inside) == 1:
        return inside[0]
    name, wrapper = get_place(module).name, type(held).__name__
    if inside:
        what = f"{name} is wrapped in {wrapper}, which holds {len(inside)} mechanisms and does not say which it calls"
        raise ValueError(f"{what}: remove the wrapper")
    raise ValueError(
        f"{name} has lost its mechanism: its submodule attnlab is {wrapper}; load or adapt the model again"
    )


def begin_attention(module: nn.Module, args: tuple, named: dict[str, Any]) -> None:
    """Note what the mechanism of an attention module reads beside q, k and v (a pre-hook)."""
    if (mechanism := find_mechanism(module)) is None:
        return
    inputs = layer_inputs.begin_inputs(module, mechanism, args, named)
    if mechanism.query_heads != mechanism.heads:
        compute_queries(inputs, args, named)
    inputs.keep_key_side()


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """The arguments of a mechanism's forward."""

    query: Tensor
    key: Tensor
    value: Tensor
    given: dict[str, Any]  # mask, carry, causal, at, bias and, where the mechanism reads them, sides
    former: int  # number of former queries before the first one


def prepare_call(call: AttentionCall, mechanism: Mechanism) -> PreparedCall:
    """Return what the mechanism computes from, by the call of its attention module and the module's inputs."""
    place, query = get_place(call.module), call.query
    given, former = read_mask_and_bias(place.name, call), 0
    key, value = add_cap_and_sink(call, given)
    given["at"] = None
    if mechanism.training:
        mechanism.dropout = float(call.options.get("dropout") or 0.0)  # the model passes it at each call
    if place.kind != "cross" and (mechanism.positional or mechanism.self_only):
        given["at"] = call.find_positions()
    if mechanism.needs_layer:
        inputs = layer_inputs.get_inputs(call.module, place.name)
        given["sides"] = inputs.read_sides(key.shape[2])
        if inputs.queries:
            query, given["bias"] = join_groups(query, inputs.queries, given["bias"])
        if mechanism.lookback:
            query, former = add_former_queries(inputs, call, query, given)
    if mechanism.carries:
        given["carry"] = find_carry(place, mechanism, query, key, value, call.mask)
    return PreparedCall(query, key, value, given, former)


def find_carry(
    place: cascade.Place, mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor | None:
    """Return the carry of the previous layer, of the shape of the logits or of the values."""
    if mechanism.carry_of == "keys":
        return cascade.take_carry(place, tuple(value.shape), query.device)
    shape = (len(query), mechanism.carry_heads, query.shape[2], key.shape[2])
    carry = cascade.take_carry(place, shape, query.device)
    if carry is not None:
        cascade.check_mask(place, mask)
    return carry


def add_former_queries(
    inputs: LayerInputs, call: AttentionCall, query: Tensor, given: dict[str, Any]
) -> tuple[Tensor, int]:
    """Return the queries after the former ones that the cache kept, and their number; extend the arguments to them."""
    layer = inputs.find_cache_layer()
    if layer is None:
        return query, 0
    query_side, key_side = given["sides"]
    longer = look_back(layer, inputs.mechanism.lookback, (query,) if query_side is None else (query, query_side))
    size = longer[0].shape[2] - query.shape[2]
    if size == 0:
        return query, 0
    if query_side is not None:
        given["sides"] = (longer[1], key_side)
    at = inputs.find_own_positions() if inputs.source is not None else call.find_positions()
    if at is None:
        at = position(call.query, call.key)
    if call.mask is not None:
        given["mask"] = extend_mask(call.mask, at, size, None if inputs.source is not None else call.key.shape[2])
    given["at"] = torch.cat([at[0] + torch.arange(-size, 0, device=at.device), at])
    return longer[0], size


def read_mask_and_bias(name: str, call: AttentionCall) -> dict[str, Any]:
    """Return mask, causal and bias of an attention call. Raises ValueError for arguments that no mechanism has."""
    if call.mask is not None and call.mask.dtype != torch.bool:
        raise ValueError(
            f"{name} got a mask of {call.mask.dtype}, expected bool: either the attention_mask is additive "
            "(pass a bool one), or this architecture builds its own masks and is not supported"
        )
    for option, value in call.options.items():
        if isinstance(value, Tensor) and option not in ("position_bias", "s_aux", *native.HARMLESS):
            lack = "which no mechanism of attnlab supports"
            raise ValueError(f"{name} passes the tensor {option!r} to its attention, {lack}")
    return {"mask": call.mask, "causal": call.is_causal(), "bias": call.options.get("position_bias")}


def check_call(model: nn.Module, _inputs: tuple, named: dict[str, Any]) -> None:
    """Refuse a call of an adapted model that would bypass its mechanisms or asks for attentions (a pre-hook)."""
    if named.get("output_attentions"):
        raise ValueError("an adapted model does not support output_attentions; use attnlab.record to see its weights")
    chosen = str(model.config._attn_implementation)  # type: ignore[union-attr]
    if chosen not in (ADAPTED, WATCHED, WATCHED_BOOL) and model._can_set_attn_implementation():  # type: ignore[operator]
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
def switch_attention(
    model: nn.Module, implementation: str, function: Attend | None = None, *, linear: bool = False
) -> Iterator[None]:
    """Switch the model to an attention implementation while the context is open; watched ones call the function.

    linear: also let it call the function for attention that is no softmax, of modules with such a reader.
    """
    configs = [part.config for part in list_models(model)]
    for config in configs:  # the list grows by the configs inside them
        configs += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    before = [(config, config._attn_implementation) for config in configs]
    token = None if function is None else _ATTEND.set(function)
    read = [] if function is None else readers.install_readers(model, attend_watched, linear=linear)
    try:
        set_implementation(model, implementation)
        yield
    finally:
        readers.remove_readers(read)
        for config, own in before:
            config._attn_implementation_internal = own  # setting the property would change other configs too
        if token is not None:
            _ATTEND.reset(token)


def set_implementation(model: nn.Module, implementation: str) -> None:
    """Set the implementation of the model and all models in it."""
    for part in list_models(model):  # older transformers skip inner models whose config has the same class (T5)
        if not part._can_set_attn_implementation():
            part.config._attn_implementation_internal = "eager"  # readers take its masks
        elif part.config._attn_implementation != implementation:
            part.set_attn_implementation(implementation)


def list_models(model: nn.Module) -> list[Any]:
    """Return the model and the models inside it."""
    return [part for part in model.modules() if hasattr(part, "set_attn_implementation")]


def get_place(module: nn.Module) -> cascade.Place:
    return module.attnlab_place  # type: ignore[return-value]


def find_adaptation(model: nn.Module) -> Any:
    """Return the adaptation of the model or of a model in it, or None."""
    return next((vars(m)["attnlab_adaptation"] for m in model.modules() if "attnlab_adaptation" in vars(m)), None)
