"""Change the passes of any model, of attnlab or of Hugging Face: `with attnlab.intervene(model, …)`.

A Hugging Face model is switched to an attention function of attnlab while the context is open. Layers that no
intervention names run torch's fused attention. Where weights change, the layer's eager function computes them, and
the context is Σ_j α_ij v_j. A mechanism that `adapt` installed is changed by hooks, as in our models. Layers are those
of a Record, linear attention included.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnlab.huggingface import dispatch, dummy_inputs, layer_inputs, native, support
from attnlab.huggingface.caps_and_sinks import has_sink
from attnlab.huggingface.capture import ModuleCalls
from attnlab.huggingface.native import AttentionCall
from attnlab.huggingface.projections import find_inner, list_projections
from attnlab.mechanisms.mechanism import repeat_heads
from attnlab.models.model import Model
from attnlab.recording.interventions import (
    Intervention,
    PatchHead,
    change_mechanism,
    change_model,
    resolve_interventions,
)
from attnlab.recording.sites import Site, TextProgress, list_sites
from attnlab.recording.watch import is_changed, mark_changed
from attnlab.records.record import KINDS

_sites: WeakKeyDictionary[nn.Module, list[Site]] = WeakKeyDictionary()


@contextmanager
def intervene(model: nn.Module, *interventions: Intervention) -> Iterator[None]:
    """Change the forward passes of a model in evaluation mode while the context is open.

    model           an attnlab model or a loaded Hugging Face model
    interventions   KnockOutHead, KnockOutEdge, KnockOutValue, PatchHead or Steer of attnlab.recording.interventions

    The model is whole again afterwards, also after an error. Our models can be changed in nested contexts; a Hugging
    Face model takes all interventions in one. Raises ValueError for a kind, layer or head that the model does not have;
    for a position, the pass does, or with a cache, which may grow, the end of the context.
    """
    if isinstance(model, str | Path):
        raise TypeError(
            f"intervene needs a loaded model, got {str(model)!r}: load it with transformers' from_pretrained"
        )
    inner = find_inner(model)
    with change_model(inner, interventions) if isinstance(inner, Model) else _change_pretrained(inner, interventions):
        yield


def find_sites(model: nn.Module) -> list[Site]:
    """Return the attention layers of any model. A Hugging Face model runs a few tokens once."""
    inner = find_inner(model)
    if isinstance(inner, Model):
        return list_sites(inner)
    if inner not in _sites:
        import attnlab.huggingface.pretrained  # noqa: F401 (registers the attention functions)

        changed = ChangedPass(inner, ())
        with torch.no_grad(), changed.install():
            dispatch.run_forward(inner, dummy_inputs.build_dummy_batch(inner))
        if not changed.sites:
            raise ValueError(support.explain_refusal(type(inner)))
        _sites[inner] = sorted(changed.sites, key=lambda site: (list(KINDS).index(site.kind), site.layer))
    return _sites[inner]


@contextmanager
def _change_pretrained(model: Any, interventions: Sequence[Intervention]) -> Iterator[None]:
    if any(module.training for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} is in training mode; call model.eval() first")
    support.check_class(type(model))
    if is_changed(model):
        kind = type(model).__name__
        raise ValueError(f"this {kind} is already inside attnlab.intervene: pass all interventions to one call")
    chosen = resolve_interventions(interventions, find_sites(model))
    with ChangedPass(model, chosen).install(), mark_changed(model):
        yield


class ChangedPass:
    """The attention function of a changed model, and the layers that ran in the current pass."""

    def __init__(self, model: Any, chosen: Sequence[Intervention]) -> None:
        self.model, self.chosen = model, chosen
        self.calls = ModuleCalls(model)
        self.sites: list[Site] = []
        self._next: Counter[str] = Counter()  # one more than the number of the last layer of each kind
        self._past: int | Tensor | None = None  # number of tokens in the cache before this pass; None: no cache
        self._progress = TextProgress()
        self._awaited: tuple[Site, Tensor] | None = None  # the layer whose output projection comes next, its context
        self._attending: nn.Module | None = None  # the module of that layer, unless it is patched
        self._projected: Tensor | None = None  # what the last linear map returned that did not read this context

    @contextmanager
    def install(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(dispatch.switch_attention(self.model, dispatch.WATCHED_BOOL, self.attend, linear=True))
            stack.enter_context(self.calls.watch_modules())
            for whole in {self.model, self.model.base_model}:
                stack.callback(whole.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                stack.callback(whole.register_forward_hook(self._check_projected).remove)
            if self.model.config.is_encoder_decoder:  # `generate` calls the encoder alone
                encoder = self.model.get_encoder()
                stack.callback(encoder.register_forward_pre_hook(self._begin_encoder).remove)
            if any(isinstance(each, PatchHead) or each.changes_outputs for each in self.chosen):
                for projection in list_projections(self.model):
                    stack.callback(projection.register_forward_hook(self._change_outputs).remove)
                for module in self.calls.names:
                    if next(module.children(), None) is not None:
                        stack.callback(module.register_forward_hook(self._leave_module).remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # hooks on compiled code never fire
            yield
            self._progress.check_reached()

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        """Compute the context (b,i,h,d) of one layer with its interventions."""
        self._check_projected()
        kind, mechanism = self.calls.find_kind(call), dispatch.find_mechanism(call.module)
        part = "context" if mechanism is None else "mixed"
        number = self.calls.number_layer(self._next[kind])
        site = self._locate(Site(kind, number, call.query.shape[1], part), call)
        self._next[kind] = number + 1
        chosen = [each for each in self.chosen if each.applies_to(site)]
        if mechanism is not None:
            located = change_mechanism(chosen, lambda _: site)
            with mechanism.register_forward_hook(located, with_kwargs=True):
                query, key, value, mask = call.query, call.key, call.value, call.mask
                mixed = dispatch.attend(call.module, query, key, value, mask, **call.options)[0]
        else:
            mixed = self._attend_changed(call, chosen, site).transpose(1, 2).contiguous()
        site = replace(site, heads=mixed.shape[2])
        if site not in self.sites:
            self.sites.append(site)
        is_patched = mechanism is not None and any(isinstance(each, PatchHead) for each in chosen)
        if is_patched or any(each.changes_outputs for each in chosen):
            self._awaited, self._projected = (site, mixed.flatten(2)), None
            self._attending = None if is_patched else call.module
        return mixed, None

    def _attend_changed(self, call: AttentionCall, chosen: Sequence[Intervention], site: Site) -> Tensor:
        """Return the mixed context (b,h,i,d) of a module with its own attention."""
        seen = call.build_bool_mask()
        if any(each.needs_weights for each in chosen):
            mask = native.to_additive(seen.expand(-1, -1, call.query.shape[2], -1), call.query.dtype)
            weights = call.run_eager(mask)[1]
            if site.sinks:  # it has the rest of each row, and its value is 0
                weights = torch.cat([1 - weights.sum(-1, keepdim=True), weights], dim=-1)
            for each in chosen:
                weights = each.change_weights(weights, site)
            mixed = weights[..., site.sinks :].to(call.value.dtype) @ repeat_heads(call.value, weights.shape[1])
        elif call.needs_eager() or not self.model._supports_sdpa:
            mixed = call.run_eager_in_chunks(seen).transpose(1, 2)
        else:
            mixed = call.run_fused().transpose(1, 2)
        for each in chosen:
            mixed = each.change_mixed(mixed, site)
        return mixed

    def _locate(self, site: Site, call: AttentionCall) -> Site:
        """Return the site with the place of this pass in its text. A sliding cache has only the last keys."""
        site = replace(site, sinks=int(has_sink(call)))
        if self._past is None or site.kind == "encoder-self":
            return site
        end = self._past + call.query.shape[2]
        first = 0 if site.kind == "cross" else max(0, int(end) - call.key.shape[2])
        return replace(site, end=end, first_key=first, later=self._progress.later)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._next.clear()
        self._awaited = None
        cache = layer_inputs.find_cache(layer_inputs.bind_arguments(model, args, named))
        self._past = None if cache is None else cache.get_seq_length()

    def _begin_encoder(self, *_: Any) -> None:
        self._next["encoder-self"] = 0

    def _change_outputs(self, _projection: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        """Change the output of the linear map that reads the context just returned: it is the output projection."""
        if self._awaited is None or not args or not isinstance(args[0], Tensor):
            return None
        site, context = self._awaited
        if args[0].numel() != context.numel() or not torch.equal(args[0].reshape(context.shape), context):
            self._projected = output
            return None
        return self._change(output, site, context)

    def _leave_module(self, module: nn.Module, _args: tuple, output: Any) -> Any:
        """Change the output of an attention module whose output projection read its context through a gate or norm."""
        if self._awaited is None or module is not self._attending or self._projected is None:
            return None
        first = output[0] if isinstance(output, tuple) else output
        if first.shape != self._projected.shape or not torch.equal(first, self._projected):
            return None
        changed = self._change(first, *self._awaited)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def _change(self, output: Tensor, site: Site, context: Tensor) -> Tensor:
        self._awaited = None
        outputs = output.reshape(*context.shape[:2], -1)
        for each in self.chosen:
            if each.applies_to(site):
                outputs = each.change_outputs(outputs, site)
        return outputs.reshape(output.shape)

    def _check_projected(self, *_: Any) -> None:
        """Raise ValueError if no linear map read the context of a layer to steer, or of an adapted one to patch."""
        if self._awaited is not None:
            site = self._awaited[0]
            raise ValueError(
                f"{type(self.model).__name__}: a gate or norm comes between the context of {site.kind} layer "
                f"{site.layer} and its output projection, so the layer cannot be steered or, if adapted, patched"
            )
