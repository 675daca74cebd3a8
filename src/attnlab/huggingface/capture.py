"""Watching a Hugging Face model from outside: every attention call of one forward pass becomes a recording.Layer.

    kind            cross if the module was given another sequence's states; else by the encoder, else causal or not
    output_weight   W_O is the first linear map whose input equals the context just returned; it is then checked that
                    Σ_h mixed_h · W_h + b is what that map returned. No table of names.
    lazy            the pass runs on torch's fused attention; q, k, v are kept and weights made when they are asked for

Nothing here imports transformers.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import carries as cascade
from attnlab.huggingface import dispatch, inputs, native
from attnlab.mechanisms import Mechanism
from attnlab.recording.around import Around, is_linear, matrix
from attnlab.recording.tolerance import CHECKED, difference
from attnlab.records.record import Layer, Record, Weigh

OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")  # arguments of an attention module that make it cross


def watch(
    model: Any,
    batch: Mapping[str, Tensor],
    *,
    tokenizer: Any = None,
    lazy: bool = False,
    feed_forward: bool = False,
) -> tuple[Record, Tensor]:
    """The record of one forward pass of a Hugging Face model, and its first output."""
    adaptation = dispatch.adaptation_of(model)
    capture = Capture(model, lazy=lazy, feed_forward=feed_forward)
    masks_as = dispatch.WATCHED if adaptation is None and not lazy else dispatch.WATCHED_BOOL
    with dispatch.switched(model, masks_as, capture.attend), capture.watched(), _readout(model) as read:
        output = dispatch.call(model, batch)[0]
    if not capture.layers:
        raise ValueError(dispatch.by_itself(model))
    tokens, masks = inputs.sequences(model, batch, {layer.kind for layer in capture.layers})
    words = {} if tokenizer is None else {side: inputs.words(tokenizer, ids) for side, ids in tokens.items()}
    meta = {
        "model": model.name_or_path or type(model).__name__,
        "model_type": model.config.model_type,
        "mechanism": "softmax" if adaptation is None else adaptation.label,
        "implementation": ", ".join(sorted(capture.ran)) or dispatch.ADAPTED,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    return Record(capture.around.added(capture.layers), tokens, masks, words, read, meta), output


class Surroundings:
    """What each module was called with, while it runs; and from that, the kind of an attention call."""

    def __init__(self, model: nn.Module) -> None:
        encoder = dispatch.encoder(model)
        self.names = {module: name for name, module in model.named_modules()}
        self.encoder = set() if encoder is None else set(encoder.modules())
        self.called: dict[nn.Module, inspect.BoundArguments] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.names:
                if next(module.children(), None) is not None:
                    stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def kind(self, module: nn.Module, options: Mapping[str, Any]) -> str:
        if any(self.called[module].arguments.get(name) is not None for name in OTHER_SEQUENCE):
            return "cross"
        if self.encoder:
            return "encoder-self" if module in self.encoder else "decoder-self"
        return "decoder-self" if native.is_causal(module, options) else "encoder-self"

    def inputs(self, module: nn.Module) -> Tensor:
        """The states that the queries were made from, (b,i,e)."""
        arguments = self.called[module].arguments
        return arguments.get("hidden_states", next(iter(arguments.values())))

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.called[module] = inspect.signature(module.forward).bind(*args, **kwargs)

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self.called.pop(module, None)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call, until its output projection is met."""

    kind: str
    name: str
    attended: Tensor | Weigh
    grouped_values: Tensor
    context: Tensor  # (b,h,i,d)
    mixed: Tensor  # (b,h,i,d)
    mask: Tensor
    inputs: Tensor


