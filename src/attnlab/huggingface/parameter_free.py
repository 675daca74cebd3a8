"""Attention functions that transformers calls by name: attn_implementation="attnlab-sigmoid".

They compute mechanisms without parameters from the queries, keys and values of a model.
The weights are those of the definition. Nothing here imports transformers.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import dispatch
from attnlab.huggingface.caps_and_sinks import add_cap_and_sink, has_sink
from attnlab.huggingface.native import AttentionCall
from attnlab.mechanisms import Mechanism, attention

Function = Callable[..., tuple[Tensor, Tensor | None]]
_BUILT: dict[str, Mechanism] = {}  # by name, sizes, scale, dropout and device


def make_function(name: str) -> Function:
    """Return the attention function of a mechanism: (b,h,i,d), (b,g,j,d), (b,g,j,d) -> (b,i,h,d), weights or None."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        call = AttentionCall(module, query, key, value, attention_mask, options)
        if has_sink(call):
            what = f"{type(module).__name__} has attention sinks"
            raise ValueError(
                f"{what}, which attn_implementation='attnlab-{name}' would drop: use attnlab.adapt(model, …)"
            )
        given = dispatch.read_mask_and_bias(type(module).__name__, call)
        add_cap_and_sink(call, given)
        dropout = float(options.get("dropout") or 0.0) if module.training else 0.0
        _, heads, _, head_dim = query.shape
        scale = options.get("scaling")
        mechanism = find_mechanism(
            name, heads, head_dim, None if scale is None else float(scale), dropout, query.device
        )
        given["at"] = find_positions(name, mechanism, call)
        mixed, _ = mechanism(query, key, value, **given)
        weights = mechanism.weights(query, key, **given)[0] if wants_weights(options) else None
        return mixed.transpose(1, 2).contiguous(), weights

    return attend


def find_mechanism(
    name: str, heads: int, head_dim: int, scale: float | None, dropout: float, device: torch.device
) -> Mechanism:
    """Return the mechanism of these sizes, the same one each time."""
    key = f"{name} {heads} {head_dim} {scale} {dropout} {device}"
    build(key, name, heads, head_dim, scale, dropout, str(device))
    return _BUILT[key]


def build(key: str, name: str, heads: int, head_dim: int, scale: float | None, dropout: float, device: str) -> None:
    """Build a mechanism, if that has not happened yet. It follows a scale of the model other than 1/√d."""
    if key not in _BUILT:
        mechanism = attention(name, heads=heads, head_dim=head_dim, dropout=dropout)
        if scale is not None:
            mechanism.scale *= scale / head_dim**-0.5
        _BUILT[key] = mechanism.to(device).train(dropout > 0)


build._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it before it reads _BUILT


def find_positions(name: str, mechanism: Mechanism, call: AttentionCall) -> Tensor | None:
    """Return the key index of each query where the mechanism reads it. None: they are the last keys."""
    if not mechanism.positional and not mechanism.self_only:
        return None
    if call.has_causal_module():
        return call.find_positions()
    if call.query.shape[2] != call.key.shape[2]:
        what = f"{name} is self-attention, but {type(call.module).__name__} reads another sequence"
        raise ValueError(f"{what}: use attnlab.adapt(model, {name!r}, kinds=…) without the cross attention")
    return None


def wants_weights(options: dict[str, Any]) -> bool:
    """Return whether the caller asked for attentions: by the option, or by transformers' collector of outputs."""
    if options.get("output_attentions"):
        return True
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    collected = None if collector is None else collector.get()
    return any("attentions" in key for key in collected or ())
