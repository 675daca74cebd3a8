"""Watch a Hugging Face model from outside: every attention call of one forward pass becomes a Layer of a Record.

    kind            cross if the module reads another sequence's states; else self-attention of the encoder or decoder
    output_weight   W_O is the first linear map whose input equals the context just returned. The map must return
                    Σ_h mixed_h · W_h + b. No table of module names is needed.
    lazy            the pass runs on torch's fused attention; weights are computed from q, k, v only when they are read

Nothing here imports transformers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import carries as cascade
from attnlab.huggingface import dispatch, inputs, layer_inputs, native
from attnlab.huggingface.native import AttentionCall
from attnlab.mechanisms import Mechanism
from attnlab.recording.around import BlockWatcher, is_linear, weight_matrix
from attnlab.recording.turning import read_turning
from attnlab.records.record import Layer, Record, Weigh
from attnlab.records.tolerance import CHECKED_POSITIONS, measure_difference


def record_pass(
    model: Any, batch: Mapping[str, Tensor], *, tokenizer: Any = None, lazy: bool = False, feed_forward: bool = False
) -> tuple[Record, Tensor]:
    """Return the Record of one forward pass of a Hugging Face model, and the first output of that pass."""
    adaptation = dispatch.find_adaptation(model)
    capture = Capture(model, lazy=lazy, feed_forward=feed_forward)
    masks_as = dispatch.WATCHED if adaptation is None and not lazy else dispatch.WATCHED_BOOL
    with dispatch.switch_attention(model, masks_as, capture.attend), capture.watch_pass() as readout:
        output = dispatch.run_forward(model, batch)[0]
    if not capture.layers:
        raise ValueError(dispatch.explain_refusal(model))
    tokens, masks = inputs.split_sides(model, batch, {layer.kind for layer in capture.layers})
    rows = {} if tokenizer is None else {side: ids.tolist() for side, ids in tokens.items()}
    words = {side: [inputs.show_tokens(tokenizer, row) for row in texts] for side, texts in rows.items()}
    meta = {
        "model": model.name_or_path or getattr(adaptation, "parent", "") or type(model).__name__,
        "model_type": model.config.model_type,
        "mechanism": "softmax" if adaptation is None else adaptation.label,
        "implementation": ", ".join(sorted(capture.implementations)) or dispatch.ADAPTED,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    return Record(capture.around.describe_layers(capture.layers), tokens, masks, words, readout, meta), output


class ModuleCalls:
    """The arguments of every module that is running; they tell the kind of an attention call."""

    def __init__(self, model: Any) -> None:
        self.names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self.encoder = set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()
        self.arguments: dict[nn.Module, dict[str, Any]] = {}

    @contextmanager
    def watch_modules(self) -> Iterator[None]:
        """Note the arguments of modules while the context is open."""
        with ExitStack() as stack:
            for module in self.names:
                if next(module.children(), None) is not None:
                    stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def find_kind(self, call: AttentionCall) -> str:
        if layer_inputs.find_source(self.arguments[call.module]) is not None:
            return "cross"
        decodes = call.module not in self.encoder if self.encoder else call.has_causal_module()
        return "decoder-self" if decodes else "encoder-self"

    def find_inputs(self, module: nn.Module) -> Tensor:
        """Return the states that the queries are computed from, (b,i,e)."""
        return layer_inputs.find_states(self.arguments[module])

    def find_widths(self, module: nn.Module) -> tuple[int, int]:
        """Return the sizes of the states that queries and keys are computed from."""
        arguments = self.arguments[module]
        states = layer_inputs.find_states(arguments)
        source = layer_inputs.find_source(arguments)
        return states.shape[-1], (states if source is None else source).shape[-1]

    def has_rotation(self, module: nn.Module) -> bool:
        """Return whether an attention module gets the cosines and sines of rotary positions."""
        return self.arguments[module].get("position_embeddings") is not None

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.arguments[module] = layer_inputs.bind_arguments(module, args, kwargs)

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self.arguments.pop(module, None)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call whose output projection has not run yet."""

    kind: str
    name: str
    attended: Tensor | Weigh
    grouped_values: Tensor
    context: Tensor  # (b,h,i,d)
    mixed: Tensor  # (b,h,i,d)
    mask: Tensor
    inputs: Tensor
    turning: Tensor | None