class Capture:
    """The attention function of a recording, and the layers it has seen."""

    def __init__(self, model: nn.Module, *, lazy: bool, feed_forward: bool = False) -> None:
        self.model, self.lazy = model, lazy
        self.around = Around(model, feed_forward=feed_forward)
        self.surroundings = Surroundings(model)
        self.layers: list[Layer] = []
        self.ran: set[str] = set()  # which attention implementations
        self._counts: Counter[str] = Counter()
        self._pending: Call | None = None
        self._masks: dict[Any, tuple[Any, Tensor]] = {}  # by the tensor they were made from, which is held with them
        self._weights: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, calls of `attend` become layers; at the end every one must have met its output projection."""
        with ExitStack() as stack:
            stack.enter_context(self.surroundings.watched())
            for module in self.model.modules():
                if is_linear(module):
                    stack.callback(module.register_forward_hook(self._project).remove)
            stack.enter_context(self.around.watched())
            yield
            self._check_projected()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What the model calls as its attention: the same numbers, and a note of them."""
        self._check_projected()
        name, kind = self.surroundings.names[module], self.surroundings.kind(module, options)
        seen = self._visible(module, query, key, attention_mask, options)
        attended: Tensor | Weigh
        if isinstance(mechanism := getattr(module, "attnlab", None), Mechanism):
            given = dispatch.arguments(module, mechanism, query, key, attention_mask, options)
            attended, _ = mechanism.weights(query, key, **given)
            context, carry = mechanism.mix(query, key, value, **given)
            mixed = mechanism.finish(context)
            cascade.hand_on(dispatch.place_of(module), carry, attention_mask)
        elif self.lazy:
            mixed, attended = self._lazily(module, query, key, value, attention_mask, seen, options)
            context = mixed
        else:
            given_mask = native.additive(seen, query.dtype) if _is_bool(attention_mask) else attention_mask
            output, attended = native.eager(module)(module, query, key, value, given_mask, **options)
            context = mixed = output.transpose(1, 2)
            self.ran.add("eager")
        given_states = self.surroundings.inputs(module)
        self._pending = Call(kind, name, attended, value, context, mixed, seen, given_states)
        return mixed.transpose(1, 2), attended if isinstance(attended, Tensor) else None

    def _lazily(self, module, query, key, value, attention_mask, seen, options) -> tuple[Tensor, Weigh]:
        use_fused = self.model._supports_sdpa and not native.fused_refuses(options)
        if use_fused:
            context = native.fused(module, query, key, value, attention_mask, options)
        else:
            context = native.eager_context(module, query, key, value, seen, options)
        self.ran.add("sdpa" if use_fused else "eager in row chunks")
        alone, context = native.light(module), context.transpose(1, 2)  # (b,h,i,d)

        @torch.no_grad()
        def weigh(start: int, stop: int) -> Tensor:
            weights = native.rows(alone, query, key, value, seen, options, start, stop)[1]
            blind = ~seen.expand(-1, -1, query.shape[2], -1)[:, :, start:stop].any(-1, keepdim=True)
            # eager spreads a query that sees nothing over all keys; torch's fused attention may give it no context
            return weights.masked_fill(blind & (context[:, :, start:stop] == 0).all(-1, keepdim=True), 0.0)

        return context, weigh

    def _visible(self, module, query, key, attention_mask, options) -> Tensor:
        """The bool mask of a call; layers that were given the same mask share one."""
        if attention_mask is None:
            origin: Any = (query.shape[2], key.shape[2], native.causal(module, None, options))
        else:
            origin = id(attention_mask)
        if origin not in self._masks:
            if attention_mask is None or _is_bool(attention_mask):
                seen = native.visible(module, query, key, attention_mask, options)
            else:
                seen = attention_mask > torch.finfo(attention_mask.dtype).min / 2
            self._masks[origin] = (attention_mask, seen)
        return self._masks[origin][1]

    def _project(self, projection: nn.Module, args: tuple, output: Tensor) -> None:
        """A linear map has run: if it read the context that is waiting, it is W_O, and the layer is complete."""
        call = self._pending
        if call is None or not args or not isinstance(args[0], Tensor) or args[0].numel() != call.mixed.numel():
            return
        context = call.mixed.transpose(1, 2).flatten(2)  # (b,i,h·d)
        if args[0].shape[-1] != context.shape[-1] or not torch.equal(args[0].reshape(context.shape), context):
            return
        weight, bias = self._output_weight(projection, call.mixed)
        outputs = output.reshape(*context.shape[:2], -1)
        wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        made = context[:, :CHECKED].to(wide) @ weight.flatten(0, 1).to(wide)
        error, allowed = difference(made if bias is None else made + bias.to(wide), outputs[:, :CHECKED])
        if not error <= allowed:
            where = f"{self.surroundings.names[projection]} ({type(projection).__name__})"
            raise ValueError(
                f"{call.name}: its context goes into {where}, but that is not Σ_h context·W + b "
                f"(it differs by {error:.2g}, and {allowed:.2g} is allowed): not supported"
            )
        index = self._counts[call.kind]
        self._counts[call.kind] += 1
        self.layers.append(Layer(index=index, output_weight=weight, output_bias=bias, outputs=outputs, **vars(call)))
        self.around.attended(self.layers[-1])
        self._pending = None

    def _output_weight(self, projection: nn.Module, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """(h,d,e) and (e,), copied once: training on must not change a record."""
        if projection not in self._weights:
            split, bias = matrix(projection).unflatten(0, (mixed.shape[1], mixed.shape[3])).clone(), projection.bias
            self._weights[projection] = split, None if bias is None else bias.detach().clone()  # type: ignore[operator]
        return self._weights[projection]

    def _check_projected(self) -> None:
        if self._pending is not None:
            raise ValueError(
                f"{self._pending.name}: no linear map reads its context as it is (a gate or a norm may come between), "
                "so there is no output projection to record: not supported"
            )


@contextmanager
def _readout(model: Any) -> Iterator[dict[str, Tensor]]:
    """Within, the last hidden states are noted: what the output embedding reads, where there is one."""
    read: dict[str, Tensor] = {}
    embedding = model.get_output_embeddings()

    def before(module: nn.Module, args: tuple) -> None:
        read["hidden"] = args[0]

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if (hidden := getattr(output, "last_hidden_state", None)) is not None:
            read.setdefault("hidden", hidden)

    if embedding is None:
        handle = model.base_model.register_forward_hook(after)
    else:
        handle = embedding.register_forward_pre_hook(before)
        for name in ("weight", "bias"):
            if isinstance(x := getattr(embedding, name, None), Tensor):
                read[name] = x.detach().clone()
    try:
        yield read
    finally:
        handle.remove()


def _is_bool(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.bool
