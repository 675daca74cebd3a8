"""Prove that a Record shows what the model computes: compare it with the model's own eager attention.

A watched pass repeats the operations of the eager pass exactly, so the two must agree closely in any dtype. A lazy pass
rounds differently, and a deep model in half precision drifts. There, each layer's mask must equal the eager one, and
its recomputed weights must give the context of the pass.

Padding queries are not compared: implementations differ for a query that sees no key.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import dispatch, readers
from attnlab.huggingface.capture import record_pass
from attnlab.records.record import KINDS, Layer, Record
from attnlab.records.tolerance import measure_difference


def prove_model(model: Any, batch: Mapping[str, Tensor], lazy: bool) -> None:
    """Raise ValueError if the watched pass on this batch differs from the model's own."""
    record, output = record_pass(model, batch)
    if dispatch.find_adaptation(model) is not None:
        check_record(record, output, dispatch.run_forward(model, batch)[0])
        return
    with dispatch.switch_attention(model, "eager"), watch_attentions(model, record) as weights:
        own = dispatch.run_forward(model, batch, output_attentions=True)
    check_record(record, output, own[0], check_attentions(weights, own, record))
    if lazy:
        check_lazy_record(record_pass(model, batch, lazy=True)[0], record)


@contextmanager
def watch_attentions(model: nn.Module, record: Record) -> Iterator[list[Tensor | None]]:
    """Yield a list that gets the weights that each attention module of the record returns, in the order they run.

    None: the module returns no weights by its nature, as linear attention.
    """
    weights: list[Tensor | None] = []

    def note(module: nn.Module, _args: Any, output: Any) -> None:
        reader = readers.find_reader(module)
        if reader is not None and not reader.returns_weights:
            weights.append(None)
            return
        parts = output if isinstance(output, tuple | list) else (output,)
        found = next((x for x in reversed(parts[1:]) if isinstance(x, Tensor) and x.dim() == 4), None)
        if found is None:
            raise ValueError(f"{names[module]} returns no weights to compare with, so it cannot be recorded")
        weights.append(found if reader is None or reader.combine is None else reader.combine(module, found))

    names = {module: name for name, module in model.named_modules()}
    wanted = {layer.name for layer in record.layers}
    with ExitStack() as stack:
        for module, name in names.items():
            if name in wanted:
                stack.callback(module.register_forward_hook(note).remove)
        yield weights


def check_attentions(weights: list[Tensor | None], output: Any, record: Record) -> list[Tensor | None]:
    """Raise ValueError if the model has more attention than the record. Return the weights."""
    single = output.get("attentions")
    lists = {
        "encoder-self": output.get("encoder_attentions") or single,
        "decoder-self": output.get("decoder_attentions") or single,
        "cross": output.get("cross_attentions"),
    }
    for kind in KINDS:
        returned, recorded = sum(x is not None for x in lists[kind] or ()), len(record.kind(kind))
        if recorded < returned and (recorded or single is None):
            raise ValueError(
                f"the model returns {returned} {kind} attentions, but only {recorded} of them can be recorded: the "
                "others, such as linear attention, compute weights in their own code"
            )
    if len(weights) != len(record.layers):
        raise ValueError(f"the record has {len(record.layers)} layers, but the model attends {len(weights)} times")
    return weights


def check_record(record: Record, output: Tensor, own_output: Tensor, own_weights: Sequence[Tensor | None] = ()) -> None:
    """Raise ValueError if weights, contexts or the output of a recorded pass differ from the model's own."""
    refusal = f"{record.meta['model']} cannot be recorded faithfully"
    for number, layer in enumerate(record.layers):
        if own_weights and (own := own_weights[number]) is not None:
            ours, theirs = (_drop_padding(record, layer, x) for x in (layer.weights, own))
            check_close(f"{refusal}: in {layer.name}, weights", ours, theirs)
        _check_context(record, layer, refusal)
    tokens = record.masks.get("target", record.masks.get("source"))
    if tokens is not None and tokens.shape == own_output.shape[:2]:
        output, own_output = output[tokens], own_output[tokens]
    check_close(f"{refusal}: its output", output, own_output)


def check_lazy_record(lazy: Record, eager: Record) -> None:
    """Raise ValueError if a lazy record has other masks than the eager one, or weights that contradict its contexts."""
    refusal = f"{lazy.meta['model']} cannot be recorded lazily"
    for ours, theirs in zip(lazy.layers, eager.layers, strict=True):
        masks = [
            layer.see(0, layer.context.shape[2]).expand(len(layer.context), -1, -1, -1) for layer in (ours, theirs)
        ]
        if not torch.equal(*(_drop_padding(eager, theirs, mask) for mask in masks)):
            raise ValueError(f"{refusal}: in {ours.name}, fused attention gets another mask than eager attention")
        _check_context(lazy, ours, refusal)


def check_close(what: str, ours: Tensor, theirs: Tensor, rounding: float = 0.0) -> None:
    """Raise ValueError if tensors differ by more than the dtype's tolerance plus rounding, relative to 1 + max."""
    if ours.shape != theirs.shape:
        raise ValueError(f"{what} would have shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    error, allowed = measure_difference(ours, theirs, rounding)
    if not error <= allowed:
        raise ValueError(f"{what} would differ from the model's own by {error:.2g} (allowed: {allowed:.2g})")


def _check_context(record: Record, layer: Layer, refusal: str) -> None:
    context = _drop_padding(record, layer, layer.weights @ layer.values)
    check_close(f"{refusal}: in {layer.name}, weights × values", context, _drop_padding(record, layer, layer.context))


def _drop_padding(record: Record, layer: Layer, x: Tensor) -> Tensor:
    """Return the rows (b,·,i,·) of queries that are not padding. The patches of a picture have no padding."""
    tokens = record.masks.get(KINDS[layer.kind][0])
    return x if tokens is None or tokens.shape != (len(x), x.shape[2]) else x.transpose(1, 2)[tokens]