class Capture:
    """The attention function of a watched model, and the layers recorded so far."""

    def __init__(self, model: nn.Module, *, lazy: bool, feed_forward: bool = False) -> None:
        self.model, self.lazy = model, lazy
        self.around = BlockWatcher(model, feed_forward=feed_forward)
        self.calls = ModuleCalls(model)
        self.layers: list[Layer] = []
        self.implementations: set[str] = set()  # attention implementations that ran
        self._counts: Counter[str] = Counter()
        self._pending: Call | None = None
        self._masks: dict[Any, tuple[Any, Tensor]] = {}  # by id of the original mask, which is kept alive beside them
        self._weights: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}

    @contextmanager
    def watch_pass(self) -> Iterator[dict[str, Tensor]]:
        """Yield the readout, and turn calls of `attend` into layers. Raises ValueError if one has no projection."""
        with ExitStack() as stack:
            stack.enter_context(self.calls.watch_modules())
            for module in self.model.modules():
                if is_linear(module):
                    stack.callback(module.register_forward_hook(self._complete_layer).remove)
            stack.enter_context(self.around.watch())
            yield stack.enter_context(_watch_readout(self.model))
            self._check_projected()

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of the model, with the same numbers as without attnlab, and note the call."""
        self._check_projected()
        module, query, value = call.module, call.query, call.value
        name, kind, seen = self.calls.names[module], self.calls.find_kind(call), self._share_mask(call)
        attended: Tensor | Weigh
        turning = None
        if (mechanism := dispatch.find_mechanism(module)) is not None:
            attended, value, context, turning, mixed = self._attend_adapted(call, mechanism)
        elif self.lazy:
            mixed, attended = self._attend_lazily(call, seen)
            context = mixed
        else:
            is_bool = call.mask is not None and call.mask.dtype == torch.bool
            output, attended = call.run_eager(native.to_additive(seen, query.dtype) if is_bool else call.mask)
            context = mixed = output.transpose(1, 2)
            self.implementations.add("eager")
        inputs = self.calls.find_inputs(module)
        self._pending = Call(kind, name, attended, value, context, mixed, seen, inputs, turning)
        return mixed.transpose(1, 2), attended if isinstance(attended, Tensor) else None

    def _attend_adapted(
        self, call: AttentionCall, mechanism: Mechanism
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Return weights, values, context, turning and the mixed context of an adapted module."""
        ready = dispatch.prepare_call(call, mechanism)
        q, k, v, options = ready.query, ready.key, ready.value, dict(ready.given)
        sides = options.pop("sides", (None, None))
        options |= mechanism.give_sides(sides)
        if mechanism.carry_of == "keys":
            v, carry = mechanism.values(v, options.pop("carry"))
            attended, _ = mechanism.weights(q, k, **options)
            context, _ = mechanism.mix(q, k, v, **options)
        else:
            attended, _ = mechanism.weights(q, k, **options)
            context, carry = mechanism.mix(q, k, v, **options)
        cascade.pass_carry(dispatch.get_place(call.module), carry, call.mask)
        turning = read_turning(mechanism, context, v, options["at"], sides)
        mixed = mechanism.finish(mechanism.turn(context, v, options["at"], sides))
        return attended, v, context, turning, mixed

    def _attend_lazily(self, call: AttentionCall, seen: Tensor) -> tuple[Tensor, Weigh]:
        use_fused = self.model._supports_sdpa and not call.needs_eager()
        context = (call.run_fused() if use_fused else call.run_eager_in_chunks(seen)).transpose(1, 2)  # (b,h,i,d)
        self.implementations.add("sdpa" if use_fused else "eager in row chunks")
        alone = replace(call, module=native.strip_module(call.module), mask=None)

        @torch.no_grad()
        def weigh(start: int, stop: int) -> Tensor:
            weights = alone.attend_rows(seen, start, stop)[1]
            blind = ~seen.expand(-1, -1, alone.query.shape[2], -1)[:, :, start:stop].any(-1, keepdim=True)
            # For a query that sees no key, eager attention spreads the weight over all keys, and torch's fused
            # attention may return a context of 0.
            return weights.masked_fill(blind & (context[:, :, start:stop] == 0).all(-1, keepdim=True), 0.0)

        return context, weigh

    def _share_mask(self, call: AttentionCall) -> Tensor:
        """Return the bool mask of a call. Layers that get the same mask share one tensor."""
        mask = call.mask
        origin = (call.query.shape[2], call.key.shape[2], call.is_causal()) if mask is None else id(mask)
        if origin not in self._masks:
            if mask is None or mask.dtype == torch.bool:
                self._masks[origin] = (mask, call.build_bool_mask())
            else:
                self._masks[origin] = (mask, mask > torch.finfo(mask.dtype).min / 2)
        return self._masks[origin][1]

    def _complete_layer(self, projection: nn.Module, args: tuple, output: Tensor) -> None:
        """Complete the pending layer if this linear map read its context: then the map is W_O."""
        call = self._pending
        if call is None or not args or not isinstance(args[0], Tensor) or args[0].numel() != call.mixed.numel():
            return
        context = call.mixed.transpose(1, 2).flatten(2)  # (b,i,h·d)
        if args[0].shape[-1] != context.shape[-1] or not torch.equal(args[0].reshape(context.shape), context):
            return
        weight, bias = self._output_weight(projection, call.mixed)
        outputs = output.reshape(*context.shape[:2], -1)
        wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        expected = context[:, :CHECKED_POSITIONS].to(wide) @ weight.flatten(0, 1).to(wide)
        expected = expected if bias is None else expected + bias.to(wide)
        error, allowed = measure_difference(expected, outputs[:, :CHECKED_POSITIONS])
        if not error <= allowed:
            where = f"{self.calls.names[projection]} ({type(projection).__name__})"
            raise ValueError(
                f"{call.name} is not supported: {where} reads its context but does not return Σ_h context·W + b "
                f"(difference {error:.2g}, allowed {allowed:.2g})"
            )
        index = self._counts[call.kind]
        self._counts[call.kind] += 1
        self.layers.append(Layer(index=index, output_weight=weight, output_bias=bias, outputs=outputs, **vars(call)))
        self.around.add_attention(self.layers[-1])
        self._pending = None

    def _output_weight(self, projection: nn.Module, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return W_O (h,d,e) and its bias (e,), copied once: later training must not change a Record."""
        if projection not in self._weights:
            heads, bias = (mixed.shape[1], mixed.shape[3]), projection.bias
            weight = weight_matrix(projection).unflatten(0, heads).clone()
            self._weights[projection] = weight, None if bias is None else bias.detach().clone()  # type: ignore[operator]
        return self._weights[projection]

    def _check_projected(self) -> None:
        if self._pending is not None:
            raise ValueError(
                f"{self._pending.name} is not supported: no linear map reads its context directly, perhaps because of "
                "a gate or a norm in between, so there is no output projection to record"
            )


@contextmanager
def _watch_readout(model: Any) -> Iterator[dict[str, Tensor]]:
    """Note the last hidden states while the context is open: the input of the output embedding, if there is one."""
    readout: dict[str, Tensor] = {}
    embedding = model.get_output_embeddings()

    def before(module: nn.Module, args: tuple) -> None:
        readout["hidden"] = args[0]

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if (hidden := getattr(output, "last_hidden_state", None)) is not None:
            readout.setdefault("hidden", hidden)

    if embedding is None:
        handle = model.base_model.register_forward_hook(after)
    else:
        handle = embedding.register_forward_pre_hook(before)
        for name in ("weight", "bias"):
            if isinstance(x := getattr(embedding, name, None), Tensor):
                readout[name] = x.detach().clone()
    try:
        yield readout
    finally:
        handle.remove()
