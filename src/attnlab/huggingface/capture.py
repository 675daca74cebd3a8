"""Watch a Hugging Face model from outside: every attention call of one forward pass becomes a Layer of a Record.

    kind            cross if the module reads another sequence's states; else self-attention of the encoder or decoder
    output_weight   W_O is the first linear map whose input equals the context just returned. The map must return
                    Σ_h mixed_h · W_h + b. No table of module names is needed.
    turning         a gate or a norm between context and W_O, found by running the module again (turned_context.py)
    lazy            the pass runs on torch's fused attention; weights are computed from q, k, v only when they are read

Nothing here imports transformers.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.config import write_ranges
from attnlab.huggingface import carries as cascade
from attnlab.huggingface import dispatch, inputs, layer_inputs, native, support
from attnlab.huggingface.caps_and_sinks import has_sink
from attnlab.huggingface.native import AttentionCall
from attnlab.huggingface.projections import describe_projection, find_tolerance, list_projections, read_projection
from attnlab.huggingface.turned_context import read_turned_context
from attnlab.mechanisms import Mechanism
from attnlab.recording.around import BlockWatcher
from attnlab.recording.turning import read_turning
from attnlab.records.record import Layer, Record
from attnlab.records.tolerance import CHECKED_POSITIONS, TOLERANCE, measure_difference
from attnlab.records.visibility import CausalMask, SoftmaxScores, Weigh


def record_pass(
    model: Any, batch: Mapping[str, Tensor], *, tokenizer: Any = None, lazy: bool = False, feed_forward: bool = False
) -> tuple[Record, Tensor]:
    """Return the Record of one forward pass of a Hugging Face model, and the first output of that pass."""
    adaptation = dispatch.find_adaptation(model)
    capture = Capture(model, lazy=lazy, feed_forward=feed_forward)
    masks_as = dispatch.WATCHED if adaptation is None and not lazy else dispatch.WATCHED_BOOL
    switched = dispatch.switch_attention(model, masks_as, capture.attend, linear=True)
    with switched, capture.watch_pass() as readout:
        output = dispatch.run_forward(model, batch)[0]
    if not capture.layers:
        raise ValueError(support.explain_refusal(type(model)))
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
    meta |= capture.describe_projections() | describe_unrecorded(model, [layer.index for layer in capture.layers])
    return Record(capture.around.describe_layers(capture.layers), tokens, masks, words, readout, meta), output


def describe_unrecorded(model: Any, recorded: Collection[int]) -> dict[str, str]:
    """Return the entries of the Record's meta that say which parts of a model are not recorded.

    recorded   numbers of the recorded layers
    """
    torchs = [name for name, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)]  # as in SigLIP
    notes = [f"{name} (torch.nn.MultiheadAttention)" for name in torchs]
    blocks, named = set(find_blocks(model).values()), {}
    if missing := sorted(blocks - set(recorded)):
        types = getattr(model.config.get_text_config(), "layer_types", None) or ()
        kinds = sorted({types[number] for number in missing}) if len(types) == len(blocks) else ["no attention"]
        which = f"{len(missing)} of {len(blocks)} layers ({', '.join(kinds)})"
        named = {"missing_layers": ", ".join(write_ranges(missing))}
        notes.append(f"{which}: {named['missing_layers']}")
    return {"unrecorded": "; ".join(notes)} | named if notes else {}


class ModuleCalls:
    """The arguments of every module that is running; they tell the kind of an attention call."""

    def __init__(self, model: Any) -> None:
        self.names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self.encoder = set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()
        self.blocks = find_blocks(model)
        self.arguments: dict[nn.Module, dict[str, Any]] = {}
        self.given: dict[nn.Module, tuple[tuple, dict[str, Any]]] = {}  # the same, as they were passed

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

    def number_layer(self, least: int) -> int:
        """Return the index of the attention that is running: the model's own number, or `least` if that is larger.

        least   one more than the index of the last layer of its kind
        """
        return max(least, next((self.blocks[module] for module in self.arguments if module in self.blocks), 0))

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
        return self.arguments[module].get("position_embeddings") is not None or hasattr(module, "rotary_dim")

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.arguments[module] = layer_inputs.bind_arguments(module, args, kwargs)
        self.given[module] = args, kwargs

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self.arguments.pop(module, None)
        self.given.pop(module, None)


def find_blocks(model: Any) -> dict[nn.Module, int]:
    """Return the number of each block of a model, among all its blocks: some may have no attention."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    return {block: number for blocks in lists for number, block in enumerate(blocks)}


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call whose output projection has not run yet."""

    kind: str
    name: str
    attended: Tensor | Weigh
    grouped_values: Tensor
    context: Tensor  # (b,h,i,d)
    mixed: Tensor  # (b,h,i,d)
    mask: Tensor | CausalMask
    inputs: Tensor
    turning: Tensor | None
    index: int


class Capture:
    """The attention function of a watched model, and the layers recorded so far."""

    def __init__(self, model: nn.Module, *, lazy: bool, feed_forward: bool = False) -> None:
        self.model, self.lazy = model, lazy
        self.around = BlockWatcher(model, feed_forward=feed_forward)
        self.calls = ModuleCalls(model)
        self.layers: list[Layer] = []
        self.implementations: set[str] = set()  # attention implementations that ran
        self._next: Counter[str] = Counter()  # one more than the index of the last layer of each kind
        self._pending: Call | None = None
        self._attending: nn.Module | None = None  # the module of the pending call
        self._may_turn = False  # a linear map read something else of the context's size
        self._rounding = 0.0  # largest difference of a quantised output projection from a linear map
        self._masks: dict[Any, tuple[Any, Tensor | CausalMask]] = {}  # by id of the mask, kept alive beside
        self._weights: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}

    @contextmanager
    def watch_pass(self) -> Iterator[dict[str, Tensor]]:
        """Yield the readout, and turn calls of `attend` into layers. Raises ValueError if one has no projection."""
        with self.watch_layers(), self.around.watch(), _watch_readout(self.model) as readout:
            yield readout

    @contextmanager
    def watch_layers(self) -> Iterator[None]:
        """Turn calls of `attend` into layers, each when its output projection runs."""
        with ExitStack() as stack:
            for module in self.calls.names:
                if next(module.children(), None) is not None:
                    stack.callback(module.register_forward_hook(self._leave_module).remove)
            stack.enter_context(self.calls.watch_modules())
            for projection in list_projections(self.model):
                stack.callback(projection.register_forward_hook(self._complete_layer).remove)
            yield
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
            given = call.mask
            if isinstance(seen, Tensor) and given is not None and given.dtype == torch.bool:
                given = native.to_additive(seen, query.dtype)
            output, attended = call.run_eager(given)
            context = mixed = output.transpose(1, 2)
            self.implementations.add("eager")
        inputs = self.calls.find_inputs(module)
        index = self.calls.number_layer(self._next[kind])
        self._pending = Call(kind, name, attended, value, context, mixed, seen, inputs, turning, index)
        self._attending, self._may_turn = module, False
        return mixed.transpose(1, 2), attended if isinstance(attended, Tensor) else None

    def _attend_adapted(
        self, call: AttentionCall, mechanism: Mechanism
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Return weights, values, context, turning and the mixed context of an adapted module."""
        ready = dispatch.prepare_call(call, mechanism)
        q, k, v, options = ready.query, ready.key, ready.value, dict(ready.given)
        sides = options.pop("sides", (None, None))
        options |= mechanism.give_sides(sides)
        v, options["carry"], carried = mechanism.take_values(v, options.get("carry"))
        attended, _ = mechanism.weights(q, k, **options)
        context, carry = mechanism.mix(q, k, v, **options)
        carry = carry if carried is None else carried
        cascade.pass_carry(dispatch.get_place(call.module), carry, call.mask)
        turning = read_turning(mechanism, context, v, options["at"], sides)
        mixed = mechanism.complete(context, v, options["at"], sides)
        if has_sink(call):  # it comes before the keys, and its value is 0
            attended, v = attended[..., 1:], v[:, :, 1:]
        return attended, v, context, turning, mixed

    def _attend_lazily(self, call: AttentionCall, seen: Tensor | CausalMask) -> tuple[Tensor, Weigh]:
        use_fused = (self.model._supports_sdpa or call.find_reader() is not None) and not call.needs_eager()
        logsumexp = None
        if use_fused:
            output, logsumexp = self.run_fused(call)
        else:
            output = call.run_eager_in_chunks(seen)
        context = output.transpose(1, 2)  # (b,h,i,d)
        self.implementations.add("sdpa" if use_fused else "eager in row chunks")
        alone = replace(call, module=native.strip_module(call.module), mask=None)

        @torch.no_grad()
        def weigh(start: int, stop: int) -> Tensor:
            weights = alone.attend_rows(seen, start, stop)[1]
            if isinstance(seen, CausalMask):
                return weights
            blind = ~seen.expand(-1, -1, alone.query.shape[2], -1)[:, :, start:stop].any(-1, keepdim=True)
            # For a query that sees no key, eager attention spreads the weight over all keys, and torch's fused
            # attention may return a context of 0.
            return weights.masked_fill(blind & (context[:, :, start:stop] == 0).all(-1, keepdim=True), 0.0)

        if not call.is_plain_softmax():
            return context, weigh
        query, key = call.query.detach(), call.key.detach()
        return context, SoftmaxScores(weigh, query, key, call.find_scale(), call.is_causal(), logsumexp)

    def run_fused(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute the context (b,i,h,d), and the logsumexp of each row if the function returns it."""
        return call.run_fused(), None

    def _share_mask(self, call: AttentionCall) -> Tensor | CausalMask:
        """Return the bool mask of a call. Layers that get the same mask share one tensor."""
        mask = call.mask
        origin = (call.query.shape[2], call.key.shape[2], call.is_causal()) if mask is None else id(mask)
        if origin not in self._masks:
            if mask is None or mask.dtype == torch.bool:
                self._masks[origin] = (mask, call.find_visible())
            else:
                self._masks[origin] = (mask, mask > torch.finfo(mask.dtype).min / 2)
        return self._masks[origin][1]

    def _complete_layer(self, projection: nn.Module, args: tuple, output: Tensor) -> None:
        """Complete the pending layer if this linear map read its context: then the map is W_O."""
        call = self._pending
        if call is None or not args or not isinstance(args[0], Tensor) or args[0].numel() != call.mixed.numel():
            return
        context = call.mixed.transpose(1, 2).flatten(2)  # (b,i,h·d)
        if args[0].shape[-1] != context.shape[-1]:
            return
        if not torch.equal(args[0].reshape(context.shape), context):
            self._may_turn = True
            return
        self._add_layer(call, projection, output, *self._output_weight(projection, call.mixed))

    def _leave_module(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Complete the pending layer of an attention module that turns its context before its output projection."""
        call = self._pending
        if call is None or module is not self._attending or not self._may_turn:
            return
        args, named = self.calls.given[module]

        def rerun(context: Tensor, begin: Callable[[], None]) -> None:
            with dispatch.replace_context(context, begin):
                module.forward(*args, **named)

        self._pending = None  # the hooks on linear maps do not see the further passes
        try:
            turned = read_turned_context(module, call.mixed, rerun)
        except ValueError as error:
            raise ValueError(f"{call.name} is not supported: {error}") from None
        if turned is None:
            self._pending = call
            return
        own, factor = call.turning, turned.factor
        if own is not None:  # of a mechanism, which comes before the model's
            factor = own * (factor.unsqueeze(-2) if own.dim() == 5 else factor)
        call = replace(call, mixed=turned.factor * call.mixed, turning=factor)
        weight, bias = self._output_weight(turned.projection, call.mixed)
        if turned.offset is not None:
            added = turned.offset.to(weight.dtype) @ weight.flatten(0, 1)
            bias = added if bias is None else bias + added
        self._add_layer(call, turned.projection, turned.outputs, weight, bias)

    def _add_layer(
        self, call: Call, projection: nn.Module, output: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        """Add the layer of a call whose output projection returned this. Raises ValueError if it is no linear map."""
        context = call.mixed.transpose(1, 2).flatten(2)  # (b,i,h·d)
        outputs = output.reshape(*context.shape[:2], -1)
        wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        expected = context[:, :CHECKED_POSITIONS].to(wide) @ weight.flatten(0, 1).to(wide)
        expected = expected if bias is None else expected + bias.to(wide)
        error, allowed = measure_difference(expected, outputs[:, :CHECKED_POSITIONS])
        if error > allowed:
            self._rounding = max(self._rounding, error)
            allowed *= find_tolerance(projection, outputs.dtype) / TOLERANCE[outputs.dtype]
        if not error <= allowed:
            where = f"{self.calls.names[projection]} ({type(projection).__name__})"
            raise ValueError(
                f"{call.name} is not supported: {where} reads its context but does not return Σ_h context·W + b "
                f"(difference {error:.2g}, allowed {allowed:.2g})"
            )
        self._next[call.kind] = call.index + 1
        self._pending = None
        self.keep_layer(Layer(output_weight=weight, output_bias=bias, outputs=outputs, **vars(call)))

    def keep_layer(self, layer: Layer) -> None:
        """Keep a layer that is complete."""
        self.layers.append(layer)
        self.around.add_attention(layer)

    def _output_weight(self, projection: nn.Module, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return W_O (h,d,e) and its bias (e,), copied once: later training must not change a Record."""
        if projection not in self._weights:
            weight, bias = read_projection(projection, mixed.transpose(1, 2).flatten(2))
            self._weights[projection] = weight.unflatten(0, (mixed.shape[1], mixed.shape[3])), bias
        return self._weights[projection]

    def describe_projections(self) -> dict[str, str]:
        """Return the entry of the Record's meta that says how output projections were read that are not plain."""
        notes = {note for projection in self._weights if (note := describe_projection(projection))}
        if self._rounding:
            notes.add(f"by rounding, its outputs differ from this matrix by up to {self._rounding:.2g}")
        return {"output_projection": "; ".join(sorted(notes))} if notes else {}

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
