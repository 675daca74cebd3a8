"""The proof that a record shows what the model does: compare it with the model's own eager attention, or refuse.

A watched pass repeats the eager one operation for operation, so the two must agree closely whatever the number type. A
lazy pass rounds otherwise, and a deep model in half precision drifts: of each of its layers, what must agree is the
mask, and the recomputed weights with the context that the layer really had.

Queries that are padding are left out: what becomes of a query that sees nothing is up to the implementation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.huggingface import dispatch
from attnlab.huggingface.capture import watch
from attnlab.recording.tolerance import difference
from attnlab.records.record import KINDS, Layer, Record


def prove(model: Any, batch: Mapping[str, Tensor], lazy: bool) -> None:
    """Refuse a model whose watched pass on this batch is not its own."""
    made, output = watch(model, batch)
    if dispatch.adaptation_of(model) is not None:
        check(made, output, dispatch.call(model, batch)[0])
        return
    with dispatch.switched(model, "eager"):
        own = dispatch.call(model, batch, output_attentions=True)
    check(made, output, own[0], attentions(own, made))
    if lazy:
        check_lazy(watch(model, batch, lazy=True)[0], made)


def attentions(output: Any, record: Record) -> list[Tensor]:
    """The weights that a model returned under output_attentions, one for each layer of the record, in its order."""
    single = output.get("attentions")
    lists = {
        "encoder-self": output.get("encoder_attentions") or single,
        "decoder-self": output.get("decoder_attentions") or single,
        "cross": output.get("cross_attentions"),
    }
    for kind in KINDS:
        there, here = len(lists[kind] or ()), len(record.kind(kind))
        if here and here != there:
            raise ValueError(
                f"the model returns {there} {kind} attentions and {here} were seen: they cannot be compared"
            )
    return [lists[layer.kind][layer.index] for layer in record.layers]


def check(record: Record, output: Tensor, own_output: Tensor, own_weights: Sequence[Tensor] = ()) -> None:
    """Refuse a record whose weights or contexts, or whose model's output, are not the model's own."""
    refusal = f"{record.meta['model']} cannot be recorded faithfully"
    for number, layer in enumerate(record.layers):
        if own_weights:
            ours, theirs = (_of_tokens(record, layer, x) for x in (layer.weights, own_weights[number]))
            compare(f"{refusal}: in {layer.name}, weights", ours, theirs)
        _check_context(record, layer, refusal)
    tokens = record.masks.get("target", record.masks.get("source"))
    if tokens is not None and tokens.shape == own_output.shape[:2]:
        output, own_output = output[tokens], own_output[tokens]
    compare(f"{refusal}: its output", output, own_output)


def check_lazy(lazy: Record, eager: Record) -> None:
    """Refuse a lazy record whose masks are not those of the eager one, or whose weights do not give its contexts."""
    refusal = f"{lazy.meta['model']} cannot be recorded lazily"
    for ours, theirs in zip(lazy.layers, eager.layers, strict=True):
        masks = [layer.mask.expand(layer.weights[:, :1].shape) for layer in (ours, theirs)]
        if not torch.equal(*(_of_tokens(eager, theirs, mask) for mask in masks)):
            raise ValueError(
                f"{refusal}: in {ours.name}, torch's fused attention is given another mask than the eager one"
            )
        _check_context(lazy, ours, refusal)


def compare(what: str, ours: Tensor, theirs: Tensor, rounding: float = 0.0) -> None:
    """Refuse tensors that differ by more than the number type excuses; rounding: how much more, relative to 1 + max."""
    if ours.shape != theirs.shape:
        raise ValueError(f"{what} would be of shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    error, allowed = difference(ours, theirs, rounding)
    if not error <= allowed:
        raise ValueError(f"{what} would differ from the model's own by {error:.2g}, and {allowed:.2g} is allowed")


def _check_context(record: Record, layer: Layer, refusal: str) -> None:
    made = _of_tokens(record, layer, layer.weights @ layer.values)
    compare(f"{refusal}: in {layer.name}, weights × values", made, _of_tokens(record, layer, layer.context))


def _of_tokens(record: Record, layer: Layer, x: Tensor) -> Tensor:
    """The rows (b,·,i,·) of queries that are tokens, not padding."""
    tokens = record.masks.get(KINDS[layer.kind][0])
    return x if tokens is None else x.transpose(1, 2)[tokens]
