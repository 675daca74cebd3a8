"""Interventions: changes of a forward pass in chosen attention layers, and the hooks that make them in our models.

In one attention layer

    context_i = Σ_j α_ij v_j        mixed = finish(turn(context))        output_i = Σ_h mixed_hi W_h + b

    KnockOutHead    mixed_h ← 0: the head's part of the output is missing (Michel et al. 2019)
    KnockOutEdge    α_ij ← 0: query i reads nothing from key j; with renormalize=True the other weights of the row grow
                    so that its sum stays, which is softmax with key j masked (Geva et al. 2023)
    KnockOutValue   v_j ← 0 in that sum: no query reads token j, and no weight changes (Mohebbi et al. 2023)
    PatchHead       mixed_hi ← that of a Record, the pass on another text (Vig et al. 2020)
    Steer           output_i ← output_i + scale · vector

A gate or norm of a Hugging Face model comes after mixed. PatchHead then patches the context before it, and the gate
stays that of the changed pass. A head that is knocked out still computes its weights, so a carry to the next layer
(CODA's and RealFormer's logits) does not change. Positions count from 0 in the whole text, padding and tokens in a
cache included. While a cache grows, a position may be that of a token that comes later.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnlab.config import write_ranges
from attnlab.mechanisms.mechanism import Mechanism, repeat_heads
from attnlab.models.attention import Attention
from attnlab.models.blocks import Stack
from attnlab.models.lstm import StateAttention
from attnlab.recording.probe import require_eval_model
from attnlab.recording.sites import Site, TextProgress, list_sites
from attnlab.recording.turning import read_turning
from attnlab.recording.watch import mark_changed
from attnlab.records.record import Record, apply_turning

Positions = int | Tensor  # one position of all examples, or one for each, (b,)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, kw_only=True, eq=False)
class Intervention:
    """One change of the layers that it names: the base class of those below.

    layer   index within the kind; None: every layer
    head    None: every head
    kind    encoder-self, decoder-self or cross; None: the only kind of the model
    """

    layer: int | None = None
    head: int | None = None
    kind: str | None = None
    needs_weights: ClassVar[bool] = False  # fused attention must then be computed by its definition

    def __post_init__(self) -> None:
        for name, value in (("layer", self.layer), ("head", self.head)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise self.fail(f"{name} must be an integer or None, got {value!r}")

    def applies_to(self, site: Site) -> bool:
        return site.kind == self.kind and self.layer in (None, site.layer)

    def change_weights(self, weights: Tensor, site: Site) -> Tensor:
        """Change α, (b,h,i,j), of which the first site.sinks keys are no tokens."""
        return weights

    def change_mixed(self, mixed: Tensor, site: Site) -> Tensor:
        """Change the context of each head before the output projection, (b,h,i,d)."""
        return mixed

    def change_outputs(self, outputs: Tensor, site: Site) -> Tensor:
        """Change the output of the layer, (b,i,e)."""
        return outputs

    @property
    def changes_outputs(self) -> bool:
        """Whether it changes outputs, also if its class is the user's."""
        return type(self).change_outputs is not Intervention.change_outputs

    def mark_heads(self, like: Tensor) -> Tensor:
        """Return a bool mask (h,1,1) of the heads that change, of weights or contexts (b,h,·,·)."""
        heads = torch.arange(like.shape[1], device=like.device)
        marked = torch.ones_like(heads, dtype=torch.bool) if self.head is None else heads == self.head
        return marked[:, None, None]

    def fail(self, problem: str) -> ValueError:
        return ValueError(f"{type(self).__name__}: {problem}")

    def mark_queries(self, positions: Positions | None, site: Site, count: int, like: Tensor) -> Tensor:
        """Return a bool mask (b,i) or (1,i) of positions among the queries of a pass, as `mark_positions` does."""
        return self.mark_positions(positions, "query", site.place_queries, site, count, like)

    def mark_keys(self, positions: Positions | None, name: str, site: Site, count: int, like: Tensor) -> Tensor:
        """Return a bool mask (b,j) or (1,j) of positions among the keys of a pass, as `mark_positions` does."""
        return self.mark_positions(positions, name, site.place_keys, site, count, like)

    def mark_positions(
        self, positions: Positions | None, name: str, place: Callable[[int], Tensor], site: Site, count: int,
        like: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return which of `count` queries or keys have these positions. Raises ValueError for those of no token.

        In a text that is not complete, the error of a position that has not come yet is kept in site.later.
        """
        if positions is None:
            return torch.ones(1, count, dtype=torch.bool, device=like.device)
        is_one = isinstance(positions, Integral) and not isinstance(positions, bool)
        is_each = isinstance(positions, Tensor) and positions.dtype in INTEGERS and positions.numel() == len(like)
        if not is_one and not is_each:
            raise self.fail(
                f"{name} must be an integer, or a tensor with one for each of {len(like)} examples, got {positions!r}"
            )
        chosen, places = torch.as_tensor(positions, device=like.device).reshape(-1, 1), place(count)
        last = int(places[-1])
        if wrong := [int(x) for x in chosen.flatten() if not 0 <= x <= last]:
            counted = f"the text has {last + 1} tokens, numbered 0 … {last}, padding included"
            error = self.fail(f"{name} {wrong[0]} is out of range: {counted}")
            if site.later is None or min(wrong) < 0:
                raise error
            site.later[self, name] = error
        elif site.later is not None:
            site.later.pop((self, name), None)
        return chosen == places.to(like.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnockOutHead(Intervention):
    """Set the mixed context of a head to 0; without `head`, that of the whole layer."""

    def change_mixed(self, mixed: Tensor, site: Site) -> Tensor:
        return mixed.masked_fill(self.mark_heads(mixed), 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnockOutEdge(Intervention):
    """Set the weight of one query on one key to 0.

    renormalize   scale the other weights of the row so that its sum stays
    """

    query: Positions | None  # None: every query
    key: Positions | None
    renormalize: bool = False
    needs_weights: ClassVar[bool] = True

    def change_weights(self, weights: Tensor, site: Site) -> Tensor:
        queries = self.mark_queries(self.query, site, weights.shape[2], weights)
        keys = self.mark_keys(self.key, "key", site, weights.shape[3], weights)
        edges = queries[:, None, :, None] & keys[:, None, None, :]  # (b,1,i,j)
        changed = weights.masked_fill(edges & self.mark_heads(weights), 0.0)
        if not self.renormalize:
            return changed
        rest = changed.sum(-1, keepdim=True)
        return changed * (weights.sum(-1, keepdim=True) / rest.masked_fill(rest == 0, 1.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class KnockOutValue(Intervention):
    """Set the value of one token to 0 in the sum over keys. No weight changes."""

    token: Positions | None  # None: every token
    needs_weights: ClassVar[bool] = True

    def change_weights(self, weights: Tensor, site: Site) -> Tensor:
        keys = self.mark_keys(self.token, "token", site, weights.shape[3], weights)[:, None, None, :]
        return weights.masked_fill(keys & self.mark_heads(weights), 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchHead(Intervention):
    """Replace the mixed context of a head, at all queries or one, by that of a Record of the same model.

    record   of one example for all, or of as many examples as the pass has, and of the same length. With a cache that
             grows, it may be longer, and tokens after its last one are not changed
    query    None: every query
    """

    record: Record
    query: Positions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.record, Record):
            raise TypeError(f"PatchHead: record must be a Record, as of attnlab.record, got {self.record!r}")

    def change_mixed(self, mixed: Tensor, site: Site) -> Tensor:
        places = self.record.places
        if (site.kind, site.layer) not in places:
            raise self.fail(f"the record has no {site.kind} layer {site.layer}, which is patched")
        other = getattr(self.record.layers[places.index((site.kind, site.layer))], site.part).to(mixed)  # (b,h,n,d)
        count, rows = other.shape[2], site.place_queries(mixed.shape[2]).to(mixed.device)
        fits = count == len(rows) if site.end is None else count >= int(site.end) or int(rows[0]) > 0
        if not fits or other.shape[1::2] != mixed.shape[1::2] or len(other) not in (1, len(mixed)):
            shapes = f"{tuple(other.shape)}, and this pass {tuple(mixed.shape)}"
            raise self.fail(f"the record has contexts (examples, heads, queries, size) {shapes}: use texts as long")
        marked = self.mark_queries(self.query, site, len(rows), mixed) & (rows < count)  # (b,i)
        other = other.index_select(2, rows.clamp(0, count - 1))
        return torch.where(marked[:, None, :, None] & self.mark_heads(mixed), other, mixed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Steer(Intervention):
    """Add scale · vector (e,) to the output of a layer, at all queries or one."""

    vector: Tensor
    scale: float = 1.0
    query: Positions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None:
            raise self.fail("head= has no meaning: the vector is added to the output of all heads together")
        if not isinstance(self.vector, Tensor) or not bool(self.vector.isfinite().all()):
            raise self.fail("vector must be a tensor of finite numbers")
        if not isinstance(self.scale, int | float) or not math.isfinite(self.scale):
            raise self.fail(f"scale must be a finite number, got {self.scale!r}")

    def change_outputs(self, outputs: Tensor, site: Site) -> Tensor:
        if self.vector.shape != outputs.shape[-1:]:
            raise self.fail(f"vector must have the shape ({outputs.shape[-1]},), got {tuple(self.vector.shape)}")
        marked = self.mark_queries(self.query, site, outputs.shape[1], outputs)
        return outputs + marked.unsqueeze(-1) * (self.scale * self.vector.to(outputs))


@dataclass(frozen=True, kw_only=True, eq=False)
class FreezeWeights(Intervention):
    """Keep all numbers, and change the gradients of α and of the turning: `recording.freezing` says what for.

    shared   False: they are constant, so the layer is linear in its values. True: each factor of the products q·k, α·v
             and of a turning gets half
    """

    shared: bool = False
    needs_weights: ClassVar[bool] = True

    def change_weights(self, weights: Tensor, site: Site) -> Tensor:
        return halve_gradient(weights) if self.shared else weights.detach()

    def change_mixed(self, mixed: Tensor, site: Site) -> Tensor:
        return halve_gradient(mixed) if self.shared else mixed

    def turn(self, turning: Tensor | None, context: Tensor) -> Tensor:
        if turning is None:
            return context
        return apply_turning(*((turning, halve_gradient(context)) if self.shared else (turning.detach(), context)))


def halve_gradient(x: Tensor) -> Tensor:
    """Return x, with half of its gradient."""
    return x / 2 + x.detach() / 2


def resolve_interventions(interventions: Sequence[Any], sites: Sequence[Site]) -> list[Intervention]:
    """Return the interventions with their kinds. Raises an error for an unknown kind, layer or head."""
    if not interventions:
        raise ValueError("intervene needs an intervention, such as KnockOutHead(layer=0, head=1)")
    return [_resolve(each, sites) for each in interventions]


def _resolve(each: Any, sites: Sequence[Site]) -> Intervention:
    if not isinstance(each, Intervention):
        known = ", ".join(kind.__name__ for kind in Intervention.__subclasses__() if kind is not FreezeWeights)
        raise TypeError(f"an intervention must be one of {known}, got {each!r}")
    kinds = list(dict.fromkeys(site.kind for site in sites))
    kind = kinds[0] if each.kind is None and len(kinds) == 1 else each.kind
    if kind not in kinds:
        *others, last = map(repr, kinds)
        choices = f"{', '.join(others)} or {last}" if others else last
        has = f"{len(kinds)} kinds of attention" if each.kind is None else f"no {each.kind!r} attention"
        raise each.fail(f"this model has {has}: pass kind={choices}")
    ours = [site for site in sites if site.kind == kind]
    if each.layer is not None:
        ours = [site for site in ours if site.layer == each.layer]
        if not ours:
            known = ", ".join(write_ranges([site.layer for site in sites if site.kind == kind]))
            raise each.fail(f"there is no layer {each.layer}; the {kind} layers are {known}")
    if each.head is not None:
        for site in ours:
            if not 0 <= each.head < site.heads:
                where = f"{kind} layer {site.layer}"
                raise each.fail(f"there is no head {each.head}; the heads of {where} are 0 … {site.heads - 1}")
    return replace(each, kind=kind)


@contextmanager
def change_model(model: nn.Module, interventions: Sequence[Intervention]) -> Iterator[None]:
    """Change every pass of our model while the context is open. Afterwards, also after an error, no hook stays."""
    inner = require_eval_model(model)
    chosen, progress = resolve_interventions(interventions, list_sites(inner)), TextProgress()
    with ExitStack() as stack:
        for module in inner.modules():
            if isinstance(module, Stack | StateAttention):
                stack.enter_context(module.register_forward_pre_hook(progress.begin_pass, with_kwargs=True))
            if isinstance(module, Attention):
                site = Site(module.kind, module.index, module.mechanism.heads)
                if own := [each for each in chosen if each.applies_to(site)]:
                    hook = change_mechanism(own, partial(progress.locate, site))
                    stack.enter_context(module.mechanism.register_forward_hook(hook, with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(_change_attention(own, site, progress)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # hooks on compiled code never fire
        stack.enter_context(mark_changed(inner))
        yield
        progress.check_reached()


def change_mechanism(
    chosen: Sequence[Intervention], locate: Callable[[Mechanism], Site]
) -> Callable[..., tuple[Tensor, Any]]:
    """Return a forward hook of a mechanism that changes its weights, then its mixed context."""

    def hook(mechanism: Any, args: Any, named: dict[str, Any], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        mixed, site = output[0], locate(mechanism)
        if any(each.needs_weights for each in chosen):
            mixed = _mix_changed(mechanism, chosen, site, *args, **named)
        for each in chosen:
            mixed = each.change_mixed(mixed, site)
        return mixed, output[1]

    return hook


def _mix_changed(
    mechanism: Mechanism, chosen: Sequence[Intervention], site: Site, q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None = None, carry: Tensor | None = None, *, sides: Any = (None, None), **options: Any,
) -> Tensor:  # fmt: skip
    """Return the mixed context (b,h,i,d) with changed weights."""
    v, carry, _ = mechanism.take_values(v, carry)
    weights = mechanism.weights(q, k, mask, carry, **options, **mechanism.give_sides(sides))[0]
    for each in chosen:
        weights = each.change_weights(weights, site)
    context = weights @ repeat_heads(v, weights.shape[1])
    at = options.get("at")
    frozen = next((each for each in chosen if isinstance(each, FreezeWeights)), None)
    if frozen is None:
        return mechanism.complete(context, v, at, sides)
    return mechanism.finish(frozen.turn(read_turning(mechanism, context, v, at, sides), context))


def _change_attention(
    chosen: Sequence[Intervention], site: Site, progress: TextProgress
) -> Callable[..., tuple[Tensor, Any]]:
    def hook(attention: nn.Module, args: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        outputs, carry = output
        for each in chosen:
            outputs = each.change_outputs(outputs, replace(site, **progress.known))
        return outputs, carry

    return hook
