"""Recording from outside: hooks on every attention of a model, which make a Record of a forward pass.

A hook on the mechanism sees q, k, v, mask and carry, and calls `weights` with them again. A hook on the attention sees
its input and output, and one on the readout sees the hidden vectors. The model has no code for recording, and no hook
stays on it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnlab.mechanisms import MECHANISMS
from attnlab.mechanisms.mechanism import Mechanism, repeat_heads, visible
from attnlab.mechanisms.noise import seed_noise
from attnlab.models.attention import Attention
from attnlab.models.model import Model
from attnlab.recording.around import BlockWatcher
from attnlab.recording.turning import read_turning
from attnlab.records.record import Layer, Record
from attnlab.records.tolerance import measure_difference

_changed: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many interventions change a model now


def record(model: nn.Module, batch: Any, *, noise: int | None = None, feed_forward: bool = False) -> Record:
    """Record one forward pass of our model, which must be in evaluation mode.

    batch         the arguments of forward: a tensor, a tuple of positional arguments or a mapping of named ones
    noise         seed of one sampled pass of a stochastic mechanism; None: the mean
    feed_forward  also record the feed-forward after each attention; its weights need memory

    Raises TypeError for another model or batch, and ValueError in training mode.
    """
    inner = unwrap_model(model)
    if not isinstance(inner, Model):
        raise TypeError(f"a {type(inner).__name__} is a Hugging Face model; record it with attnlab.record")
    if any(module.training for module in inner.modules()):
        raise ValueError(f"this {type(inner).__name__} is in training mode; call model.eval() first")
    check_unchanged(inner)
    positional, named = _split_batch(inner, batch)
    eager = torch.compiler.set_stance("force_eager")  # hooks on compiled code never fire
    around = BlockWatcher(inner, feed_forward=feed_forward)
    with _watch_model(inner, around) as (layers, readout), sample_noise(inner, noise), torch.no_grad(), eager:
        inner(*positional, **named)
    sequences = inner.sequences(*positional, **named)
    return Record(
        around.describe_layers(layers),
        tokens={name: tokens.clone() for name, (tokens, _) in sequences.items()},
        masks={name: mask.clone() for name, (_, mask) in sequences.items()},
        readout=readout,
        meta={"model": type(inner).__name__, "mechanism": _name_mechanisms(inner), "noise": noise},
    )


def unwrap_model(model: nn.Module) -> Any:
    """Return our or a Hugging Face model without its wrapper: torch.compile, DistributedDataParallel or DataParallel.

    Raises TypeError if there is no such model inside.
    """
    inner: Any = model
    while not isinstance(inner, Model) and not _is_transformers(inner):
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"cannot record a {type(model).__name__}: expected a model from attnlab's build "
                f"(attnlab.models.transformer), or a Hugging Face model, its id or its path{_suggest_part(model)}"
            )
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
    return inner


def sample_noise(model: nn.Module, seed: int | None) -> AbstractContextManager[None]:
    """Return a context in which a stochastic model draws its noise from this seed; with None, nothing changes."""
    if seed is None:
        return nullcontext()
    if not isinstance(seed, int):
        raise TypeError(f"noise must be an integer seed, got {seed!r}")
    if not any(isinstance(module, Mechanism) and module.stochastic for module in model.modules()):
        names = _name_mechanisms(model) or type(model).__name__
        raise ValueError(f"noise={seed} needs a stochastic mechanism, and {names} is not one; leave noise out")
    return seed_noise(model, seed)


@contextmanager
def mark_changed(model: nn.Module) -> Iterator[None]:
    """Mark a model as changed while the context is open: a Record would not show what it computes."""
    _changed[model] = _changed.get(model, 0) + 1
    try:
        yield
    finally:
        _changed[model] -= 1


def is_changed(model: nn.Module) -> bool:
    """Return whether an intervention is active."""
    return _changed.get(model, 0) > 0


def check_unchanged(model: nn.Module) -> None:
    """Raise ValueError if an intervention is active."""
    if is_changed(model):
        raise ValueError(
            f"this {type(model).__name__} is inside attnlab.intervene and cannot be recorded there: record it outside "
            "the with block, or measure logits inside"
        )


@contextmanager
def _watch_model(model: Model, around: BlockWatcher) -> Iterator[tuple[list[Layer], dict[str, Tensor]]]:
    """Install the hooks: each attention that runs appends a Layer, and the readout stores its input."""
    layers: list[Layer] = []
    readout: dict[str, Tensor] = {}
    masks: dict[Any, tuple[Any, Tensor]] = {}

    def store_readout(module: nn.Module, args: tuple[Any, ...]) -> None:
        named = {"weight": getattr(module, "weight", None), "bias": getattr(module, "bias", None)}
        readout.update(hidden=args[0], **{name: x.clone() for name, x in named.items() if x is not None})

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                inner, outer = _make_hooks(name, layers, masks, around)
                hooks.enter_context(module.mechanism.register_forward_hook(inner, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(outer))
        hooks.enter_context(model.readout.register_forward_pre_hook(store_readout))
        hooks.enter_context(around.watch())
        yield layers, readout


def _make_hooks(
    name: str, layers: list[Layer], masks: dict[Any, tuple[Any, Tensor]], around: BlockWatcher
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return a hook on the mechanism, which keeps tensors, and one on the attention, which makes a Layer of them."""
    tensors: dict[str, Any] = {}

    def inner(mechanism: Mechanism, args: tuple[Any, ...], named: dict[str, Any], output: tuple[Tensor, Any]) -> None:
        q, k, v, mask, carry = args
        mixed, sides = output[0], named.get("sides", (None, None))
        options = {name: x for name, x in named.items() if name != "sides"} | mechanism.give_sides(sides)
        v, carry, _ = mechanism.take_values(v, carry)
        weights = mechanism.weights(q, k, mask, carry, **options)[0]
        plain = type(mechanism).finish is Mechanism.finish and type(mechanism).turn is Mechanism.turn
        context = mixed if plain else mechanism.mix(q, k, v, mask, carry, **options)[0]
        check_weights(mechanism, weights, v, context)
        turning = read_turning(mechanism, context, v, named["at"], sides)
        key = (id(mask), id(named["at"]), named["causal"], q.shape[2], k.shape[2])
        pairs = visible(q, k, mask, causal=named["causal"], at=named["at"])
        _, pairs = masks.setdefault(key, ((mask, named["at"]), pairs))  # mask and at stay alive: ids are unique
        tensors.update(attended=weights, grouped_values=v, context=context, mixed=mixed, mask=pairs, turning=turning)

    def outer(module: Attention, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        weight, bias = module.output_projection()
        layer = Layer(
            kind=module.kind, index=module.index, name=name, inputs=args[0], outputs=output[0],
            output_weight=weight.clone(), output_bias=None if bias is None else bias.clone(), **tensors,
        )  # fmt: skip
        layers.append(layer)
        around.add_attention(layer)
        tensors.clear()

    return inner, outer


def check_weights(mechanism: Mechanism, weights: Tensor, v: Tensor, context: Tensor) -> None:
    """Raise ValueError unless the context is weights · v, as every reading of a Record assumes."""
    error, allowed = measure_difference(weights @ repeat_heads(v, weights.shape[1]), context)
    if error > allowed:  # not if it is NaN: of a model that diverged, the analyses say so
        name = type(mechanism).__name__
        raise ValueError(
            f"{name} cannot be recorded: its weights times its values differ from the context it mixes by {error:.2g}; "
            "attnlab check shows which law it breaks"
        )


def _split_batch(model: Model, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments of forward. Raises TypeError for arguments that it does not take."""
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(batch, Mapping | tuple | list):
        raise TypeError(f"a batch must be a tensor, a tuple or a mapping, got a {type(batch).__name__}")
    positional, named = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    signature = inspect.signature(model.hidden)
    try:
        arguments = signature.bind(*positional, **named).arguments
    except TypeError as error:
        expected = ", ".join(signature.parameters)
        raise TypeError(f"the batch of a {type(model).__name__} must be {expected}: {error}") from None
    for name, value in arguments.items():
        if not isinstance(value, Tensor | None):
            raise TypeError(f"{name} must be a tensor, got a {type(value).__name__}")
    return positional, named


def _suggest_part(model: Any) -> str:
    """Suggest the part of a foreign module that can be recorded, if there is one."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    inside = next((name for name, part in parts if isinstance(part, Model) or _is_transformers(part)), None)
    return "" if inside is None else f"; pass the model inside it, {inside!r}"


def _name_mechanisms(model: nn.Module) -> str:
    """Return the names of the model's mechanisms: those of the registry, or class names."""
    names = {kind: name for name, kind in MECHANISMS.items()}
    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    nested = {part for mechanism in mechanisms for part in mechanism.modules() if part is not mechanism}
    kinds = {type(mechanism): None for mechanism in mechanisms if mechanism not in nested}
    return ", ".join(names.get(kind, kind.__name__) for kind in kinds)


def _is_transformers(model: object) -> bool:
    return any(kind.__module__.split(".")[0] == "transformers" for kind in type(model).__mro__)
