"""Recording from outside: hooks on every attention of a model see what passed, and make a Record of it.

A hook on the mechanism sees q, k, v, mask and carry and calls `weights` on them again; one on the attention around it
sees what went in and came out; one on the readout sees the hidden vectors. The model knows nothing of it and keeps no
trace.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms import MECHANISMS
from attnlab.mechanisms.mechanism import Mechanism, visible
from attnlab.mechanisms.noise import seed_noise
from attnlab.models.attention import Attention
from attnlab.models.model import Model
from attnlab.recording.around import BlockWatcher
from attnlab.records.record import Layer, Record


def record(model: nn.Module, batch: Any, *, noise: int | None = None, feed_forward: bool = False) -> Record:
    """Record what a model of ours in evaluation mode attends to on one batch.

    batch         what the model's forward takes: a tensor, a tuple of positional arguments or a mapping of named ones
    noise         a seed: one sampled pass of a stochastic mechanism, instead of the mean
    feed_forward  also what the feed-forward after each attention does with it; its weights take room

    """
    inner = unwrap_model(model)
    if not isinstance(inner, Model):
        raise TypeError(f"a {type(inner).__name__} is a Hugging Face model; attnlab.record records it")
    if any(module.training for module in inner.modules()):
        raise ValueError(f"this {type(inner).__name__} is in training mode; call model.eval() before recording it")
    positional, named = _split_batch(inner, batch)
    eagerly = torch.compiler.set_stance("force_eager")  # hooks on compiled code never fire
    around = BlockWatcher(inner, feed_forward=feed_forward)
    with _watch_model(inner, around) as (layers, readout), sample_noise(inner, noise), torch.no_grad(), eagerly:
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
    """Our or a Hugging Face model, out of torch.compile's, DistributedDataParallel's or DataParallel's wrapper."""
    inner: Any = model
    while not isinstance(inner, Model) and not _is_transformers(inner):
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"cannot record a {type(model).__name__}: it is neither a model made by attnlab's build "
                f"(attnlab.models.transformer) nor a Hugging Face model, its id or its path{_hint(model)}"
            )
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
    return inner


def sample_noise(model: nn.Module, seed: int | None) -> AbstractContextManager[None]:
    """Within, a model with a stochastic mechanism draws its noise from this seed; None leaves it as it is."""
    if seed is None:
        return nullcontext()
    if not isinstance(seed, int):
        raise TypeError(f"noise= is a seed, a whole number, not {seed!r}")
    if not any(isinstance(module, Mechanism) and module.stochastic for module in model.modules()):
        kinds = _name_mechanisms(model) or type(model).__name__
        raise ValueError(f"noise={seed} was asked for, but {kinds} draws none; leave noise out")
    return seed_noise(model, seed)


@contextmanager
def _watch_model(model: Model, around: BlockWatcher) -> Iterator[tuple[list[Layer], dict[str, Tensor]]]:
    """Within, each attention that runs appends a Layer, and the readout leaves what it was given."""
    layers: list[Layer] = []
    readout: dict[str, Tensor] = {}
    masks: dict[Any, tuple[Any, Tensor]] = {}

    def read(module: nn.Module, args: tuple[Any, ...]) -> None:
        named = {"weight": getattr(module, "weight", None), "bias": getattr(module, "bias", None)}
        readout.update(hidden=args[0], **{name: x.clone() for name, x in named.items() if x is not None})

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                hear, make = _make_hooks(name, layers, masks, around)
                hooks.enter_context(module.mechanism.register_forward_hook(hear, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(make))
        hooks.enter_context(model.readout.register_forward_pre_hook(read))
        hooks.enter_context(around.watch())
        yield layers, readout


def _make_hooks(name: str, layers: list[Layer], masks: dict, around: BlockWatcher) -> tuple[Callable, Callable]:
    """Two hooks: what the mechanism is given and returns, and the layer made of it when the attention is done."""
    heard: dict[str, Any] = {}

    def hear(mechanism: Mechanism, args: tuple[Any, ...], named: dict[str, Any], output: tuple[Tensor, Any]) -> None:
        q, k, v, mask, carry = args
        mixed = output[0]
        weights = mechanism.weights(q, k, mask, carry, **named)[0]
        unfinished = type(mechanism).finish is not Mechanism.finish
        context = mechanism.mix(*args, **named)[0] if unfinished else mixed
        key = (id(mask), id(named["at"]), named["causal"], q.shape[2], k.shape[2])
        seen = visible(q, k, mask, causal=named["causal"], at=named["at"])
        _, seen = masks.setdefault(key, ((mask, named["at"]), seen))  # held: ids stay theirs
        heard.update(attended=weights, grouped_values=v, context=context, mixed=mixed, mask=seen)

    def make(module: Attention, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        weight, bias = module.output_projection()
        layers.append(
            Layer(
                kind=module.kind,
                index=module.index,
                name=name,
                output_weight=weight.clone(),
                output_bias=None if bias is None else bias.clone(),
                inputs=args[0],
                outputs=output[0],
                **heard,
            )
        )
        around.add_attention(layers[-1])
        heard.clear()

    return hear, make


def _split_batch(model: Model, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What forward is called with; refuses what it does not take."""
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(batch, Mapping | tuple | list):
        kind = type(batch).__name__
        raise TypeError(f"a batch is a tensor, a tuple or a mapping of what the model takes, not a {kind}")
    positional, named = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    signature = inspect.signature(model.forward)
    try:
        given = signature.bind(*positional, **named).arguments
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise TypeError(f"the batch of a {type(model).__name__} is {takes}: {error}") from None
    for name, value in given.items():
        if not isinstance(value, Tensor | None):
            raise TypeError(f"{name} must be a tensor, not a {type(value).__name__}")
    return positional, named


def _suggest_part(model: Any) -> str:
    """Which part of a foreign module could be recorded, if there is one."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    found = next((name for name, part in parts if isinstance(part, Model) or _is_transformers(part)), None)
    return "" if found is None else f"; give the model inside it, its {found!r}"


def _name_mechanisms(model: nn.Module) -> str:
    """The names of the model's mechanisms, as in the registry where they are there."""
    names = {kind: name for name, kind in MECHANISMS.items()}
    found = [module for module in model.modules() if isinstance(module, Mechanism)]
    parts = {part for mechanism in found for part in mechanism.modules() if part is not mechanism}  # not one by itself
    kinds = {type(mechanism): None for mechanism in found if mechanism not in parts}
    return ", ".join(names.get(kind, kind.__name__) for kind in kinds)


def _is_transformers(model: object) -> bool:
    return any(kind.__module__.split(".")[0] == "transformers" for kind in type(model).__mro__)
